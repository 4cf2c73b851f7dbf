# SPDX-License-Identifier: Apache-2.0
"""The nvme driver on simulated hosts; the lab erases a drive of a real kernel."""

import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed, Invalid, Misconfigured
from cyborg.core.inventory.device import NOT_OFFERED, Ability, Device
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.kernel.nvme import Controller, ControllerInfo, Method, SanitizeState
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.privileged import CONTEXT, nvme
from cyborg.testing.machine import HostTree
from cyborg.tests.unit.drivers.simulated_nvme import ListedController

DRIVE, QAT, RAID = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"
ANY = [method.value for method in Method]


@pytest.fixture
def host(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.add_function(DRIVE, "144d", "a80a", "010802", kernel_driver="nvme", totalvfs=4)
    tree.add_function(QAT)
    tree.add_function(RAID, "1000", "005d", "010400")
    controller = "pci0000:00/0000:01:00.0/nvme/nvme0"
    tree.add_disk("nvme0n1", controller)
    folder = tree.root / "devices" / controller
    for name, value in {"serial": "S4 ", "model": "Drive 1", "firmware_rev": "2.0"}.items():
        (folder / name).write_text(f"{value}\n")
    (folder / "nvme0n1/size").write_text("2048\n")
    return tree


@pytest.fixture
def calls() -> list[tuple[str, float]]:
    return []


def make_driver(host: HostTree, calls: list[tuple[str, float]], **options: Any) -> NvmeDriver:
    def erase(address: str, timeout: float, methods: Sequence[str]) -> Mapping[str, Any]:
        calls.append((address, timeout))
        return {"method": "sanitize, crypto erase", "namespaces": 1, "samples": 16}

    access = replace(HostAccess.of(host.root), erase=erase)
    return NvmeDriver("drives", {"devices": ["address=*"], **options}, host.root, access)


def item(address: str) -> WorkItem:
    return WorkItem("drives", DRIVE, DRIVE, address)


def test_discover_offers_only_nvme_controllers(host: HostTree) -> None:
    (device,) = make_driver(host, []).discover()
    assert (device.address, device.serial) == (DRIVE, "S4")
    assert device.std_board_info["capacity_bytes"] == str(2048 * 512)
    assert device.std_board_info["model_number"] == "Drive 1"
    assert device.std_board_info["firmware"] == device.topology["firmware_version"] == "2.0"
    assert [h.address for d in device.deployables for h in d.handles] == [DRIVE]


def test_discover_virtual_functions_are_the_handles(host: HostTree) -> None:
    addresses = host.enable_virtual_functions(DRIVE, 2, "a80a", "010802")
    (device,) = make_driver(host, []).discover()
    assert [h.address for d in device.deployables for h in d.handles] == addresses


def test_discover_drive_of_the_host_is_not_offered(host: HostTree) -> None:
    host.mount("nvme0n1", "/")
    (device,) = make_driver(host, []).discover()
    assert device.deployables == ()
    assert device.vendor_board_info == {NOT_OFFERED: "nvme0n1 holds the root file system"}


def test_discover_drive_of_a_server_has_no_details(host: HostTree) -> None:
    """A drive that is bound to vfio-pci has no nvme folder."""
    host.add_function("0000:04:00.0", "144d", "a80a", "010802", kernel_driver="vfio-pci")
    devices: dict[str, Device] = {d.address: d for d in make_driver(host, []).discover()}
    assert devices["0000:04:00.0"].serial is None
    assert "capacity_bytes" not in devices["0000:04:00.0"].std_board_info


def test_adoption_of_another_class_is_refused(host: HostTree) -> None:
    with pytest.raises(DriverFailed, match="nvme does not offer devices of class 0b4000"):
        make_driver(host, []).check_adoption([QAT])


def test_sanitise_erases_the_function_of_the_handle(
    host: HostTree, calls: list[tuple[str, float]]
) -> None:
    driver = make_driver(host, calls, erase_timeout=77.0)
    assert Ability.SANITISES in driver.abilities
    (virtual,) = host.enable_virtual_functions(DRIVE, 1, "a80a", "010802")
    driver.sanitise(item(virtual))
    assert calls == [(virtual, 77.0)]


def test_sanitise_missing_virtual_function_is_not_clean(
    host: HostTree, calls: list[tuple[str, float]]
) -> None:
    """Its data is on the drive, and it can come back with it."""
    with pytest.raises(DriverFailed, match="enable the virtual functions of"):
        make_driver(host, calls).sanitise(item("0000:01:00.1"))


def test_sanitise_missing_drive_succeeds(host: HostTree, calls: list[tuple[str, float]]) -> None:
    driver = make_driver(host, calls)
    driver.sanitise(WorkItem("drives", "0000:09:00.0", "0000:09:00.0", "0000:09:00.0"))
    driver.sanitise(WorkItem("drives", "0000:09:00.0", "0000:09:00.0", "0000:09:00.1"))
    driver.sanitise(item("not an address"))
    assert calls == []


def test_sanitise_on_another_sysfs_never_erases_a_drive_of_this_host(host: HostTree) -> None:
    driver = NvmeDriver("drives", {"devices": ["address=*"]}, host.root)
    with pytest.raises(DriverFailed, match="it is not a device of this host"):
        driver.sanitise(item(DRIVE))


@pytest.mark.parametrize("timeout", [0.0, -1.0, 29.0, 86401.0])
def test_driver_with_timeout_out_of_range_is_misconfigured(host: HostTree, timeout: float) -> None:
    with pytest.raises(Misconfigured, match="erase_timeout"):
        make_driver(host, [], erase_timeout=timeout)


class SanitizedController(Controller):
    """A controller with a sequence of states."""

    def __init__(self, *states: str) -> None:
        super().__init__(-1)
        self._states = [SanitizeState[state] for state in states]
        self.ended = 0

    def sanitize_status(self) -> tuple[SanitizeState, float]:
        return self._states.pop(0), 0.5

    def end_verification(self) -> None:
        self.ended += 1


def check_all_attached(
    attached: Sequence[int],
    method: Method,
    others: Mapping[int, Sequence[int]] = MappingProxyType({}),
    *,
    allocated: Sequence[int],
    virtual: bool = False,
) -> None:
    """Check a controller that manages namespaces; ``others`` are controllers by namespace."""
    lists = {
        structure: struct.pack(f"<{len(numbers)}I", *numbers).ljust(4096, b"\0")
        for structure, numbers in ((0x02, attached), (0x10, allocated))
    }
    controllers = {
        namespace: struct.pack(f"<{len(numbers) + 1}H", len(numbers), *numbers)
        for namespace, numbers in others.items()
    }
    info = ControllerInfo(tuple(Method), manages_namespaces=True)
    controller = ListedController(lists, controllers)
    nvme._check_all_attached(controller, info, list(attached), method, virtual=virtual)


class TestPrivileged:
    """The privileged function on a simulated host: what it refuses, it does not open."""

    @pytest.fixture(autouse=True)
    def redirect(
        self, host: HostTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        monkeypatch.setattr(nvme, "_SYS", host.root)
        monkeypatch.setattr(nvme, "_DEV", tmp_path / "dev")
        monkeypatch.setattr(nvme, "_BIND_TIMEOUT", 0.0)
        CONTEXT.set_client_mode(False)
        yield
        CONTEXT.set_client_mode(True)

    @pytest.mark.parametrize("address", ["", "../0000:01:00.0", "0000:01:00.0\n", "nvme0"])
    def test_erase_malformed_address_is_invalid(self, address: str) -> None:
        with pytest.raises(Invalid):
            nvme.erase(address, 1.0, ANY)

    @pytest.mark.parametrize("timeout", [0.0, -1.0, 1e9, float("nan")])
    def test_erase_timeout_out_of_range_fails(self, timeout: float) -> None:
        with pytest.raises(DriverFailed, match="out of range"):
            nvme.erase(DRIVE, timeout, ANY)

    def test_erase_missing_function_has_nothing_to_erase(self) -> None:
        assert nvme.erase("0000:09:00.0", 1.0, ANY)["method"] is None

    @pytest.mark.parametrize("address", [QAT, RAID])
    def test_erase_other_device_is_refused(self, address: str) -> None:
        with pytest.raises(DriverFailed, match="is not an NVMe controller"):
            nvme.erase(address, 1.0, ANY)

    def test_erase_drive_with_virtual_functions_is_refused(self, host: HostTree) -> None:
        host.enable_virtual_functions(DRIVE, 2, "a80a", "010802")
        with pytest.raises(DriverFailed, match="has virtual functions, which others may use"):
            nvme.erase(DRIVE, 1.0, ANY)

    def test_wait_for_sanitize_ends_a_media_verification(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server can leave the drive in this state, which no time ends."""
        controller = SanitizedController("VERIFYING", "VERIFYING", "RUNNING", "DONE")
        monkeypatch.setattr(nvme, "_POLL_INTERVAL", 0.0)
        end = time.monotonic() + 60
        assert nvme._wait_for_sanitize(controller, end) is SanitizeState.DONE
        assert controller.ended == 1

    def test_wait_for_sanitize_has_a_limit(self) -> None:
        with pytest.raises(DriverFailed, match="did not end in time: 50% done"):
            nvme._wait_for_sanitize(SanitizedController("RUNNING"), 0.0)

    def test_erase_detached_namespace_is_refused(self) -> None:
        check = partial(check_all_attached, allocated=(1, 2, 3))
        with pytest.raises(DriverFailed, match="namespace 2 is not attached"):
            check([1, 3], Method.FORMAT_ERASE)
        with pytest.raises(DriverFailed, match="no attached namespace"):
            check([], Method.SANITIZE_BLOCK)
        check([1, 2, 3], Method.FORMAT_ERASE)
        check([1], Method.SANITIZE_BLOCK)

    def test_erase_with_namespaces_of_other_controllers_is_permitted(self) -> None:
        check = partial(check_all_attached, allocated=(1, 2, 3), virtual=True)
        check([1], Method.FORMAT_ERASE, {2: (7,), 3: (0, 8)})
        with pytest.raises(DriverFailed, match="namespace 3 is not attached"):
            check([1], Method.FORMAT_ERASE, {2: (7,), 3: ()})

    def test_erase_with_namespaces_that_were_moved_is_refused(self) -> None:
        """The server of a whole drive can attach its namespaces to an offline controller."""
        with pytest.raises(DriverFailed, match="namespace 2 is not attached"):
            check_all_attached([1], Method.FORMAT_ERASE, {2: (1,)}, allocated=(1, 2))

    def test_erase_drive_of_the_host_is_refused(self, host: HostTree) -> None:
        host.mount("nvme0n1", "/srv")
        with pytest.raises(DriverFailed, match="nvme0n1 holds the file system /srv"):
            nvme.erase(DRIVE, 1.0, ANY)

    def test_erase_drive_of_a_process_is_refused(self, host: HostTree, tmp_path: Path) -> None:
        """A group that cannot be opened is in use; nothing is written to the driver's files."""
        address = "0000:04:00.0"
        folder = host.add_function(
            address, "144d", "a80a", "010802", kernel_driver="vfio-pci", iommu_group="17"
        )
        (tmp_path / "dev/vfio/17").mkdir(parents=True)  # a folder cannot be opened to write
        with pytest.raises(DriverFailed, match="may still be used by a process"):
            nvme.erase(address, 1.0, ANY)
        assert not (folder / "driver_override").exists()

    def test_erase_drive_of_another_kernel_driver_is_refused(self, host: HostTree) -> None:
        address = "0000:05:00.0"
        host.add_function(address, "144d", "a80a", "010802", kernel_driver="pci-stub")
        with pytest.raises(DriverFailed, match="bound to the kernel driver pci-stub"):
            nvme.erase(address, 1.0, ANY)

    def test_erase_drive_without_device_node_fails(self) -> None:
        with pytest.raises(DriverFailed, match="has no live NVMe device"):
            nvme.erase(DRIVE, 1.0, ANY)

    @pytest.mark.parametrize(
        ("size", "count"),
        [(0, 0), (65535, 0), (65536, 1), (1 << 17, 2), (1 << 20, 16), (1 << 44, 16)],
    )
    def test_offsets_include_first_and_last_block(self, size: int, count: int) -> None:
        offsets = nvme._offsets(size)
        assert len(offsets) == count
        assert all(offset % 65536 == 0 for offset in offsets)
        if count:
            assert (offsets[0], offsets[-1]) == (0, (size // 65536 - 1) * 65536)
