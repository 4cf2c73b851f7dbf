# SPDX-License-Identifier: Apache-2.0
"""Threads that run work in rounds."""

import threading

import pytest

from cyborg.threads import periodic as loop
from cyborg.threads.periodic import LoopThread


class Faulty(LoopThread):
    """A thread whose first round raises."""

    def __init__(self) -> None:
        super().__init__("faulty")
        self.rounds = 0
        self.second_round = threading.Event()

    def run_once(self) -> None:
        self.rounds += 1
        if self.rounds == 1:
            raise KeyError("interval")
        self.second_round.set()


def test_error_of_a_round_is_logged_and_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "ERROR_PAUSE", 0.01)
    thread = Faulty()
    thread.start()
    assert thread.second_round.wait(120)
    thread.stop()
    assert thread.join(120)
    (record,) = (r for r in caplog.records if r.exc_info)
    assert record.getMessage() == "Unexpected error in thread faulty"
