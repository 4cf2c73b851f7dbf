# SPDX-License-Identifier: Apache-2.0
"""The copy of a download into a file: its progress in the log and its deadline."""

import hashlib
import logging
from pathlib import Path

import pytest

from cyborg.agent.images.store import Deadline, copy, is_intact
from cyborg.core.errors import TimedOut
from cyborg.core.image import ImageMetadata, parse_metadata
from cyborg.core.jobs.progress import Activity, ActivityRecorder

UUID = "4d5b0d6a-8f8c-4f67-9f4e-3f2d1c0b9a87"
DATA = b"x" * 1000


class Clock:
    """A clock that moves by ``step`` seconds at each look."""

    def __init__(self, step: float) -> None:
        self._step = step
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._step
        return self._now


def metadata() -> ImageMetadata:
    digest = hashlib.sha512(DATA).hexdigest()
    return parse_metadata(
        {"id": UUID, "size": len(DATA), "os_hash_algo": "sha512", "os_hash_value": digest}
    )


def test_activity_of_the_job_shows_the_written_bytes(tmp_path: Path) -> None:
    recorder, seen = ActivityRecorder(), []
    with recorder.record(), (tmp_path / "file").open("w+b") as file:
        chunks = [DATA[:400], DATA[400:]]
        copy(metadata(), chunks, file.fileno(), lambda: seen.append(recorder.current))
        assert recorder.current is None
        file.seek(0)
        assert is_intact(metadata(), file.fileno())
    fetch = f"fetch image {UUID}"
    assert seen == [Activity(fetch, 0, len(DATA)), Activity(fetch, 400, len(DATA))]


def test_progress_is_logged_at_most_every_five_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = [DATA[:100]] * 10
    with caplog.at_level(logging.INFO), (tmp_path / "file").open("wb") as file:
        copy(metadata(), chunks, file.fileno(), lambda: None, Clock(2.0))
    assert (tmp_path / "file").read_bytes() == DATA
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"Downloading image, {n} % of 1000 bytes" for n in (30, 60, 90)]
    assert caplog.records[0].__dict__["extra"] == {"image": UUID}


def test_deadline_that_has_passed_raises() -> None:
    deadline = Deadline(5.0, Clock(2.0))
    deadline.check()
    deadline.check()
    with pytest.raises(TimedOut, match=r"not complete in 5 s; .*\[glance\] download_timeout"):
        deadline.check()
    assert deadline.left() == 0.0
