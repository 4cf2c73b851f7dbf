# SPDX-License-Identifier: Apache-2.0
"""Resource classes of NVMe controllers by medium and capacity (``class_by_capacity``)."""

import os
from pathlib import Path

import pytest

from cyborg.agent.state_file import MemoryFile
from cyborg.core.inventory.device import Device
from cyborg.drivers.nvme.driver import NvmeDriver, resource_class_of
from cyborg.testing.machine import HostTree

DRIVE = "0000:01:00.0"
CONTROLLER = f"devices/pci0000:00/{DRIVE}/nvme/nvme0"
SMALL, LARGE = 960197124096, 1920383410176  # bytes of drives that are sold as 960 GB and 1.92 TB
REASON = "its capacity is unknown, and so is its resource class: bind it to the kernel driver nvme"


class Host:
    """A host with one drive, whose kernel driver a server's vfio-pci can replace."""

    def __init__(self, folder: Path) -> None:
        self.tree = HostTree(folder)
        self.tree.add_function(DRIVE, "144d", "a80a", "010802", kernel_driver="nvme", totalvfs=4)
        self.tree.add_disk("nvme0n1", f"pci0000:00/{DRIVE}/nvme/nvme0")
        self.controller = self.tree.root / CONTROLLER
        self.resize(LARGE)
        self.set_state("live")
        self.file = folder / "memory.json"

    def resize(self, capacity: int, rotational: int = 0) -> None:
        (self.controller / "nvme0n1/size").write_text(f"{capacity // 512}\n")
        (self.controller / "nvme0n1/queue").mkdir(exist_ok=True)
        (self.controller / "nvme0n1/queue/rotational").write_text(f"{rotational}\n")

    def set_state(self, state: str) -> None:
        (self.controller / "state").write_text(f"{state}\n")

    def bind(self, driver: str) -> None:
        """Bind the drive to nvme, which shows its namespaces, or to another kernel driver."""
        link = self.tree.bus / DRIVE / "driver"
        link.unlink()
        link.symlink_to(os.path.relpath(self.tree.root / "bus/pci/drivers" / driver, link.parent))
        hidden = self.tree.root / "hidden"
        source, target = self.controller.parent, hidden
        if driver == "nvme":
            source, target = target, source
        if source.exists():
            source.rename(target)

    def start_agent(self, *rules: str, class_by_capacity: bool = True) -> NvmeDriver:
        """Return a driver as a new agent process makes it."""
        options = {"devices": rules or ["address=*"], "class_by_capacity": class_by_capacity}
        driver = NvmeDriver("drives", options, self.tree.root)
        driver.memory = MemoryFile(self.file).of("drives")
        return driver


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def discover(driver: NvmeDriver) -> tuple[str, str | None]:
    """Return the class of the drive, and why it is not deliverable."""
    (device,) = driver.discover()
    (part,) = device.deployables
    return part.resource_class, device.undeliverable_reason


@pytest.mark.parametrize(
    ("capacity", "rotational", "expected"),
    [
        (SMALL, False, "CUSTOM_NVME_SSD_960GB"),
        (LARGE, False, "CUSTOM_NVME_SSD_1_92TB"),
        (3840755982336, False, "CUSTOM_NVME_SSD_3_84TB"),
        (7681501126656, False, "CUSTOM_NVME_SSD_7_68TB"),
        (15362991415296, False, "CUSTOM_NVME_SSD_15_4TB"),
        (512110190592, False, "CUSTOM_NVME_SSD_512GB"),
        (1000204886016, False, "CUSTOM_NVME_SSD_1TB"),
        (999_900_000_000, False, "CUSTOM_NVME_SSD_1TB"),
        (122_880_000_000_000, False, "CUSTOM_NVME_SSD_123TB"),
        (20_000_588_955_648, True, "CUSTOM_NVME_HDD_20TB"),
        (64 * 1024 * 1024, False, "CUSTOM_NVME_SSD_67_1MB"),
        (512, False, "CUSTOM_NVME_SSD_512B"),
    ],
)
def test_resource_class_rounds_to_three_digits(
    capacity: int, rotational: bool, expected: str
) -> None:
    assert resource_class_of(capacity, rotational=rotational) == expected


def test_discover_class_follows_capacity_and_medium(host: Host) -> None:
    assert discover(host.start_agent(class_by_capacity=False)) == ("CUSTOM_NVME", None)
    assert discover(host.start_agent()) == ("CUSTOM_NVME_SSD_1_92TB", None)
    host.resize(LARGE, rotational=1)
    driver = host.start_agent()
    discover(driver)
    assert discover(driver)[0] == "CUSTOM_NVME_HDD_1_92TB"


def test_discover_class_of_a_rule_has_priority(host: Host) -> None:
    rule = "vendor=144d,resource_class=CUSTOM_FAST"
    assert discover(host.start_agent(rule)) == ("CUSTOM_FAST", None)
    host.bind("vfio-pci")
    assert discover(host.start_agent(rule)) == ("CUSTOM_FAST", None), "also of unknown capacity"


def test_discover_drive_of_a_server_keeps_its_class(host: Host) -> None:
    driver = host.start_agent()
    before = discover(driver)
    host.bind("vfio-pci")
    assert discover(driver) == before
    assert discover(host.start_agent()) == before, "also after a restart of the agent"
    host.bind("nvme")
    assert discover(driver) == before


def test_discover_drive_that_was_never_seen_is_not_deliverable(host: Host) -> None:
    """Its class would change when it becomes known, maybe while a server has the drive."""
    host.bind("vfio-pci")
    driver = host.start_agent()
    resource_class, reason = discover(driver)
    assert resource_class == "CUSTOM_NVME"
    assert str(reason).startswith(REASON)
    host.bind("nvme")
    assert discover(driver) == ("CUSTOM_NVME_SSD_1_92TB", None)


def test_discover_other_model_in_the_slot_is_unknown(host: Host) -> None:
    discover(host.start_agent())
    host.bind("vfio-pci")
    (host.tree.bus / DRIVE / "device").write_text("0xa824\n")
    assert str(discover(host.start_agent())[1]).startswith(REASON)


@pytest.mark.parametrize("state", ["connecting", "resetting", "dead"])
def test_discover_controller_that_is_not_live_is_unknown(host: Host, state: str) -> None:
    """Its namespaces may not be complete."""
    host.set_state(state)
    driver = host.start_agent()
    assert str(discover(driver)[1]).startswith(REASON)
    host.set_state("live")
    assert discover(driver) == ("CUSTOM_NVME_SSD_1_92TB", None)
    host.set_state(state)
    assert discover(driver) == ("CUSTOM_NVME_SSD_1_92TB", None)


def test_discover_changed_capacity_is_reported_the_second_time(host: Host) -> None:
    """The kernel shows namespaces one after another, and hides them during a format."""
    driver = host.start_agent()
    before = discover(driver)
    host.resize(SMALL)
    assert discover(driver) == before
    host.resize(LARGE)
    assert discover(driver) == before
    host.resize(SMALL)
    assert discover(driver) == before
    assert discover(driver) == ("CUSTOM_NVME_SSD_960GB", None)
    assert discover(host.start_agent()) == ("CUSTOM_NVME_SSD_960GB", None)


def test_discover_namespaces_without_size_keep_the_class(host: Host) -> None:
    driver = host.start_agent()
    before = discover(driver)
    host.resize(0)
    assert [discover(driver) for _ in range(3)] == [before] * 3


def test_discover_virtual_functions_keep_one_class(host: Host) -> None:
    host.tree.enable_virtual_functions(DRIVE, 2, "a80a", "010802")
    devices: list[Device] = list(host.start_agent().discover())
    (part,) = devices[0].deployables
    assert (part.resource_class, len(part.handles)) == ("CUSTOM_NVME", 2)
    assert devices[0].deliverable


def test_discover_unchanged_drive_writes_nothing(host: Host) -> None:
    driver = host.start_agent()
    discover(driver)
    written = host.file.stat()
    for _ in range(3):
        discover(driver)
    discover(host.start_agent())
    assert host.file.stat().st_ino == written.st_ino, "a write replaces the file"
