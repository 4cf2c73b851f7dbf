# SPDX-License-Identifier: Apache-2.0
"""The readers of health on sysfs trees and kernel logs of the test's own."""

from pathlib import Path
from typing import Any

import pytest

from cyborg.core.device import Health
from cyborg.core.errors import Misconfigured
from cyborg.core.health import WELL, Measurement
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.health import CHECKS
from cyborg.fixtures.sysfs_tree import SysfsTree

PF = "0000:3b:00.0"


def sick(reason: str) -> Measurement:
    return Measurement(Health.UNHEALTHY, reason)


class Bed:
    """A card on a bus that is a directory, and a driver that measures it."""

    def __init__(self, root: Path, rule: str = "vendor=8086", **function: Any) -> None:
        self.tree = SysfsTree(root / "sys")
        self.folder = self.tree.function(PF, **function)
        self.log = root / "kmsg"
        options = {"devices": [rule], "health": list(CHECKS)}
        self.driver = GenericDriver("gen0", options, self.tree.root, kernel_log=self.log)

    def put(self, name: str, value: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")

    def say(self, line: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{line}\n")

    def measure(self) -> Measurement:
        return self.driver.measure(self.driver.discover())[PF]


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


def test_a_device_that_tells_nothing_is_well(bed: Bed) -> None:
    assert bed.measure() == WELL


def test_errors_are_sick_while_they_rise(bed: Bed) -> None:
    def errors(fatal: int, nonfatal: int) -> Measurement:
        bed.put("aer_dev_fatal", f"Undefined 0\nDLP {fatal}\nTOTAL_ERR_FATAL {fatal}")
        bed.put("aer_dev_nonfatal", f"TLP {nonfatal}\nTOTAL_ERR_NONFATAL {nonfatal}")
        return bed.measure()

    assert errors(7, 9) == WELL, "from before the agent began"
    assert errors(8, 9) == sick("fatal PCIe errors (AER)")
    assert errors(9, 12) == sick("fatal and non-fatal PCIe errors (AER)")
    assert errors(9, 13) == sick("non-fatal PCIe errors (AER)")
    assert errors(9, 13) == WELL
    assert errors(0, 0) == WELL, "counted anew after a reset"
    assert errors(1, 0) == sick("fatal PCIe errors (AER)")


def test_counters_that_cannot_be_read_begin_anew(bed: Bed) -> None:
    bed.put("aer_dev_fatal", "TOTAL_ERR_FATAL 1")
    bed.measure()
    for unreadable in ("", "TOTAL_ERR_FATAL", "TOTAL_ERR_FATAL x", "nothing 5"):
        bed.put("aer_dev_fatal", unreadable)
        assert bed.measure() == WELL
    bed.put("aer_dev_fatal", "TOTAL_ERR_FATAL 2")
    assert bed.measure() == WELL


@pytest.mark.parametrize(
    ("width", "speed", "widest", "fastest", "found"),
    [
        ("16", "8.0 GT/s PCIe", "16", "16.0 GT/s PCIe", WELL),
        (
            "8",
            "16.0 GT/s PCIe",
            "16",
            "16.0 GT/s PCIe",
            Measurement(Health.OK, "PCIe link x8, the device can x16"),
        ),
        ("0", "2.5 GT/s PCIe", "16", "16.0 GT/s PCIe", sick("PCIe link down")),
        ("63", "Unknown", "16", "16.0 GT/s PCIe", sick("PCIe link down")),
        ("0", "Unknown", "0", "Unknown", WELL),
        ("0", "Unknown", "255", "Unknown speed", WELL),
        ("x", "Unknown", "16", "16.0 GT/s PCIe", WELL),
    ],
)
def test_links(
    bed: Bed, width: str, speed: str, widest: str, fastest: str, found: Measurement
) -> None:
    bed.put("current_link_width", width)
    bed.put("current_link_speed", speed)
    bed.put("max_link_width", widest)
    bed.put("max_link_speed", fastest)
    assert bed.measure() == found


@pytest.mark.parametrize("where", ["hwmon/hwmon3", "nvme/nvme0/hwmon2", "nvme/nvme0/hwmon/hwmon2"])
def test_a_sensor_at_its_critical_temperature(bed: Bed, where: str) -> None:
    bed.put(f"{where}/temp1_input", "84999")
    bed.put(f"{where}/temp1_crit", "85000")
    bed.put(f"{where}/temp2_input", "200000")
    bed.put(f"{where}/temp3_input", "40000")
    bed.put(f"{where}/temp3_crit", "0")
    assert bed.measure() == WELL
    bed.put(f"{where}/temp1_input", "85000")
    assert bed.measure() == sick("too hot: temp1 at its critical 85 °C or above")
    bed.put(f"{where}/temp1_label", "Composite")
    bed.put(f"{where}/temp1_input", "99000")
    assert bed.measure() == sick("too hot: Composite at its critical 85 °C or above")


def test_a_function_that_answers_with_ones(bed: Bed) -> None:
    config = bed.folder / "config"
    config.write_bytes(bytes.fromhex("8680c837") + bytes(60))
    assert bed.measure() == WELL
    config.write_bytes(b"\xff" * 64)
    assert bed.measure() == sick("fallen off the bus: its configuration reads as ones")
    config.write_bytes(b"\xff\xff")
    assert bed.measure() == WELL, "too little to tell"


def test_a_virtual_function_has_ones_by_the_standard(bed: Bed, tmp_path: Path) -> None:
    (bed.folder / "physfn").symlink_to("../0000:3b:00.7")
    (bed.folder / "config").write_bytes(b"\xff" * 64)
    other = bed.tree.function("0000:3b:00.7", totalvfs=1)
    (other / "sriov_numvfs").write_text("1\n")
    devices = bed.driver.discover()
    assert [device.address for device in devices] == ["0000:3b:00.7"]
    assert bed.driver.measure(devices) == {"0000:3b:00.7": WELL}


def test_one_that_sleeps_is_not_woken(bed: Bed) -> None:
    (bed.folder / "config").write_bytes(b"\xff" * 64)
    bed.put("power/runtime_status", "suspended")
    assert bed.measure() == WELL
    bed.put("power/runtime_status", "active")
    assert bed.measure().health is Health.UNHEALTHY


@pytest.mark.parametrize(
    ("has", "rule", "found"),
    [
        ("nvidia", "vendor=8086", WELL),
        (None, "vendor=8086", WELL),
        ("nvidia", "vendor=8086,kernel_driver=vfio-pci|nvidia", WELL),
        (
            None,
            "vendor=8086,kernel_driver=vfio-pci|nvidia",
            sick(f"{PF} has no kernel driver, expected nvidia or vfio-pci"),
        ),
        (
            "nouveau",
            "vendor=8086,kernel_driver=nvidia",
            sick(f"{PF} has the kernel driver nouveau, expected nvidia"),
        ),
    ],
)
def test_kernel_drivers(tmp_path: Path, has: str | None, rule: str, found: Measurement) -> None:
    assert Bed(tmp_path, rule, kernel_driver=has).measure() == found


def test_the_kernel_drivers_of_virtual_functions(tmp_path: Path) -> None:
    bed = Bed(tmp_path, "product=37c9,kernel_driver=vfio-pci", totalvfs=2)
    one, two = bed.tree.virtual_functions(PF, 2)
    bed.tree._link(bed.tree.bus / one / "driver", bed.tree.root / "bus/pci/drivers/vfio-pci")
    assert bed.measure() == sick(f"{two} has no kernel driver, expected vfio-pci")


def test_one_that_just_vanished_is_not_measured(bed: Bed) -> None:
    devices = bed.driver.discover()
    bed.tree.remove(PF)
    assert bed.driver.measure(devices) == {}


def test_xids_that_mean_a_sick_gpu(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    assert bed.measure() == WELL
    assert "No Xid is seen" in caplog.text
    bed.say("6,339,5140900,-;pci 0000:3b:00.0: enabling device")
    bed.say("3,340,5140901,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=7, Ch 00000008, MMU Fault")
    bed.say("3,341,5140902,-;NVRM: Xid (PCI:0000:3c:00): 79, GPU has fallen off the bus.")
    assert bed.measure() == WELL
    bed.say("3,342,5140903,-;NVRM: Xid (PCI:0000:3B:00 GPU-I:05): 95, pid=7194, Uncontained")
    bed.say("3,343,5140904,-;NVRM: Xid (PCI:0000:3b:00): 48, pid=7, An uncorrectable DBE")
    bed.say(" DEVICE=+pci:0000:3b:00.0")
    told = sick("Xid 48 (double bit ECC error), Xid 95 (uncontained memory error)")
    assert bed.measure() == told
    assert bed.measure() == told, "it stays"
    begin = "3,344,5140905,-;NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from"
    bed.say(f"{begin} 0x0 (None) to 0x1 (GPU Reset Required)")
    assert bed.measure() == told
    bed.say(f"{begin} 0x1 (GPU Reset Required) to 0x0 (None)")
    assert bed.measure() == WELL


@pytest.mark.parametrize(
    "line",
    [
        "12,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, written by a program",
        "3,1,2,-;someone says NVRM: Xid (PCI:0000:3b:00): 79, GPU",
        "NVRM: Xid (PCI:0000:3b:00): 79, no record at all",
        "x,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79",
        "3,1,2,-;NVRM: Xid (PCI:0000:3b): 79",
    ],
)
def test_what_is_no_xid_of_the_driver(bed: Bed, line: str) -> None:
    bed.say(line)
    assert bed.measure() == WELL


def test_what_is_not_asked_for_is_not_measured(bed: Bed) -> None:
    (bed.folder / "config").write_bytes(b"\xff" * 64)
    driver = GenericDriver("g", {"devices": ["vendor=8086"], "health": ["aer"]}, bed.tree.root)
    assert driver.measure(driver.discover()) == {PF: WELL}
    assert driver.abilities == {"measures"}
    assert GenericDriver("g", {"health": []}, bed.tree.root).abilities == frozenset()


def test_an_unknown_check_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"^\[g\] health: found 'smell'; expected of aer, link"):
        GenericDriver("g", {"health": ["aer", "smell"]}, tmp_path)
