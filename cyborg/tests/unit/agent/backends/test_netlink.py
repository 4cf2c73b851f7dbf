# SPDX-License-Identifier: Apache-2.0
"""The netlink source on the kernel of this machine, without any event.

Events and overflows are tested in the lab.
"""

import errno
import os
import threading

import pytest

from cyborg.agent.backends.uevents import NetlinkSource
from cyborg.tests.fixtures.hosts.scripted_driver import LONG


@pytest.fixture
def source() -> NetlinkSource:
    # A subsystem that no kernel has: whatever happens on this machine is not received.
    return NetlinkSource({"cyborg-test"})


def test_read_without_events_returns_after_timeout(source: NetlinkSource) -> None:
    assert source.read(0) == []
    assert source.read(0.001) == []
    source.close()


def test_wake_ends_read_of_another_thread(source: NetlinkSource) -> None:
    received: list[list[str]] = []
    thread = threading.Thread(target=lambda: received.append(source.read(None)), daemon=True)
    thread.start()
    source.wake()
    thread.join(LONG)
    assert received == [[]]
    source.close()


def test_wake_repeated_does_not_block(source: NetlinkSource) -> None:
    for _ in range(70_000):  # more than a pipe holds
        source.wake()
    assert source.read(None) == []
    source.close()


@pytest.mark.parametrize("is_root", [True, False])
def test_close_releases_descriptors(
    is_root: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(monitor: object, size: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    caplog.set_level("INFO")
    if not is_root:
        monkeypatch.setattr("pyudev.Monitor.set_receive_buffer_size", refuse)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        NetlinkSource({"cyborg-test"}).close()
    assert len(os.listdir("/proc/self/fd")) == before
