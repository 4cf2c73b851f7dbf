# SPDX-License-Identifier: Apache-2.0
import threading

import pytest

from cyborg.core.errors import Invalid, TimedOut, Unavailable
from cyborg.threads.calls import BoundedCalls


def fail() -> None:
    raise Invalid("wrong")


def test_call_returns_the_result_or_raises_the_error() -> None:
    calls = BoundedCalls("test", 1)
    assert calls.call(lambda: 5, 10) == 5
    for _ in range(3):
        with pytest.raises(Invalid, match="wrong"):
            calls.call(fail, 10)
    assert calls.call(lambda: "again", 10) == "again"


def test_call_past_its_deadline_keeps_its_place_until_it_returns() -> None:
    calls, gate = BoundedCalls("test", 1), threading.Event()
    with pytest.raises(TimedOut, match=r"no answer in 0\.01 s"):
        calls.call(gate.wait, 0.01)
    with pytest.raises(Unavailable, match="1 other calls are in progress"):
        calls.call(lambda: 5, 0)
    gate.set()
    assert calls.call(lambda: 5, 10) == 5


def test_call_that_cannot_start_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = BoundedCalls("test", 1)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(2):
            with pytest.raises(Unavailable, match="no thread can start"):
                calls.call(lambda: 5, 10)
    assert calls.call(lambda: 5, 10) == 5
