# SPDX-License-Identifier: Apache-2.0
"""Sources of device sets: their configuration, and their members in the inventory of the host."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cyborg.agent.backends import factory
from cyborg.agent.backends.backend import Backend, BackendSnapshot
from cyborg.agent.backends.catalogue import DriverCatalogue
from cyborg.agent.backends.device_sets import MemberDevices
from cyborg.agent.backends.inventory import BackendRegistry, Inventory, collect
from cyborg.core.drivers.desired_state import (
    BackendRecord,
    DesiredBackend,
    DesiredStatus,
)
from cyborg.core.drivers.registry import Source
from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.core.inventory.device import Device
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.drivers.device_sets.driver import DeviceSetDriver, Grouped
from cyborg.testing.fabric_manager import FabricManagerDouble, build
from cyborg.tests.fixtures.hosts.scripted_driver import (
    LONG,
    ScriptedDriver,
    card,
)
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.unit.agent.backends.test_factory import read

A, B, C = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"
NEVER = 3600.0
CONFIG = """
[agent]
enabled_drivers = fake
device_sets = sets
[sets]
kind = numa
members = fake
sizes = 1, 2
wanted = 2:1,1:0
"""


def test_load_drivers_source_is_the_last_driver(tmp_path: Path) -> None:
    text = CONFIG.replace("[agent]", f"[DEFAULT]\nhost = h\nstate_path = {tmp_path}\n[agent]")
    fake, source = factory.load_drivers(read(tmp_path, text), tmp_path)
    assert fake.name == "fake"
    assert isinstance(source, DeviceSetDriver)
    assert (source.name, source.backend, source.host) == ("device_sets", "sets", "h")
    assert source.sysfs_root == tmp_path
    assert source.source.sizes == {1, 2}
    assert source.source.wanted == {"2": 1, "1": 0}
    shown = {setting.name: (setting.value, setting.source) for setting in source.settings}
    assert shown["kind"] == ("numa", Source.FILE)
    assert shown["offer"] == ("disjoint", Source.DEFAULT)
    with pytest.raises(DriverFailed, match="waits for the first discovery of backend fake"):
        source.discover()
    source.memory.put("key", "text")
    again = factory.load_drivers(read(tmp_path, text), tmp_path)[-1]
    assert again.memory.get("key") == "text"


def test_source_is_no_driver_of_the_api(tmp_path: Path) -> None:
    builder = factory.DriverFactory(read(tmp_path, CONFIG), DriverCatalogue(), tmp_path)
    assert "device_sets" not in {entry.name for entry in builder.entries}
    assert builder.own_names == ["fake", "sets"]
    desired = DesiredBackend("sets", "fake", DesiredStatus.ENABLED, 1)
    with pytest.raises(Misconfigured, match=r"backend sets: \[agent\] device_sets has that name"):
        builder.from_desired(desired)
    # One that an earlier configuration allowed gives way to the source.
    record = BackendRecord(desired, applied=desired, error=None)
    assert [d.name for d in builder.load_all({"sets": record})] == ["fake", "device_sets"]


@pytest.mark.parametrize(
    ("agent", "sections", "message"),
    [
        ("device_sets = fake", "", r"\[agent\] device_sets: found 'fake'; expected names of"),
        ("device_sets = sets, sets", "", r"device_sets: found 'sets'; expected .* each once"),
        ("device_sets = Sets", "", r"device_sets: found 'Sets'"),
        ("device_sets = nova", "", r"found 'nova', which is a section of the service"),
        ("device_sets = sets", "", r"\[sets\] kind: found ''; expected one of"),
        (
            "device_sets = sets",
            "[sets]\nkind = numa\nmembers = fake, gpu",
            r"\[sets\] members: found 'gpu'; expected backends that the section \[agent\] enables",
        ),
        (
            "device_sets = sets, more",
            "[sets]\nkind = numa\nmembers = more\n[more]\nkind = numa\nmembers = fake",
            r"\[sets\] members: found 'more'; expected backends",
        ),
        (
            "device_sets = more, hgx",
            "[hgx]\nkind = fabric\nmembers = fake\n[more]\nkind = numa\nmembers = fake",
            r"\[more\] members: found 'fake'; expected backends of no other source than the "
            "fabric hgx",
        ),
        (
            "device_sets = sets, more",
            "[sets]\nkind = numa\nmembers = fake\ngroup = a\n[more]\nkind = pcie\nmembers = fake",
            r"\[more\] group: found ''; expected a, the group of sets, which has the backend fake",
        ),
        (
            "device_sets = more, sets",
            "[sets]\nkind = numa\nmembers = fake\ngroup = a\n[more]\nkind = pcie\nmembers = fake",
            r"\[sets\] group: found 'a'; expected no group, as more, which has the backend fake",
        ),
        (
            "device_sets = sets",
            "[sets]\nkind = numa\nmembers = fake\nsizes = 3",
            r"\[sets\] sizes: found '3'; expected some of 1, 2, 4, 8, 16",
        ),
    ],
)
def test_load_drivers_invalid_source_raises_misconfigured(
    tmp_path: Path, agent: str, sections: str, message: str
) -> None:
    conf = read(tmp_path, f"[agent]\nenabled_drivers = fake\n{agent}\n{sections}")
    with pytest.raises(Misconfigured, match=message):
        factory.load_drivers(conf, tmp_path)


def test_removed_driver_finds_a_source_in_its_section(tmp_path: Path) -> None:
    text = CONFIG.replace("device_sets = sets", "")
    builder = factory.DriverFactory(read(tmp_path, text), DriverCatalogue(), tmp_path)
    assert isinstance(builder.removed_driver("sets", None), DeviceSetDriver)
    assert builder.removed_driver("others", None) is None


def source_snapshot(
    *grouped: str, members: Sequence[str] = ("b0",), discovered: bool = True
) -> BackendSnapshot:
    status = BackendStatus.READY if discovered else BackendStatus.ERROR
    return BackendSnapshot(
        BackendState("sets", "device_sets", status),
        has_discovered=discovered,
        members=frozenset(members),
        grouped=Grouped(frozenset(grouped)),
    )


def member_snapshot(name: str, *addresses: str, error: str | None = None) -> BackendSnapshot:
    status = BackendStatus.READY if error is None else BackendStatus.ERROR
    devices = tuple(card(address, name) for address in addresses)
    return BackendSnapshot(BackendState(name, "puppet", status, error), devices, True)


def test_collect_members_wait_for_their_source() -> None:
    other = member_snapshot("b1", B)
    pending = source_snapshot(discovered=False)
    found = collect([member_snapshot("b0", A), other, pending])
    assert [device.address for device in found.devices] == [B]
    state, *_ = found.states
    assert (state.status, state.error) == (
        BackendStatus.DISCOVERING,
        "waits for the first discovery of sets",
    )
    assert found.states[1:] == (other.state, pending.state)
    # A failed backend stays failed.
    failed = member_snapshot("b0", A, error="no bus")
    found = collect([failed, pending])
    assert (found.devices, found.states[0]) == ((), failed.state)


def test_collect_leaves_out_devices_that_are_not_grouped_yet() -> None:
    found = collect([member_snapshot("b0", A, B), source_snapshot(A)])
    assert [device.address for device in found.devices] == [A]
    assert found.states[0].status is BackendStatus.READY
    both = [source_snapshot(A, B), source_snapshot(B, members=["b0", "b1"])]
    found = collect([member_snapshot("b0", A, B), *both])
    assert [device.address for device in found.devices] == [B]


def test_collect_leaves_out_handles_that_are_not_grouped_yet() -> None:
    member = member_snapshot("b0", A, B)
    old = member_snapshot("b0", A, B)
    changed = replace(old.devices[1].deployables[0], handles=())
    grouped = Grouped.of([old.devices[0], replace(old.devices[1], deployables=(changed,))])
    found = collect([member, replace(source_snapshot(), grouped=grouped)])
    assert found.devices[0] == member.devices[0]
    assert [len(part.handles) for part in found.devices[1].deployables] == [0]


def test_collect_other_backend_does_not_offer_a_waiting_device() -> None:
    pending = source_snapshot(discovered=False)
    found = collect([member_snapshot("b0", A), member_snapshot("b1", A), pending])
    assert found.devices == ()


class Host:
    """Running backends ``b0`` and ``b1`` and a source of both; it records each inventory."""

    def __init__(self) -> None:
        self.drivers = [ScriptedDriver("b0", [card(A)]), ScriptedDriver("b1", [card(B, "b1")])]
        self.inventories: list[Inventory] = []
        self.registry = BackendRegistry()
        self.members = MemberDevices(lambda: self.registry)
        self.changed = threading.Condition()
        options = {"kind": "numa", "members": ["b0", "b1"], "sizes": ["1"]}
        self.source = DeviceSetDriver("sets", options)
        self.source.read_devices = self.members.read
        self.backends = [
            Backend(driver, NEVER, NEVER, self.on_change) for driver in (*self.drivers, self.source)
        ]
        for backend in self.backends:
            self.registry.replace(backend)

    def on_change(self) -> None:
        self.members.refresh()
        with self.changed:
            self.inventories.append(collect([b.snapshot for b in self.registry]))
            self.changed.notify_all()

    def wait_until_grouped(self, *addresses: str) -> None:
        """Wait until the inventory has these devices, and each of them in a set."""

        def is_grouped() -> bool:
            last = self.inventories[-1] if self.inventories else None
            return last is not None and listed(last) == set(addresses)

        with self.changed:
            assert self.changed.wait_for(is_grouped, LONG), self.inventories


def listed(inventory: Inventory) -> set[str]:
    """Return the devices of the members; fail if one of them is in no set."""
    sets = [
        part.device_set
        for device in inventory.devices
        for part in device.deployables
        if part.device_set is not None
    ]
    grouped = {member.device for found in sets for member in found.members}
    devices = {device.address for device in inventory.devices if device.address != "sets"}
    assert devices <= grouped
    return devices


@pytest.fixture
def host() -> Iterator[Host]:
    env = Host()
    yield env
    for backend in env.backends:
        backend.stop()
    for driver in env.drivers:
        driver.unblock()
    assert all(backend.join(LONG) for backend in env.backends)
    for inventory in env.inventories:
        listed(inventory)


def rediscover(host: Host, number: int, devices: list[Device]) -> None:
    host.drivers[number].devices = devices
    host.backends[number].rediscover()


def start(host: Host) -> None:
    for backend in host.backends:
        backend.start()
    host.members.refresh()


def test_source_waits_for_the_first_result_of_each_member(host: Host) -> None:
    host.drivers[0].error = DriverFailed("no bus")
    host.drivers[1].block()
    start(host)
    host.drivers[0].wait_for(1)
    host.drivers[1].wait_for(1)
    source = host.backends[2]
    assert source.snapshot.state.status is BackendStatus.DISCOVERING
    host.drivers[1].unblock()
    with host.changed:
        assert host.changed.wait_for(lambda: source.snapshot.state.error is not None, LONG)
    assert source.snapshot.state.error == "waits for the first discovery of backend b0: no bus"
    host.drivers[0].error = None
    host.backends[0].rediscover()
    host.wait_until_grouped(A, B)


@pytest.mark.requires("compiler")
def test_restarted_fabric_manager_is_answered_before_any_discovery(tmp_path: Path) -> None:
    double = FabricManagerDouble(tmp_path / "fabric_manager")
    options = {
        "kind": "fabric",
        "members": ["b0"],
        "fabric_address": double.address,
        "fabric_library": str(build(tmp_path).library),
    }
    before, source = DeviceSetDriver("sets", options), DeviceSetDriver("sets", options)
    source.memory = before.memory
    assert before.fabric is not None
    before.fabric.activate(3)
    backend = Backend(source, NEVER, NEVER, health_interval=0.05)
    double.stop()
    double.start(restart=True)
    backend.start()
    try:
        for _ in range(2):  # also later, while the members still discover
            wait_until("it is answered", lambda: double.values("phase") == ["running"])
            assert set(double.active) == {3}
            double.stop()
            double.start(restart=True)
    finally:
        backend.stop()
        assert backend.join(LONG)
    assert backend.snapshot.state.status is BackendStatus.DISCOVERING


def test_source_of_missing_members_says_so(host: Host) -> None:
    host.registry.remove("b0")
    host.registry.remove("b1")
    start(host)
    source = host.backends[2]
    with host.changed:
        assert host.changed.wait_for(lambda: source.snapshot.state.error is not None, LONG)
    assert "this host has no backend b0" in str(source.snapshot.state.error)


def test_source_follows_the_devices_of_its_members(host: Host) -> None:
    host.drivers[1].block()
    start(host)
    host.drivers[1].wait_for(1)
    host.drivers[1].unblock()
    host.wait_until_grouped(A, B)
    rediscover(host, 0, [card(A), card(C)])
    host.wait_until_grouped(A, B, C)
    rediscover(host, 1, [])
    host.wait_until_grouped(A, C)
    # A failure of a member changes no device.
    host.drivers[0].error = DriverFailed("no bus")
    host.backends[0].rediscover()
    host.drivers[0].wait_for(3)
    host.wait_until_grouped(A, C)


def test_source_without_a_member_keeps_its_sets(host: Host) -> None:
    start(host)
    host.wait_until_grouped(A, B)
    removed = host.registry.remove("b1")
    assert removed is not None
    host.on_change()
    done = threading.Event()
    host.backends[2].rediscover(lambda _: done.set())
    assert done.wait(LONG)
    snapshot = host.backends[2].snapshot
    assert snapshot.state.status is BackendStatus.ERROR
    assert snapshot.state.error is not None
    assert snapshot.state.error.startswith("this host has no backend b1, whose devices are members")
    assert len(snapshot.devices[0].deployables) == 2


def test_source_error_names_the_error_of_its_member(host: Host) -> None:
    host.drivers[0].error = DriverFailed("no bus")
    host.backends[0].run_once()
    with pytest.raises(DriverFailed, match=r"first discovery of backend b0: no bus$"):
        host.members.read("b0")
