# SPDX-License-Identifier: Apache-2.0
"""Whether a function with disks is offered: what the disks hold, and who wrote it."""

import os
import shutil
from pathlib import Path

import pytest

from cyborg.agent.state_file import MemoryFile
from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.drivers.base import Driver
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.testing.machine import HostTree

DRIVE, HBA = "0000:01:00.0", "0000:02:00.0"
TABLE = "nvme0n1 holds a partition table (gpt); erase it, for example with wipefs, or adopt the "


class Host:
    """A host with one drive, which the kernel shows while it is bound to nvme."""

    def __init__(self, folder: Path) -> None:
        self.tree = HostTree(folder)
        self.tree.add_function(DRIVE, "144d", "a80a", "010802", kernel_driver="nvme")
        self.tree.add_disk("nvme0n1", f"pci0000:00/{DRIVE}/nvme/nvme0")
        self.controller = (self.tree.bus / DRIVE).resolve() / "nvme/nvme0"
        self.replace("S1")
        self.file = folder / "memory.json"
        self.driver = self.start_agent()

    def replace(self, serial: str) -> None:
        """Replace the drive by another one of this model."""
        (self.controller / "serial").write_text(f"{serial}\n")

    def start_agent(self, **options: object) -> Driver:
        """Return a driver as a new agent process makes it."""
        driver = NvmeDriver("nvme", {"devices": ["address=*"], **options}, self.tree.root)
        driver.memory = MemoryFile(self.file).of("nvme")
        self.driver = driver
        return driver

    def bind(self, driver: str | None) -> None:
        """Bind the drive to nvme, to another driver, or to none."""
        link = self.tree.bus / DRIVE / "driver"
        if link.is_symlink():
            link.unlink()
        if driver is not None:
            target = self.tree.root / "bus/pci/drivers" / driver
            target.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(target, link.parent.resolve()))
        hidden = self.tree.root / "hidden"
        folder = self.controller.parent
        source, target = (hidden, folder) if driver == "nvme" else (folder, hidden)
        if source.exists():
            source.rename(target)

    def give_to_server(self) -> None:
        """Give the offered drive to a server by VFIO, and take it back."""
        assert self.find_reason() is None
        self.bind("vfio-pci")
        assert self.find_reason() is None
        self.bind("nvme")

    def find_reason(self) -> str | None:
        """Return why the drive is not offered; None if it is."""
        (device,) = self.driver.discover()
        reason = device.vendor_board_info.get(NOT_OFFERED)
        assert (reason is None) == bool(device.deployables)
        return reason


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_drive_without_signature_is_offered(host: Host) -> None:
    assert host.find_reason() is None


def test_drive_with_signature_is_withheld_until_it_is_erased(host: Host) -> None:
    host.tree.sign_disk("nvme0n1", "a partition table (gpt)")
    assert (host.find_reason() or "").startswith(TABLE)
    host.start_agent()
    assert (host.find_reason() or "").startswith(TABLE)
    host.tree.sign_disk("nvme0n1", None)
    assert host.find_reason() is None


def test_drive_with_partitions_that_udev_does_not_know(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.tree.add_partition("nvme0n1", "nvme0n1p1")
    assert (host.find_reason() or "").startswith("nvme0n1 holds a partition table; erase it")


def test_adopted_drive_is_offered_whatever_it_holds(host: Host) -> None:
    host.tree.sign_disk("nvme0n1", "a file system (ext4)")
    host.start_agent(adopt=[DRIVE])
    assert host.find_reason() is None


def test_what_a_server_left_withholds_nothing(host: Host) -> None:
    """Also while the server is stopped, after a restart of the agent, and until it is erased."""
    host.give_to_server()
    host.tree.sign_disk("nvme0n1", "a file system (ext4)")
    for _ in range(2):
        assert host.find_reason() is None
    host.start_agent()
    assert host.find_reason() is None
    host.bind("vfio-pci")  # the server starts again
    host.start_agent()
    assert host.find_reason() is None
    host.bind("nvme")
    assert host.find_reason() is None
    host.tree.sign_disk("nvme0n1", None)  # erased
    assert [host.find_reason(), host.find_reason()] == [None, None]
    host.tree.sign_disk("nvme0n1", "a part of a volume (LVM2_member)")  # by the host
    assert host.find_reason() is not None


def test_what_the_host_writes_to_an_offered_drive_withholds_it(host: Host) -> None:
    assert host.find_reason() is None
    host.tree.sign_disk("nvme0n1", "a file system (zfs_member)")
    assert host.find_reason() is not None
    host.start_agent()
    assert host.find_reason() is not None


def test_empty_namespace_that_the_kernel_shows_first_ends_nothing(host: Host) -> None:
    host.give_to_server()
    assert host.find_reason() is None  # the second namespace, with data, is not there yet
    host.tree.sign_disk("nvme0n1", "a file system (xfs)")
    assert host.find_reason() is None


def test_drive_that_held_data_of_the_host_is_not_offered_by_vfio(host: Host) -> None:
    host.tree.sign_disk("nvme0n1", "a file system (zfs_member)")
    assert host.find_reason() is not None
    host.bind("vfio-pci")  # a guest of the host
    for _ in range(2):
        assert (host.find_reason() or "").startswith("it held data of the host when its disks")
        host.start_agent()
    host.bind("nvme")
    assert host.find_reason() is not None
    host.tree.sign_disk("nvme0n1", None)
    assert host.find_reason() is None


def test_drive_of_a_server_that_the_host_used_since_is_withheld(host: Host) -> None:
    host.give_to_server()
    host.tree.sign_disk("nvme0n1", "a part of a volume (LVM2_member)")
    host.tree.add_disk("dm-7", "virtual/block", slaves=["nvme0n1"])
    assert host.find_reason() == "nvme0n1 holds a part of dm-7"
    holder = host.tree.root / "class/block/nvme0n1/holders/dm-7"
    holder.unlink()  # the volume group is not active now
    assert (host.find_reason() or "").startswith("nvme0n1 holds a part of a volume (LVM2_member);")


def test_drive_that_was_adopted_has_the_data_of_servers(host: Host) -> None:
    host.tree.sign_disk("nvme0n1", "a file system (ext4)")
    host.start_agent(adopt=[DRIVE])
    assert host.find_reason() is None
    host.start_agent()
    assert host.find_reason() is None


def test_drive_that_replaces_a_drive_first_seen_without_serial(host: Host) -> None:
    host.bind("vfio-pci")
    assert host.find_reason() is None
    host.bind("nvme")
    host.tree.sign_disk("nvme0n1", "a file system (ext4)")
    assert host.find_reason() is None
    host.replace("S2")
    assert host.find_reason() is not None


def test_fibre_channel_controller_of_a_server(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.add_function(HBA, "1077", "2261", "0c0400", kernel_driver="vfio-pci")
    driver = GenericDriver("gen0", {"devices": ["address=*"]}, tree.root)
    assert driver.discover()[0].deployables
    tree.add_disk("sda", f"pci0000:00/{HBA}/host0/target0/block")
    tree.sign_disk("sda", "a partition table (gpt)")
    assert driver.discover()[0].deployables


def test_live_drive_without_a_namespace_is_offered(host: Host) -> None:
    (host.controller / "state").write_text("live\n")
    shutil.rmtree(host.controller / "nvme0n1")
    assert host.find_reason() is None


def test_controller_without_driver_and_disks_is_withheld(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.add_function(HBA, "1000", "0097", "010700")
    driver = GenericDriver("gen0", {"devices": ["address=*"]}, tree.root)
    assert driver.discover()[0].deployables == ()


def test_drive_that_replaces_the_drive_of_a_server_is_judged_anew(host: Host) -> None:
    host.give_to_server()
    host.replace("S2")
    host.tree.sign_disk("nvme0n1", "a partition table (gpt)")
    assert (host.find_reason() or "").startswith(TABLE)


def test_drive_bound_to_vfio_before_the_first_discovery_is_for_servers(host: Host) -> None:
    host.bind("vfio-pci")
    assert host.find_reason() is None
    host.bind("nvme")
    host.tree.sign_disk("nvme0n1", "a partition table (gpt)")
    assert host.find_reason() is None


@pytest.mark.parametrize("driver", [None, "nvme"])
def test_drive_that_shows_no_disk_is_withheld_until_it_does(host: Host, driver: str | None) -> None:
    host.bind(None)
    if driver is not None:  # bound, and its namespaces are not read yet
        (host.tree.bus / DRIVE / "driver").symlink_to(host.tree.root / "bus/pci/drivers/nvme")
    reason = host.find_reason() or ""
    assert reason.startswith("the contents of its disks are unknown while it is bound to n")
    (host.tree.bus / DRIVE / "driver").unlink(missing_ok=True)
    host.bind("nvme")
    assert host.find_reason() is None
    host.bind(None)
    assert host.find_reason() is None  # known


def test_unreadable_disk_is_withheld_but_not_forgotten(host: Host) -> None:
    assert host.find_reason() is None
    host.tree.sign_disk("nvme0n1", None, error="Permission denied")
    expected = "the contents of nvme0n1 are unknown: Permission denied"
    assert host.find_reason() == expected
    host.bind("vfio-pci")
    assert host.find_reason() is None
    host.bind("nvme")
    assert host.find_reason() is None


def test_controller_of_disks_with_signatures(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.add_function(HBA, "1000", "005d", "010700", kernel_driver="mpt3sas")
    driver = GenericDriver("gen0", {"devices": ["address=*"]}, tree.root)
    assert driver.discover()[0].deployables
    tree.add_disk("sda", f"pci0000:00/{HBA}/host0/target0/block")
    assert driver.discover()[0].deployables
    tree.sign_disk("sda", "a file system (zfs_member)")
    (device,) = driver.discover()
    assert device.deployables == ()
    assert device.vendor_board_info[NOT_OFFERED].startswith("sda holds a file system (zfs_member);")
    assert device.undeliverable_reason is not None


@pytest.mark.parametrize(
    "text",
    ["", "x", "[" * 60000, '{"a": 1}', "null", "{}", '{"model": 1}', '{"model": "", "serial": []}'],
    ids=len,
)
def test_malformed_memory_is_unknown(host: Host, text: str) -> None:
    host.driver.memory.put(f"disks {DRIVE}", text)
    host.tree.sign_disk("nvme0n1", "a partition table (gpt)")
    assert (host.find_reason() or "").startswith(TABLE)
