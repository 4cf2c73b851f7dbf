# SPDX-License-Identifier: Apache-2.0
"""The daemons that the tests start: their end is noticed, in each thread."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine.processes import (
    MAX_LOGS,
    Daemon,
    ends_within,
    limit_waits,
    wait_until,
)
from cyborg.tests.fixtures.machine.tiers import scale


def program(text: str, folder: Path, *, may_end: bool = False) -> Daemon:
    """Return a daemon that runs a Python program."""
    (folder / "ending_program.py").write_text(text)
    command = [sys.executable, "-m", "ending_program"]
    return Daemon("ending", command, folder, {"PYTHONPATH": str(folder)}, may_end=may_end)


def running_program(folder: Path) -> Daemon:
    """Return a daemon that has printed a line, and does not end."""
    daemon = program("print('still here', flush=True); import signal; signal.pause()", folder)
    daemon.start()
    wait_until("it has printed", daemon.tail)
    return daemon


@pytest.mark.parametrize(
    "text",
    [
        "print('good bye')",
        "print('good bye', flush=True); import os; os.kill(os.getpid(), 9)",
        "raise SystemExit('good bye')",
    ],
)
def test_wait_for_a_daemon_that_has_ended_fails_at_once(text: str, tmp_path: Path) -> None:
    daemon = program(text, tmp_path)
    questions: list[str] = []
    daemon.start()
    wait_until("it has ended", daemon.has_ended)
    with pytest.raises(AssertionError, match="ending has ended, before: it works") as raised:
        wait_until("it works", lambda: questions.append("does it?"))
    assert len(questions) == 1
    assert "good bye" in str(raised.value)


def test_wait_ends_before_the_limit_of_the_test_with_the_logs(tmp_path: Path) -> None:
    daemon = running_program(tmp_path)
    expected = r"after \d s \(limit of the test\): it works; last result False\n---- ending\n"
    # The shortest limit counts; it is not that of the next test.
    for _ in range(2):
        with (
            limit_waits(1.0),
            limit_waits(None),
            limit_waits(60.0),
            pytest.raises(AssertionError, match=expected) as raised,
        ):
            wait_until("it works", lambda: False)
        assert "still here" in str(raised.value)
    daemon.kill()


def time_out() -> str:
    """Return the message of a wait that has timed out."""
    with pytest.raises(AssertionError) as raised:
        wait_until("it works", lambda: False, 0.01)
    return str(raised.value)


def test_timeout_shows_a_daemon_that_has_ended_and_may(tmp_path: Path) -> None:
    daemon = program("print('good bye')", tmp_path, may_end=True)
    daemon.start()
    wait_until("it has ended", daemon.has_ended)
    assert "---- ending (has ended)\ngood bye" in time_out()
    again = program("import signal; signal.pause()", tmp_path, may_end=True)
    again.start()
    assert time_out().count("---- ending") == 1
    again.kill()
    assert "---- ending" not in time_out()


def test_timeout_names_the_daemons_whose_logs_are_too_many(tmp_path: Path) -> None:
    daemons = [
        Daemon(f"daemon-{number}", ["echo", f"I am {number}"], tmp_path, {}, may_end=True)
        for number in range(MAX_LOGS + 2)
    ]
    for daemon in daemons:
        daemon.start()
        wait_until("it has ended", daemon.has_ended)
    message = time_out()
    assert message.count("\n---- daemon-") == MAX_LOGS
    assert (
        "daemon-0 (has ended), daemon-1 (has ended)\n---- daemon-2 (has ended)\nI am 2\n" in message
    )
    assert "I am 1\n" not in message
    for daemon in daemons:
        daemon.stop()


def test_wait_in_a_test_without_limit_ends_after_its_own_time() -> None:
    with limit_waits(None), pytest.raises(AssertionError, match=r"timeout after \d+ s: it works"):
        wait_until("it works", lambda: False, 0.01)


def test_block_that_takes_longer_than_its_limit_fails() -> None:
    with ends_within(60):
        pass
    with pytest.raises(AssertionError, match=r" s instead of 0 s \* "), ends_within(0):
        pass


def test_threads_that_wait_for_a_forked_daemon_get_one_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "timeit", "-h"]
    daemon = Daemon("forked", command, tmp_path, {}, forked=True)
    for _ in range(max(4, scale(20))):
        daemon.start()
        wait: Callable[[float], int] = daemon.wait
        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(wait, 30.0) for _ in range(4)]
        assert [future.result() for future in found] == [0] * 4
