# SPDX-License-Identifier: Apache-2.0
"""The checkpoint file: restarts, reboots, crashes and damage."""

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
from hypothesis import given
from hypothesis import strategies as st

from cyborg.agent import state_file
from cyborg.agent.jobs.checkpoint import MAX_ENTRIES, RETENTION, Checkpoint, CheckpointState

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
    return [str(entry.state) if entry else None for entry in map(opened.get, jobs)]


def test_checkpoint_reopened_has_recorded_states(path: Path, boot: Path, clock: Clock) -> None:
    first = Checkpoint(path, boot, clock)
    first.record("a", "prepare", CheckpointState.STARTED)
    first.record("b", "release", CheckpointState.FAILED, "it broke")
    assert not path.exists(), "nothing is written before the flush"
    first.flush()
    second = Checkpoint(path, boot, clock)
    assert states(second, "a", "b", "c") == ["started", "failed", None]
    assert json.loads(path.read_text())["data"] == {
        "boot_id": "boot-1",
        "jobs": {
            "a": {"kind": "prepare", "state": "started", "error": None, "at": DAY_ONE},
            "b": {"kind": "release", "state": "failed", "error": "it broke", "at": DAY_ONE},
        },
    }


def test_checkpoint_file_is_private(path: Path, boot: Path) -> None:
    opened = Checkpoint(path, boot)
    opened.record("a", "prepare", CheckpointState.STARTED)
    opened.flush()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_checkpoint_after_reboot_is_empty(path: Path, boot: Path) -> None:
    first = Checkpoint(path, boot)
    first.record("a", "prepare", CheckpointState.COMPLETED)
    first.flush()
    boot.write_text("boot-2\n")
    second = Checkpoint(path, boot)
    assert states(second, "a") == [None]
    second.record("b", "prepare", CheckpointState.STARTED)
    second.flush()
    assert set(json.loads(path.read_text())["data"]["jobs"]) == {"b"}


def test_checkpoint_unreadable_boot_id_is_empty(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Checkpoint(path, tmp_path / "none")
    first.record("a", "prepare", CheckpointState.COMPLETED)
    first.flush()
    assert states(Checkpoint(path, tmp_path / "none"), "a") == [None]
    assert "Cannot read the host's boot id" in caplog.text


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
def test_checkpoint_malformed_file_is_quarantined(
    path: Path, boot: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    opened = Checkpoint(path, boot)
    assert states(opened, "a") == [None]
    assert not path.exists()
    assert path.with_name("jobs-h.json.broken").read_bytes() == text
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_checkpoint_unreadable_file_is_ignored(path: Path, boot: Path) -> None:
    path.mkdir(parents=True)
    opened = Checkpoint(path, boot)
    opened.record("a", "prepare", CheckpointState.STARTED)
    opened.flush()
    assert states(Checkpoint(path, boot), "a") == ["started"]


def test_flush_write_error_raises(path: Path, boot: Path) -> None:
    path.parent.parent.mkdir(parents=True)
    path.parent.write_text("no folder")
    opened = Checkpoint(path, boot)
    opened.record("a", "prepare", CheckpointState.STARTED)
    with pytest.raises(OSError, match="agent"):
        opened.flush()
    path.parent.unlink()
    opened.flush()
    assert states(Checkpoint(path, boot), "a") == ["started"]


def test_flush_old_ended_jobs_are_dropped(path: Path, boot: Path, clock: Clock) -> None:
    opened = Checkpoint(path, boot, clock)
    opened.record("done", "prepare", CheckpointState.COMPLETED)
    opened.record("begun", "prepare", CheckpointState.STARTED)
    clock.now += RETENTION
    opened.record("new", "prepare", CheckpointState.COMPLETED)
    opened.flush()
    assert states(opened, "done", "begun", "new") == [None, "started", "completed"]


def test_flush_too_many_jobs_drops_oldest_ended_first(path: Path, boot: Path, clock: Clock) -> None:
    opened = Checkpoint(path, boot, clock)
    opened.record("begun", "prepare", CheckpointState.STARTED)
    for number in range(MAX_ENTRIES + 1):
        clock.now += 1
        opened.record(str(number), "prepare", CheckpointState.COMPLETED)
    opened.flush()
    assert states(opened, "begun", "0", "1", "2") == ["started", None, None, "completed"]
    assert len(json.loads(path.read_text())["data"]["jobs"]) == MAX_ENTRIES


def test_record_from_many_threads_keeps_all(path: Path, boot: Path) -> None:
    opened = Checkpoint(path, boot)
    missing: list[str] = []

    def work(name: str) -> None:
        for number in range(10):
            job = f"{name}{number}"
            opened.record(job, "prepare", CheckpointState.COMPLETED)
            opened.flush()
            if job not in json.loads(path.read_text())["data"]["jobs"]:
                missing.append(job)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert missing == []
    assert len(json.loads(path.read_text())["data"]["jobs"]) == 40


class Crash(Exception):
    """The power went."""


class Os:
    """The ``os`` module with a power failure at one call.

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
        """Close the open descriptors."""
        for file in self._unsynced:
            os.close(file)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(list(CheckpointState)), st.none() | st.text()
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 40),
    st.integers(0, 200),
)
def test_atomic_write_crash_at_any_call_leaves_complete_file(
    notes: list[Any], calls: int, kept_bytes: int
) -> None:
    """Crash at each system call; then a new incarnation reads the file."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        boot, path = Path(folder, "boot_id"), Path(folder, "agent", "jobs-h.json")
        boot.write_text("boot-1")
        opened, power = Checkpoint(path, boot, lambda: DAY_ONE), Os(calls, kept_bytes)
        patch.setattr(state_file, "os", power)
        contents: list[dict[str, Any]] = [{}]
        possible = 2  # the last two of them
        try:
            for job, state, error in notes:
                opened.record(job, "prepare", state, error)
                contents.append({**contents[-1], job: (state, error)})
                opened.flush()
            possible = 1
        except Crash:
            pass
        restarted = Checkpoint(path, boot, lambda: DAY_ONE)
        entries = {j: (e.state, e.error) for j in "abc" if (e := restarted.get(j)) is not None}
        assert entries in contents[-possible:]
        assert not path.with_name("jobs-h.json.broken").exists()
        power.off()
