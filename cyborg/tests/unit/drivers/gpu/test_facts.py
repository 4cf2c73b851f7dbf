# SPDX-License-Identifier: Apache-2.0
"""When a discovery reads the facts of a card: with its lock, and for some seconds."""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Memory, VolatileMemory
from cyborg.drivers.gpu import card_locks
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.gpu.facts import SPAN, UNREAD
from cyborg.drivers.gpu.mig_modes import INTERVAL
from cyborg.drivers.kernel.nvml import GpuFacts
from cyborg.testing.vgpu_host import SimulatedVgpuHost
from cyborg.tests.unit.drivers.gpu.simulated_gpu import changing
from cyborg.tests.unit.drivers.gpu.simulated_vgpus import (
    CARD,
    TYPES,
    discover,
    host,
    make_access,
    offered,
)

__all__ = ["host"]

CARDS = [CARD, *(f"0000:{bus}:00.0" for bus in (51, 61, 71, 81))]
FIRST = "0000:31:00.0"  # before the others
VFS = [f"0000:41:00.{n}" for n in range(1, 8)] + ["0000:41:01.0"]
RULE = f"address={CARD},type=H200X-70C|H200X-35C"
PAIR = "2xH200X-70C"


class Clock:
    """A clock that stands."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def make(
    host: SimulatedVgpuHost,
    clock: Clock,
    memory: Memory | None = None,
    rules: Sequence[str] = (),
    **access: Any,
) -> GpuDriver:
    options = {"devices": ["address=*"], "reset": "never", "vgpu_types": rules}
    if rules:
        options["vgpu_layouts"] = [PAIR]
    changed = replace(make_access(host), clock=clock, **access)
    driver = GpuDriver("gpus", options, host.root, changed)
    if memory is not None:
        driver.memory = memory
    return driver


class SlowReader:
    """NVML, which needs some seconds for each card, and ``SPAN`` until it fails for one."""

    def __init__(
        self, host: SimulatedVgpuHost, clock: Clock, seconds: float, failing: str | None = None
    ) -> None:
        self.host, self.clock, self.seconds, self.failing = host, clock, seconds, failing
        self.read: list[str] = []

    def __call__(self, address: str) -> GpuFacts | None:
        """Return the facts about a card."""
        self.read.append(address)
        self.clock.seconds += SPAN if address == self.failing else self.seconds
        return None if address == self.failing else self.host.read_facts(address)


def bind_again(host: SimulatedVgpuHost) -> None:
    """Unbind the card from its kernel driver, and bind it to the same one."""
    link = host.bus / CARD / "driver"
    target = link.readlink()
    link.rename(link.with_name("removed"))  # so that no other link gets its inode number
    link.symlink_to(target)


def withheld(driver: GpuDriver, cards: Sequence[str] = CARDS) -> list[str]:
    """Return the cards that a discovery withholds because they were not read."""
    found = driver.discover()
    assert [device.address for device in found] == cards
    reasons = {d.address: d.vendor_board_info.get(NOT_OFFERED) for d in found}
    assert set(reasons.values()) <= {None, UNREAD}
    assert all(bool(d.deployables) == (reasons[d.address] is None) for d in found)
    return [address for address, reason in reasons.items() if reason is not None]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (3.0, [CARDS[2:], CARDS[4:], []]),
        (SPAN, [CARDS[1:], CARDS[2:], CARDS[3:], CARDS[4:], []]),
        (0.5, [[]]),
    ],
)
def test_discovery_reads_cards_for_some_seconds_and_the_next_one_continues(
    host: SimulatedVgpuHost, seconds: float, expected: list[list[str]]
) -> None:
    """Also the first one after a start; a card that was never read is not offered."""
    for address in CARDS[1:]:
        host.add_card(address, TYPES, framebuffer=141)
    clock = Clock()
    nvml = SlowReader(host, clock, seconds)
    memory = VolatileMemory()
    driver = make(host, clock, memory, nvml=nvml, mig_mode=lambda address: None)
    assert [withheld(driver) for _ in expected] == expected
    assert nvml.read == CARDS, "each one once"
    nvml.read.clear()
    assert withheld(driver) == []
    assert nvml.read == []
    # After a restart the last known facts count until each card is read again.
    driver = make(host, clock, memory, nvml=nvml, mig_mode=lambda address: None)
    for _ in expected:
        assert withheld(driver) == []
    assert nvml.read == CARDS


def test_card_that_cannot_be_read_takes_its_turn_as_the_others_do(
    host: SimulatedVgpuHost,
) -> None:
    """It has the first address, and takes all the time of the discovery that tries it."""
    for address in CARDS[1:]:
        host.add_card(address, TYPES, framebuffer=141)
    clock = Clock()
    nvml = SlowReader(host, clock, 0.5, failing=CARD)
    driver = make(host, clock, nvml=nvml)
    assert withheld(driver) == CARDS[1:]
    assert nvml.read == [CARD]
    assert withheld(driver) == []
    assert nvml.read == [CARD, *CARDS[1:], CARD]
    host.request_mig_mode(CARDS[4], enable=True)
    for number in range(2):
        clock.seconds += INTERVAL
        nvml.read.clear()
        driver.discover()
        assert nvml.read.count(CARD) <= 1, f"tried again in the discovery {number}"
    assert discover(driver, CARDS[4]).std_board_info["mig"] == "enabled", "its mode is read too"


def test_cards_of_vgpus_are_read_before_the_modes_of_whole_cards(host: SimulatedVgpuHost) -> None:
    """The modes are read again each minute: they could take all the time of each discovery."""
    for address in (FIRST, *CARDS[1:]):
        host.add_card(address, TYPES, framebuffer=141)
    clock, memory = Clock(), VolatileMemory()
    driver = make(host, clock, memory, [RULE])
    driver.discover()
    driver.partition(WorkItem("gpus", CARD, "", ""), PAIR)

    def read_slowly(address: str) -> None:
        clock.seconds += SPAN

    nvml = SlowReader(host, clock, 0.0)
    driver = make(host, clock, memory, [RULE], nvml=nvml, mig_mode=read_slowly)
    assert offered(driver) == {f"{CARD}-H200X-70C": VFS[:2]}
    assert nvml.read == [CARD, FIRST, *CARDS[1:]]
    nvml.read.clear()
    clock.seconds += INTERVAL
    bind_again(host)
    assert offered(driver) == {f"{CARD}-H200X-70C": VFS[:2]}
    assert nvml.read == [CARD]


def test_card_whose_reading_raises_does_not_disturb_the_others(
    host: SimulatedVgpuHost, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in a discovery, nor after a change of its layout."""
    for address in CARDS[1:]:
        host.add_card(address, TYPES, framebuffer=141)
    is_failing = False

    def read(address: str) -> GpuFacts | None:
        if is_failing and address == CARD:
            raise Invalid("found no address")
        return host.read_facts(address)

    memory = VolatileMemory()
    driver = make(host, Clock(), memory, [RULE], nvml=read)
    offers = {device.address: len(device.deployables) for device in driver.discover()}
    assert offers == dict.fromkeys(CARDS, 1)
    is_failing = True
    driver = make(host, Clock(), memory, [RULE], nvml=read)
    for _ in range(2):
        assert {device.address: len(device.deployables) for device in driver.discover()} == offers
    (logged,) = [record for record in caplog.records if "found no address" in record.message]
    assert "the last known ones hold: Invalid: found no address" in logged.message
    driver.partition(WorkItem("gpus", CARD, "", ""), "whole")
    with pytest.raises(DriverFailed, match="has no layout 'missing'"):
        driver.partition(WorkItem("gpus", CARD, "", ""), "missing")


class SmallMemory(VolatileMemory):
    """Memory that refuses long texts, such as facts."""

    def put(self, key: str, text: str | None) -> bool:
        """Store the text. Raise ValueError."""
        if key.startswith("gpu "):
            raise ValueError(f"{key} is too long")
        return super().put(key, text)


def test_facts_that_cannot_be_stored_count_until_a_restart(host: SimulatedVgpuHost) -> None:
    driver = make(host, Clock(), SmallMemory())
    assert offered(driver) == {CARD: [CARD]}
    assert discover(driver).std_board_info["memory_bytes"] == str(141 << 30)


def check_in_thread(driver: GpuDriver, address: str) -> BaseException | None:
    """Check in another thread that a server can get a card; return what it raises."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(driver.check_unused, address).exception(60)


@pytest.mark.parametrize("has_nvml", [True, False])
def test_card_that_nvml_cannot_read_is_offered_and_given_to_a_server(
    host: SimulatedVgpuHost, has_nvml: bool
) -> None:
    driver = make(host, Clock(), nvml=lambda address: None, has_nvml=lambda: has_nvml)
    assert offered(driver) == {CARD: [CARD]}
    assert check_in_thread(driver, CARD) is None
    with changing(CARD):
        assert offered(driver) == {CARD: [CARD]}, "also while it is given to one"


@pytest.mark.parametrize("has_nvml", [True, False])
def test_card_that_a_job_changes_after_a_start_is_withheld_only_if_nvml_can_read_it(
    host: SimulatedVgpuHost, has_nvml: bool
) -> None:
    driver = make(host, Clock(), nvml=lambda address: None, has_nvml=lambda: has_nvml)
    with changing(CARD):
        found = discover(driver)
    assert bool(found.deployables) is not has_nvml
    assert found.vendor_board_info.get(NOT_OFFERED) == (UNREAD if has_nvml else None)
    assert offered(driver) == {CARD: [CARD]}


def test_card_of_another_product_in_a_slot_was_never_read(host: SimulatedVgpuHost) -> None:
    """The discovery has no time for it, as another one is replaced too."""
    host.add_card(CARDS[1], TYPES, framebuffer=141)
    clock = Clock()
    driver = make(host, clock, nvml=SlowReader(host, clock, SPAN))
    for product in ("2335", "2336"):
        for address in CARDS[:2]:
            (host.bus / address / "device").write_text(f"0x{product}\n")
        assert withheld(driver, CARDS[:2]) == [CARDS[1]]
        assert withheld(driver, CARDS[:2]) == []


@pytest.mark.parametrize("is_seen_absent", [True, False])
def test_card_of_the_same_product_in_a_slot_is_read(
    host: SimulatedVgpuHost, is_seen_absent: bool
) -> None:
    uuid = "GPU-1"

    def read(address: str) -> GpuFacts | None:
        facts = host.read_facts(address)
        return None if facts is None else replace(facts, uuid=uuid)

    driver = make(host, Clock(), nvml=read)
    assert discover(driver).serial == "GPU-1"
    folder = (host.bus / CARD).resolve()
    (host.bus / CARD).unlink()
    folder.rename(folder.with_name("removed"))  # so that no other folder gets its inode number
    if is_seen_absent:
        assert driver.discover() == []
    uuid = "GPU-2"
    host.add_card(CARD, TYPES, framebuffer=141)
    assert discover(driver).serial == "GPU-2"
    host.opens.clear()
    discover(driver)
    assert host.opens == []


def test_card_that_was_bound_again_between_two_discoveries_is_read(
    host: SimulatedVgpuHost,
) -> None:
    """As after a change of its ECC mode, which the kernel driver must be loaded again for."""
    driver = make(host, Clock())
    discover(driver)
    host.opens.clear()
    bind_again(host)
    host.request_mig_mode(CARD, enable=True)
    assert offered(driver) == {}
    assert host.opens == [CARD]


def test_card_that_another_thread_reads_for_the_first_time_is_not_offered(
    host: SimulatedVgpuHost,
) -> None:
    host.request_mig_mode(CARD, enable=True)
    is_reading, may_continue = threading.Event(), threading.Event()

    def read(address: str) -> GpuFacts | None:
        is_reading.set()
        assert may_continue.wait(60)
        return host.read_facts(address)

    driver = make(host, Clock(), nvml=read)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        adoption = pool.submit(driver.check_adoption, [CARD])
        assert is_reading.wait(60)
        try:
            assert discover(driver).vendor_board_info.get(NOT_OFFERED) == UNREAD
        finally:
            may_continue.set()
        with pytest.raises(DriverFailed, match="it is in MIG mode"):
            adoption.result(60)


class EndingMemory(VolatileMemory):
    """Memory; calls ``end`` at the next search for facts about a card."""

    end: Callable[[], None] | None = None

    def get(self, key: str) -> str | None:
        """Return the text."""
        if key.startswith("gpu ") and (end := self.end) is not None:
            self.end = None
            end()
        return super().get(key)


def test_card_whose_job_ends_during_a_discovery_is_not_offered_with_facts_from_before(
    host: SimulatedVgpuHost,
) -> None:
    """What the discovery finds before the job ends does not say that the card is in MIG mode."""
    host.request_mig_mode(CARD, enable=True)
    memory = EndingMemory()
    driver = make(host, Clock(), memory)
    with changing(CARD) as end:
        memory.end = end
        assert offered(driver) == {}
    assert memory.end is None


def test_adoption_reads_a_card_before_the_first_discovery(host: SimulatedVgpuHost) -> None:
    driver = make(host, Clock())
    driver.check_adoption([CARD])
    assert host.opens == [CARD]
    host.request_mig_mode(CARD, enable=True)
    with pytest.raises(DriverFailed, match="it is in MIG mode"):
        make(host, Clock()).check_adoption([CARD])


def test_adoption_reads_only_its_own_cards_and_waits_for_a_job(
    host: SimulatedVgpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before it would take all the time of a discovery, and again at each attempt."""
    for address in CARDS[1:]:
        host.add_card(address, TYPES, framebuffer=141)
    clock = Clock()
    nvml = SlowReader(host, clock, SPAN)
    driver = make(host, clock, nvml=nvml)
    driver.check_adoption(CARDS[3:])
    assert nvml.read == CARDS[3:]
    monkeypatch.setattr(card_locks, "READ_TIMEOUT", 0.01)
    with changing(CARD), pytest.raises(DriverFailed, match="is being changed by another job"):
        driver.check_adoption([CARD])
    driver.check_adoption([CARD])


def test_discovery_does_not_read_a_card_while_its_layout_changes(
    host: SimulatedVgpuHost,
) -> None:
    """The change of SR-IOV shows that the facts are outdated, and others follow."""
    is_changing, may_continue = threading.Event(), threading.Event()
    access = make_access(host)

    def create(*arguments: Any) -> None:
        is_changing.set()
        assert may_continue.wait(60)
        access.create_vgpu(*arguments)

    driver = make(host, Clock(), None, [RULE], create_vgpu=create)
    assert offered(driver) == {CARD: [CARD]}
    item = WorkItem("gpus", CARD, "", "")
    job = threading.Thread(target=driver.partition, args=(item, PAIR))
    job.start()
    assert is_changing.wait(60)
    host.opens.clear()
    assert offered(driver) == {}, "its layout is being changed"
    assert host.opens == []
    may_continue.set()
    job.join(60)
    assert set(host.opens) == {CARD}, "the job reads what it has changed"
    host.opens.clear()
    assert offered(driver) == {f"{CARD}-H200X-70C": VFS[:2]}
    assert host.opens == []


def test_card_that_another_thread_changes_is_not_given_to_a_server(
    host: SimulatedVgpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_locks, "READ_TIMEOUT", 0.01)
    driver = make(host, Clock())
    discover(driver)
    with changing(CARD):
        host.opens.clear()
        with pytest.raises(DriverFailed, match="is being changed by another job"):
            driver.check_unused(CARD)
        assert host.opens == []
    driver.check_unused(CARD)
    assert host.opens == [CARD]
