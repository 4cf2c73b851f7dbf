# SPDX-License-Identifier: Apache-2.0
"""The MIG mode of whole cards that another program switches, and when it is read."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Memory, VolatileMemory
from cyborg.drivers.gpu import card_locks
from cyborg.drivers.gpu.card_locks import locked, locked_if_free
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.gpu.facts import SPAN
from cyborg.drivers.gpu.mig_modes import INTERVAL
from cyborg.drivers.host_use import domains
from cyborg.drivers.kernel.nvml import GpuFacts, MigMode
from cyborg.testing.vgpu_host import SimulatedVgpuHost, VgpuType
from cyborg.tests.unit.drivers.gpu.simulated_vgpus import (
    CARD,
    LARGE,
    discover,
    make_access,
    offered,
)

OTHER = "0000:61:00.0"  # a card of another backend
WHOLE = WorkItem("gpus", CARD, CARD, CARD)
TYPES = (LARGE, VgpuType(1501, "NVIDIA H200X-1-18C", 18, "1g.18gb"))
RULE = f"address={CARD},type=H200X-70C"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedVgpuHost:
    found = SimulatedVgpuHost(tmp_path)
    for address in (CARD, OTHER):
        found.add_card(address, TYPES, framebuffer=141)
    found.redirect(monkeypatch.setattr)
    return found


class Clock:
    """A clock on which each discovery is a minute after the last one, unless it stands."""

    def __init__(self) -> None:
        self.seconds, self.step = 0.0, INTERVAL

    def __call__(self) -> float:
        self.seconds += self.step
        return self.seconds


def make(
    host: SimulatedVgpuHost,
    rules: Sequence[str] = (),
    memory: Memory | None = None,
    clock: Clock | None = None,
    **changes: Any,
) -> GpuDriver:
    """Return a driver; ``changes`` are options, and functions of the access to its host."""
    parts = {name: changes.pop(name) for name in ("nvml", "mig_mode") if name in changes}
    options = {"devices": [f"address={CARD}"], "reset": "never", "vgpu_types": rules, **changes}
    access = replace(make_access(host), clock=clock or Clock(), **parts)
    driver = GpuDriver("gpus", options, host.root, access)
    if memory is not None:
        driver.memory = memory
    return driver


def switch(host: SimulatedVgpuHost, *, enable: bool) -> None:
    """Act as ``nvidia-smi -mig``."""
    host.request_mig_mode(CARD, enable=enable)


def bind(host: SimulatedVgpuHost, kernel_driver: str) -> None:
    """Act as libvirt at the start or the end of the server that has the card."""
    link = host.bus / CARD / "driver"
    link.unlink()
    link.symlink_to(host.root / "bus/pci/drivers" / kernel_driver)


def reason(driver: GpuDriver) -> str:
    return discover(driver).vendor_board_info.get(NOT_OFFERED, "")


@pytest.mark.parametrize(
    ("rules", "mixes", "remedy"),
    [
        ((), [], "is no whole card: disable the MIG mode (nvidia-smi -mig 0)"),
        ((RULE,), [], "is no whole card: disable the MIG mode (nvidia-smi -mig 0)"),
        ((RULE,), ["2xH200X-70C"], "whole card: apply the layout whole, or a mix, or disable"),
    ],
)
def test_discovery_withholds_a_card_while_another_program_has_it_in_mig_mode(
    host: SimulatedVgpuHost, rules: Sequence[str], mixes: list[str], remedy: str
) -> None:
    driver = make(host, rules, vgpu_layouts=mixes)
    for _ in range(2):
        assert offered(driver) == {CARD: [CARD]}
        switch(host, enable=True)
        assert offered(driver) == {}
        assert remedy in reason(driver)
        assert discover(driver).std_board_info["mig"] == "enabled"
        with pytest.raises(DriverFailed, match="it is in MIG mode"):
            driver.prepare(WHOLE, None)
        switch(host, enable=False)
    assert OTHER not in host.opens


def test_discovery_withholds_a_card_whose_mode_is_pending(host: SimulatedVgpuHost) -> None:
    host.cards[CARD].needs_reset = True
    driver = make(host)
    assert offered(driver) == {CARD: [CARD]}
    switch(host, enable=True)
    assert offered(driver) == {}
    assert "a change of its MIG mode is pending" in reason(driver)
    switch(host, enable=False)
    assert offered(driver) == {CARD: [CARD]}


def test_discovery_does_not_open_the_card_of_a_server(host: SimulatedVgpuHost) -> None:
    """Neither while its server is stopped, when the card is bound to its driver again."""
    memory = VolatileMemory()
    driver = make(host, memory=memory)
    discover(driver)
    driver.prepare(WHOLE, None)
    switch(host, enable=True)  # by the guest: the mode outlasts it
    host.opens.clear()
    for found in (driver, make(host, memory=memory)):
        for kernel_driver in ("nvidia", "vfio-pci", "nvidia"):
            bind(host, kernel_driver)
            assert offered(found) == {CARD: [CARD]}
        bind(host, "vfio-pci")
        found.prepare(WHOLE, None)
        bind(host, "nvidia")
    assert host.opens == []
    driver.release(WHOLE)
    assert offered(driver) == {}
    assert set(host.opens) == {CARD}


def test_discovery_does_not_open_the_card_of_a_server_whose_preparation_could_not_read_it(
    host: SimulatedVgpuHost,
) -> None:
    is_failing = False

    def read(address: str) -> GpuFacts | None:
        facts = host.read_facts(address)
        return None if is_failing else facts

    driver = make(host, nvml=read, mig_mode=lambda address: None)
    discover(driver)
    is_failing = True
    driver.prepare(WHOLE, None)
    host.opens.clear()
    assert offered(driver) == {CARD: [CARD]}
    assert host.opens == []
    driver.release(WHOLE)
    discover(driver)
    assert host.opens == [CARD]


def test_discovery_opens_a_card_once_a_minute(host: SimulatedVgpuHost) -> None:
    """Each start of a server triggers a discovery, and NVML may have to initialise the card."""
    clock = Clock()
    clock.step = 0.0
    driver = make(host, clock=clock)
    discover(driver)
    host.opens.clear()
    switch(host, enable=True)
    for _ in range(2):
        assert offered(driver) == {CARD: [CARD]}
    assert host.opens == []
    with pytest.raises(DriverFailed, match="it is in MIG mode"):
        driver.prepare(WHOLE, None)
    switch(host, enable=False)
    assert offered(driver) == {}, "as the preparation has read it"
    clock.seconds += INTERVAL
    assert offered(driver) == {CARD: [CARD]}


def test_discovery_reads_modes_for_some_seconds_and_the_next_one_continues(
    host: SimulatedVgpuHost,
) -> None:
    """Otherwise the discovery of many cards would exceed its timeout."""
    cards = [CARD, OTHER, *(f"0000:{bus}:00.0" for bus in (71, 81, 91))]
    for address in cards[2:]:
        host.add_card(address, TYPES, framebuffer=141)
    clock, read = Clock(), list[str]()
    clock.step = 0.0

    def read_slowly(address: str) -> tuple[str, bool] | None:
        read.append(address)
        clock.seconds += 3.0
        return None

    driver = make(host, clock=clock, devices=["address=*"], mig_mode=read_slowly)
    driver.discover()
    assert read == [], "the facts that it has read have the modes"
    clock.seconds = INTERVAL
    found: list[list[str]] = []
    for _ in range(4):
        driver.discover()
        found.append(sorted(read))
        read.clear()
    assert found == [cards[:2], cards[2:4], cards[4:], []]
    for number, expected in ((2, cards[:2]), (3, cards[2:4])):
        clock.seconds = number * INTERVAL
        driver.discover()
        assert sorted(read) == expected, "the oldest first"
        read.clear()


def test_discovery_opens_a_new_card_once(host: SimulatedVgpuHost) -> None:
    driver = make(host)
    for _ in range(2):
        discover(driver)
        assert host.opens == [CARD]
        host.opens.clear()


def test_discovery_reads_modes_although_libvirt_has_taken_the_time(
    host: SimulatedVgpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the only card that it tries could be one without MIG, and this each time."""
    clock, read = Clock(), list[str]()
    clock.step = 0.0

    def read_facts(address: str) -> GpuFacts | None:
        facts = host.read_facts(address)
        return replace(facts, mig=None) if facts and address == CARD else facts

    def read_mode(address: str) -> MigMode | None:
        read.append(address)
        return host.read_mig_mode(address)

    def find_slowly(*arguments: Any) -> dict[str, str]:
        clock.seconds += SPAN
        return {}

    driver = make(host, clock=clock, devices=["address=*"], nvml=read_facts, mig_mode=read_mode)
    driver.discover()
    monkeypatch.setattr(domains, "find_used", find_slowly)
    for _ in range(2):
        clock.seconds += INTERVAL
        read.clear()
        driver.discover()
        assert read == [OTHER]


def test_discovery_does_not_open_a_card_that_a_job_changes(host: SimulatedVgpuHost) -> None:
    driver = make(host)
    discover(driver)
    switch(host, enable=True)
    with locked(CARD):
        assert offered(driver) == {CARD: [CARD]}
        with locked_if_free(CARD) as acquired:
            assert not acquired
    assert offered(driver) == {}


def test_discovery_does_not_open_a_card_of_a_domain_or_without_mig(host: SimulatedVgpuHost) -> None:
    driver = make(host)
    discover(driver)
    host.opens.clear()
    host.give_to_domain(CARD, "guest1")
    assert "the domain guest1" in reason(driver)
    host.give_to_domain(CARD, None)
    driver = make(host, nvml=lambda address: GpuFacts())
    discover(driver)
    assert host.opens == []


def test_mode_that_cannot_be_read_stays_the_last_known_one(host: SimulatedVgpuHost) -> None:
    memory = VolatileMemory()
    switch(host, enable=True)
    assert offered(make(host, memory=memory)) == {}
    bind(host, "vfio-pci")
    driver = make(host, memory=memory)
    assert offered(driver) == {}
    assert "bind it to nvidia once, and disable the MIG mode" in reason(driver)
    switch(host, enable=False)
    bind(host, "nvidia")
    driver = make(host, mig_mode=lambda address: None)
    assert offered(driver) == {CARD: [CARD]}
    switch(host, enable=True)
    assert offered(driver) == {CARD: [CARD]}, "NVML does not answer"


@pytest.mark.parametrize("is_read_before", [True, False])
def test_mode_of_a_card_whose_other_facts_cannot_be_read_counts(
    host: SimulatedVgpuHost, is_read_before: bool
) -> None:
    """Also after a restart while the card cannot be read at all."""
    memory, is_failing = VolatileMemory(), not is_read_before

    def read(address: str) -> GpuFacts | None:
        return None if is_failing else host.read_facts(address)

    driver = make(host, memory=memory, nvml=read)
    discover(driver)
    is_failing = True
    switch(host, enable=True)
    with pytest.raises(DriverFailed, match="it is in MIG mode"):
        driver.prepare(WHOLE, None)
    assert offered(driver) == {}
    assert discover(driver).std_board_info.get("memory_bytes") == (
        str(141 << 30) if is_read_before else None
    )
    driver = make(host, memory=memory, nvml=read, mig_mode=lambda address: None)
    assert offered(driver) == {}
    driver = make(host, memory=memory, nvml=read)
    switch(host, enable=False)
    assert offered(driver) == {CARD: [CARD]}
    driver.prepare(WHOLE, None)


def test_mode_that_a_discovery_sees_counts_although_the_card_fails_then(
    host: SimulatedVgpuHost,
) -> None:
    answers = [MigMode("enabled", is_pending=False)]
    reads = iter([host.read_facts])

    def read(address: str) -> GpuFacts | None:
        return next(reads, lambda address: None)(address)

    def read_mode(address: str) -> MigMode | None:
        return answers.pop() if answers else None

    driver = make(host, nvml=read, mig_mode=read_mode)
    assert offered(driver) == {CARD: [CARD]}
    assert offered(driver) == {}
    assert "it is in MIG mode" in reason(driver)


def test_preparation_waits_for_a_job_of_the_card(
    host: SimulatedVgpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_locks, "READ_TIMEOUT", 0.01)
    driver = make(host)
    with locked(CARD), pytest.raises(DriverFailed, match="is being changed by another job"):
        driver.prepare(WHOLE, None)
    driver.prepare(WHOLE, None)


def test_failed_preparation_records_no_owner(host: SimulatedVgpuHost) -> None:
    driver = make(host)
    switch(host, enable=True)
    with pytest.raises(DriverFailed):
        driver.prepare(WHOLE, None)
    switch(host, enable=False)
    assert offered(driver) == {CARD: [CARD]}


def test_preparation_reads_the_mode_of_a_card_whose_release_was_lost(
    host: SimulatedVgpuHost,
) -> None:
    driver = make(host)
    discover(driver)
    driver.prepare(WHOLE, None)
    switch(host, enable=True)
    host.give_to_domain(CARD, "guest1")
    host.opens.clear()
    with pytest.raises(DriverFailed, match="used by the domain guest1"):
        driver.prepare(WHOLE, None)
    assert host.opens == [], "its server is stopped"
    host.give_to_domain(CARD, None)
    with pytest.raises(DriverFailed, match="it is in MIG mode"):
        driver.prepare(WHOLE, None)
    assert offered(driver) == {}
    switch(host, enable=False)
    assert offered(driver) == {CARD: [CARD]}, "discoveries read the mode again"
    driver.prepare(WHOLE, None)
    host.opens.clear()
    discover(driver)
    assert host.opens == []


class FullMemory(VolatileMemory):
    """Memory on a disk that is full."""

    is_full = True

    def put(self, key: str, text: str | None) -> bool:
        """Store the text until the process ends."""
        return super().put(key, text) and not self.is_full


def test_preparation_whose_owner_cannot_be_recorded_fails(host: SimulatedVgpuHost) -> None:
    memory = FullMemory()
    driver = make(host, memory=memory)
    discover(driver)
    with pytest.raises(DriverFailed, match=f"the change of {CARD} cannot be recorded"):
        driver.prepare(WHOLE, None)
    switch(host, enable=True)
    assert offered(driver) == {}, "the mode is read: the card has no owner"
    switch(host, enable=False)
    memory.is_full = False
    driver.prepare(WHOLE, None)
