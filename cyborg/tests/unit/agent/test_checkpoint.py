# SPDX-License-Identifier: Apache-2.0
"""The file of jobs: what survives what."""

import functools
import json
import logging
import os
import stat
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyborg.agent import durable
from cyborg.agent.checkpoint import KEEP, MOST, Checkpoint, Step

DAY_ONE = 1_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = DAY_ONE

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def boot(tmp_path: Path) -> Path:
    path = tmp_path / "boot_id"
    path.write_text("boot-1\n")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "agent" / "jobs-h.json"


def states(opened: Checkpoint, *jobs: str) -> list[str | None]:
    return [entry and str(entry.state) for entry in map(opened.get, jobs)]


def test_what_was_noted_is_there_in_the_next_life(path: Path, boot: Path, clock: Clock) -> None:
    first = Checkpoint(path, boot, clock)
    first.note("a", "prepare", Step.STARTED)
    first.note("b", "release", Step.FAILED, "it broke")
    assert not path.exists(), "nothing is written before the flush"
    first.flush()
    second = Checkpoint(path, boot, clock)
    assert states(second, "a", "b", "c") == ["started", "failed", None]
    assert json.loads(path.read_text()) == {
        "boot_id": "boot-1",
        "jobs": {
            "a": {"kind": "prepare", "state": "started", "error": None, "at": DAY_ONE},
            "b": {"kind": "release", "state": "failed", "error": "it broke", "at": DAY_ONE},
        },
    }


def test_nobody_else_reads_it(path: Path, boot: Path) -> None:
    opened = Checkpoint(path, boot)
    opened.note("a", "prepare", Step.STARTED)
    opened.flush()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_boot_makes_it_void(path: Path, boot: Path) -> None:
    first = Checkpoint(path, boot)
    first.note("a", "prepare", Step.COMPLETED)
    first.flush()
    boot.write_text("boot-2\n")
    second = Checkpoint(path, boot)
    assert states(second, "a") == [None]
    second.note("b", "prepare", Step.STARTED)
    second.flush()
    assert set(json.loads(path.read_text())["jobs"]) == {"b"}


def test_without_a_boot_id_every_life_is_a_boot(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Checkpoint(path, tmp_path / "none")
    first.note("a", "prepare", Step.COMPLETED)
    first.flush()
    assert states(Checkpoint(path, tmp_path / "none"), "a") == [None]
    assert "boot id cannot be read" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"boot_id": "boot-1", "jobs": []}',
        b'{"boot_id": "boot-1", "jobs": {"a": {"kind": "prepare"}}}',
        b'{"boot_id": "boot-1", "jobs": {"a": 7}}',
        b'{"boot_id": "boot-1", "jobs": {"a": '
        b'{"kind": "prepare", "state": "levitating", "error": null, "at": 1}}}',
    ],
)
def test_a_broken_file_is_put_aside(
    path: Path, boot: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    opened = Checkpoint(path, boot)
    assert states(opened, "a") == [None]
    assert not path.exists()
    assert path.with_name("jobs-h.json.broken").read_bytes() == text
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_a_file_that_cannot_be_read_stops_nothing(path: Path, boot: Path) -> None:
    path.mkdir(parents=True)
    opened = Checkpoint(path, boot)
    opened.note("a", "prepare", Step.STARTED)
    opened.flush()
    assert states(Checkpoint(path, boot), "a") == ["started"]


def test_a_disk_that_takes_nothing_is_told(path: Path, boot: Path) -> None:
    path.parent.parent.mkdir(parents=True)
    path.parent.write_text("no folder")
    opened = Checkpoint(path, boot)
    opened.note("a", "prepare", Step.STARTED)
    with pytest.raises(OSError, match="agent"):
        opened.flush()
    path.parent.unlink()
    opened.flush()
    assert states(Checkpoint(path, boot), "a") == ["started"]


def test_what_ended_a_day_ago_is_forgotten(path: Path, boot: Path, clock: Clock) -> None:
    opened = Checkpoint(path, boot, clock)
    opened.note("done", "prepare", Step.COMPLETED)
    opened.note("begun", "prepare", Step.STARTED)
    clock.now += KEEP
    opened.note("new", "prepare", Step.COMPLETED)
    opened.flush()
    assert states(opened, "done", "begun", "new") == [None, "started", "completed"]


def test_beyond_the_bound_the_oldest_that_ended_go_first(
    path: Path, boot: Path, clock: Clock
) -> None:
    opened = Checkpoint(path, boot, clock)
    opened.note("begun", "prepare", Step.STARTED)
    for number in range(MOST + 1):
        clock.now += 1
        opened.note(str(number), "prepare", Step.COMPLETED)
    opened.flush()
    assert states(opened, "begun", "0", "1", "2") == ["started", None, None, "completed"]
    assert len(json.loads(path.read_text())["jobs"]) == MOST


def test_many_threads_lose_nothing(path: Path, boot: Path) -> None:
    opened = Checkpoint(path, boot)
    missing: list[str] = []

    def work(name: str) -> None:
        for number in range(10):
            job = f"{name}{number}"
            opened.note(job, "prepare", Step.COMPLETED)
            opened.flush()
            if job not in json.loads(path.read_text())["jobs"]:
                missing.append(job)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert missing == []
    assert len(json.loads(path.read_text())["jobs"]) == 40


class Crash(Exception):
    """The power went."""


class Os:
    """The operating system until the power goes, which it does at some call.

    What was written but not synced is then cut off somewhere, under whatever name it has by then.
    """

    def __init__(self, calls: int, kept: int) -> None:
        self._left, self._kept = calls, kept
        self._unsynced: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return functools.partial(self._call, name, real) if callable(real) else real

    def _call(self, name: str, real: Any, *arguments: Any, **more: Any) -> Any:
        if self._left == 0:
            for file in self._unsynced:
                os.truncate(f"/proc/self/fd/{file}", self._kept)
            raise Crash
        self._left -= 1
        if name == "write":
            self._unsynced.add(arguments[0])
        if name == "fsync":
            self._unsynced.discard(arguments[0])
        if name == "close" and arguments[0] in self._unsynced:
            return None  # it can still be lost
        return real(*arguments, **more)

    def off(self) -> None:
        """Close what was left open."""
        for file in self._unsynced:
            os.close(file)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(list(Step)), st.none() | st.text()),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 40),
    st.integers(0, 200),
)
def test_wherever_it_is_cut_off_a_whole_file_is_left(
    notes: list[Any], calls: int, kept: int
) -> None:
    """Every call of the operating system may be the last; then a new life reads the file."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        boot, path = Path(folder, "boot_id"), Path(folder, "agent", "jobs-h.json")
        boot.write_text("boot-1")
        opened, power = Checkpoint(path, boot, lambda: DAY_ONE), Os(calls, kept)
        patch.setattr(durable, "os", power)
        written: list[dict[str, Any]] = [{}]
        possible = 2  # the last two of them
        try:
            for job, state, error in notes:
                opened.note(job, "prepare", state, error)
                written.append({**written[-1], job: (state, error)})
                opened.flush()
            possible = 1
        except Crash:
            pass
        again = Checkpoint(path, boot, lambda: DAY_ONE)
        found = {j: (e.state, e.error) for j in "abc" if (e := again.get(j)) is not None}
        assert found in written[-possible:]
        assert not path.with_name("jobs-h.json.broken").exists()
        power.off()
