# SPDX-License-Identifier: Apache-2.0
"""Locks of cards, and threads that read or get the same card."""

import concurrent.futures
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.drivers.base import VolatileMemory
from cyborg.drivers.gpu import card_locks
from cyborg.drivers.gpu.card_locks import READ_TIMEOUT, locked
from cyborg.drivers.gpu.facts import FactsReader
from cyborg.drivers.kernel.nvml import GpuFacts
from cyborg.drivers.sysfs import PciFunction, Sysfs
from cyborg.testing.vgpu_host import SimulatedVgpuHost
from cyborg.tests.fixtures.machine.processes import ends_within
from cyborg.tests.unit.drivers.gpu.simulated_gpu import changing
from cyborg.tests.unit.drivers.gpu.simulated_vgpus import CARD, host

__all__ = ["host"]


def test_job_does_not_wait_for_a_card_that_another_one_has_had_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would take a thread that the jobs of other cards need."""
    seconds = 0.0
    monkeypatch.setattr(card_locks, "_clock", lambda: seconds)
    with changing(CARD) as end:
        seconds = READ_TIMEOUT
        # A wait would take READ_TIMEOUT.
        with ends_within(READ_TIMEOUT / 6):
            for _ in range(2):
                with pytest.raises(DriverFailed, match="being changed by another"), locked(CARD):
                    pass
        end()
    with locked(CARD):
        pass
    # A holder that has had it for a short time is waited for.
    with changing(CARD) as end:
        seconds += READ_TIMEOUT - 1.0
        timer = threading.Timer(0.05, end)
        timer.start()
        with locked(CARD):
            timer.join()


def unbind(reader: FactsReader, card: PciFunction) -> None:
    """Let the reader see a card while a server may use it."""
    reader.read(replace(card, kernel_driver="vfio-pci"), VolatileMemory())


@pytest.mark.parametrize(
    ("change", "has_owner"),
    [
        (lambda reader, card: reader.forget(card.address), False),
        (lambda reader, card: reader.forget(card.address), True),
        (unbind, False),
    ],
    ids=["forgotten", "forgotten-with-owner", "unbound"],
)
def test_card_that_changes_while_another_thread_reads_it_is_read_again(
    host: SimulatedVgpuHost, change: Callable[[FactsReader, PciFunction], None], has_owner: bool
) -> None:
    """What the other thread reads is from before the change."""
    is_reading, may_continue = threading.Event(), threading.Event()

    def read(address: str) -> GpuFacts | None:
        found = host.read_facts(address)
        is_reading.set()
        assert may_continue.wait(60)
        return found

    card = Sysfs(host.root).pci_function(CARD)
    assert card is not None
    memory = VolatileMemory()
    reader = FactsReader(read, has_owner=lambda address: has_owner)
    reader.forget(CARD)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.read, card, memory)
        assert is_reading.wait(60)
        host.request_mig_mode(CARD, enable=True)
        change(reader, card)
        may_continue.set()
        assert reading.result(60).mig == "disabled"
    assert reader.is_due(card)
    assert reader.read(card, memory).in_mig_mode
    assert not reader.is_due(card)
    assert host.opens == [CARD, CARD]


@pytest.mark.parametrize("is_readable", [True, False])
def test_card_that_a_server_gets_before_it_is_locked_is_not_opened(
    host: SimulatedVgpuHost, is_readable: bool
) -> None:
    card, memory = Sysfs(host.root).pci_function(CARD), VolatileMemory()
    assert card is not None
    owned = is_asked = False

    def prepare() -> None:
        nonlocal owned
        with locked(CARD):
            reader.expire(CARD)
            reader.read(card, memory)
            owned = True

    def has_owner(address: str) -> bool:
        nonlocal is_asked
        found = owned
        if not is_asked:
            is_asked = True
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(prepare).result(60)
        return found

    def read(address: str) -> GpuFacts | None:
        facts = host.read_facts(address)
        return facts if is_readable else None

    reader = FactsReader(read, has_owner=has_owner)
    assert (reader.find(card, memory) == GpuFacts()) is not is_readable
    assert host.opens == [CARD], "by the preparation only"
