# SPDX-License-Identifier: Apache-2.0
"""A cached value: its age, its errors, and callers that come together."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cyborg.core.errors import Unavailable
from cyborg.threads import locks
from cyborg.threads.locks import CachedValue


def test_value_is_read_again_after_its_maximum_age() -> None:
    now, reads = [0.0], iter(range(10))
    value = CachedValue(lambda: next(reads), 2.0, lambda: now[0])
    found = []
    for now[0] in (0.0, 1.9, 2.0, 3.9, 4.0):
        found.append(value.get())
    assert found == [0, 0, 1, 1, 2]


def test_error_is_not_cached() -> None:
    reads = itertools.count()

    def read() -> str:
        if next(reads) == 0:
            raise Unavailable("no database")
        return "found"

    value = CachedValue(read, 60.0)
    with pytest.raises(Unavailable):
        value.get()
    assert value.get() == "found"


def test_callers_that_come_together_cause_one_read() -> None:
    started, go_on, reads = threading.Event(), threading.Event(), []

    def read() -> int:
        reads.append(1)
        started.set()
        assert go_on.wait(30)
        return len(reads)

    value = CachedValue(read, 60.0)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(value.get) for _ in range(8)]
        assert started.wait(30)
        go_on.set()
        assert [call.result() for call in calls] == [1] * 8


def test_callers_that_wait_for_a_slow_read_take_its_value() -> None:
    callers: set[int] = set()
    reads: list[int] = []
    now, all_called = [0.0], threading.Event()

    def clock() -> float:
        callers.add(threading.get_ident())
        if len(callers) == 4:
            all_called.set()
        return now[0]

    def read() -> int:
        assert all_called.wait(30)
        now[0] += 9.0
        reads.append(1)
        return len(reads)

    value = CachedValue(read, 5.0, clock)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(value.get) for _ in range(4)]
        assert [call.result() for call in calls] == [1] * 4
    # For a later call the value is too old.
    assert value.get() == 2


def test_caller_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "MAX_WAIT", 0.05)
    started, go_on = threading.Event(), threading.Event()

    def read() -> int:
        started.set()
        assert go_on.wait(30)
        return 7

    value = CachedValue(read, 60.0)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(value.get)
        assert started.wait(30)
        with pytest.raises(Unavailable, match="retry later"):
            value.get()
        go_on.set()
        assert call.result() == 7
