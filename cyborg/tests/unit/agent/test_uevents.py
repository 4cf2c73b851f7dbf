# SPDX-License-Identifier: Apache-2.0
"""The ear on this machine's own kernel, as far as nothing need happen there.

What it hears, and that it notices what it missed, is tried in the lab.
"""

import os
import threading

import pytest

from cyborg.agent.uevents import KernelEar
from cyborg.fixtures.drivers import LONG


@pytest.fixture
def ear() -> KernelEar:
    # A subsystem that no kernel has: whatever happens on this machine is not heard.
    return KernelEar({"cyborg-test"})


def test_silence_ends_when_it_should(ear: KernelEar) -> None:
    assert ear.hear(0) == []
    assert ear.hear(0.001) == []
    ear.close()


def test_a_wake_ends_the_wait_of_another_thread(ear: KernelEar) -> None:
    heard: list[list[str]] = []
    thread = threading.Thread(target=lambda: heard.append(ear.hear(None)), daemon=True)
    thread.start()
    ear.wake()
    thread.join(LONG)
    assert heard == [[]]
    ear.close()


def test_wakes_that_nobody_hears_do_not_block(ear: KernelEar) -> None:
    for _ in range(70_000):  # more than a pipe holds
        ear.wake()
    assert ear.hear(None) == []
    ear.close()


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        KernelEar({"cyborg-test"}).close()
    assert len(os.listdir("/proc/self/fd")) == before
