# SPDX-License-Identifier: Apache-2.0
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cyborg.core.errors import TimedOut, Unavailable
from cyborg.threads.calls import TimedCalls


def test_result_and_exception_are_those_of_the_function() -> None:
    calls = TimedCalls("libvirt", 30.0)
    assert calls.run(lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0)
    assert calls.run(lambda: None) is None


def test_hanging_call_fails_and_holds_up_only_others_until_it_returns() -> None:
    calls, release, ended = TimedCalls("libvirt", 0.05), threading.Event(), threading.Event()

    def hang() -> None:
        release.wait(30)
        ended.set()

    with pytest.raises(TimedOut, match=r"libvirt did not answer in 0.05 s"):
        calls.run(hang)
    with pytest.raises(Unavailable, match="has not answered for"):
        calls.run(lambda: pytest.fail("a call must not overtake one that hangs"))
    release.set()
    assert ended.wait(120)
    found = None
    while found is None:  # its thread ends some moments after its work
        try:
            found = calls.run(lambda: 1)
        except Unavailable:
            continue
    assert found == 1


@pytest.mark.slow
def test_calls_of_several_threads_run_one_at_a_time() -> None:
    calls, running, most = TimedCalls("libvirt", 30.0), 0, 0
    overlap = threading.Event()

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running > 1:
            overlap.set()
        overlap.wait(0.02)  # other threads run meanwhile
        running -= 1

    with ThreadPoolExecutor(8) as pool:
        for result in [pool.submit(calls.run, work) for _ in range(20)]:
            result.result()
    assert most == 1
