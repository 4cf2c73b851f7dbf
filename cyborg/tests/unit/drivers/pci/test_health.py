# SPDX-License-Identifier: Apache-2.0
"""Health checks with simulated sysfs trees and kernel logs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import Misconfigured
from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_state import HEALTHY, Measurement
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.pci.health import CHECKS
from cyborg.testing.sysfs_tree import SysfsTree

PF = "0000:3b:00.0"


def unhealthy(reason: str) -> Measurement:
    return Measurement(Health.UNHEALTHY, reason)


class Env:
    """A simulated card, and a driver that measures it."""

    def __init__(self, root: Path, rule: str = "vendor=8086", **function: Any) -> None:
        self.tree = SysfsTree(root / "sys")
        self.folder = self.tree.add_function(PF, **function)
        self.log = root / "kmsg"
        options = {"devices": [rule], "health": [c for c in CHECKS if c != "link_width"]}
        access = replace(HostAccess.of(self.tree.root), kernel_log=self.log)
        self.driver = GenericDriver("gen0", options, self.tree.root, access)

    def write(self, name: str, value: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")

    def log_line(self, line: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{line}\n")

    def measure(self) -> Measurement:
        return self.driver.measure(self.driver.discover())[PF]


@pytest.fixture
def env(tmp_path: Path) -> Env:
    return Env(tmp_path)


def test_measure_device_without_files_is_healthy(env: Env) -> None:
    assert env.measure() == HEALTHY


def test_measure_rising_errors_are_unhealthy(env: Env) -> None:
    def errors(fatal: int, nonfatal: int) -> Measurement:
        env.write("aer_dev_fatal", f"Undefined 0\nDLP {fatal}\nTOTAL_ERR_FATAL {fatal}")
        env.write("aer_dev_nonfatal", f"TLP {nonfatal}\nTOTAL_ERR_NONFATAL {nonfatal}")
        return env.measure()

    assert errors(7, 9) == HEALTHY, "errors before the start of the agent"
    assert errors(8, 9) == unhealthy("fatal PCIe errors (AER)")
    assert errors(9, 12) == unhealthy("fatal and non-fatal PCIe errors (AER)")
    assert errors(9, 13) == unhealthy("non-fatal PCIe errors (AER)")
    assert errors(9, 13) == HEALTHY
    assert errors(0, 0) == HEALTHY, "counters restart after a reset"
    assert errors(1, 0) == unhealthy("fatal PCIe errors (AER)")


def test_measure_unreadable_counters_are_reset(env: Env) -> None:
    env.write("aer_dev_fatal", "TOTAL_ERR_FATAL 1")
    env.measure()
    for unreadable in ("", "TOTAL_ERR_FATAL", "TOTAL_ERR_FATAL x", "nothing 5"):
        env.write("aer_dev_fatal", unreadable)
        assert env.measure() == HEALTHY
    env.write("aer_dev_fatal", "TOTAL_ERR_FATAL 2")
    assert env.measure() == HEALTHY


@pytest.mark.parametrize(
    ("width", "speed", "widest", "fastest", "expected"),
    [
        ("16", "8.0 GT/s PCIe", "16", "16.0 GT/s PCIe", HEALTHY),
        (
            "8",
            "16.0 GT/s PCIe",
            "16",
            "16.0 GT/s PCIe",
            Measurement(Health.OK, "PCIe link x8, the device supports x16"),
        ),
        ("0", "2.5 GT/s PCIe", "16", "16.0 GT/s PCIe", unhealthy("PCIe link down")),
        ("63", "Unknown", "16", "16.0 GT/s PCIe", unhealthy("PCIe link down")),
        ("0", "Unknown", "0", "Unknown", HEALTHY),
        ("0", "Unknown", "255", "Unknown speed", HEALTHY),
        ("x", "Unknown", "16", "16.0 GT/s PCIe", HEALTHY),
    ],
)
def test_check_link_width_and_speed(
    env: Env, width: str, speed: str, widest: str, fastest: str, expected: Measurement
) -> None:
    env.write("current_link_width", width)
    env.write("current_link_speed", speed)
    env.write("max_link_width", widest)
    env.write("max_link_speed", fastest)
    assert env.measure() == expected


@pytest.mark.parametrize(
    ("width", "widest", "slot", "expected"),
    [
        ("16", "16", "16", HEALTHY),
        ("8", "16", "16", unhealthy("PCIe link x8, the device and its slot support x16")),
        ("8", "16", "8", HEALTHY),
        ("4", "16", "8", unhealthy("PCIe link x4, the device and its slot support x8")),
        ("8", "16", None, unhealthy("PCIe link x8, the device and its slot support x16")),
        ("0", "16", "16", HEALTHY),
        ("8", "0", "16", HEALTHY),
        ("8", None, "16", HEALTHY),
        (None, "16", "16", HEALTHY),
    ],
)
def test_check_link_width_compares_device_and_slot(
    env: Env, width: str | None, widest: str | None, slot: str | None, expected: Measurement
) -> None:
    files = {"current_link_width": width, "max_link_width": widest, "../max_link_width": slot}
    for name, value in files.items():
        if value is not None:
            env.write(name, value)
    driver = GenericDriver(
        "gen0", {"devices": ["vendor=8086"], "health": ["link_width"]}, env.tree.root
    )
    assert driver.measure(driver.discover())[PF] == expected
    env.write("power/runtime_status", "suspended")
    assert driver.measure(driver.discover())[PF] == HEALTHY, "not woken"


@pytest.mark.parametrize("folder", ["hwmon/hwmon3", "nvme/nvme0/hwmon2", "nvme/nvme0/hwmon/hwmon2"])
def test_check_temperature_critical_sensor_is_unhealthy(env: Env, folder: str) -> None:
    env.write(f"{folder}/temp1_input", "84999")
    env.write(f"{folder}/temp1_crit", "85000")
    env.write(f"{folder}/temp2_input", "200000")
    env.write(f"{folder}/temp3_input", "40000")
    env.write(f"{folder}/temp3_crit", "0")
    assert env.measure() == HEALTHY
    env.write(f"{folder}/temp1_input", "85000")
    assert env.measure() == unhealthy("too hot: temp1 at its critical 85 °C or above")
    env.write(f"{folder}/temp1_label", "Composite")
    env.write(f"{folder}/temp1_input", "99000")
    assert env.measure() == unhealthy("too hot: Composite at its critical 85 °C or above")


def test_check_bus_function_reading_ones_is_unhealthy(env: Env) -> None:
    config = env.folder / "config"
    config.write_bytes(bytes.fromhex("8680c837") + bytes(60))
    assert env.measure() == HEALTHY
    config.write_bytes(b"\xff" * 64)
    assert env.measure() == unhealthy(
        "not responding on the bus: its configuration space reads as ones"
    )
    config.write_bytes(b"\xff\xff")
    assert env.measure() == HEALTHY, "incomplete read"


def test_check_bus_virtual_function_is_ignored(env: Env, tmp_path: Path) -> None:
    (env.folder / "physfn").symlink_to("../0000:3b:00.7")
    (env.folder / "config").write_bytes(b"\xff" * 64)
    physical = env.tree.add_function("0000:3b:00.7", totalvfs=1)
    (physical / "sriov_numvfs").write_text("1\n")
    devices = env.driver.discover()
    assert [device.address for device in devices] == ["0000:3b:00.7"]
    assert env.driver.measure(devices) == {"0000:3b:00.7": HEALTHY}


def test_measure_suspended_function_is_not_read(env: Env) -> None:
    (env.folder / "config").write_bytes(b"\xff" * 64)
    env.write("power/runtime_status", "suspended")
    assert env.measure() == HEALTHY
    env.write("power/runtime_status", "active")
    assert env.measure().health is Health.UNHEALTHY


@pytest.mark.parametrize(
    ("bound_driver", "rule", "expected"),
    [
        ("nvidia", "vendor=8086", HEALTHY),
        (None, "vendor=8086", HEALTHY),
        ("nvidia", "vendor=8086,kernel_driver=vfio-pci|nvidia", HEALTHY),
        (
            None,
            "vendor=8086,kernel_driver=vfio-pci|nvidia",
            unhealthy(f"{PF} has no kernel driver, expected nvidia or vfio-pci"),
        ),
        (
            "nouveau",
            "vendor=8086,kernel_driver=nvidia",
            unhealthy(f"{PF} has the kernel driver nouveau, expected nvidia"),
        ),
    ],
)
def test_check_kernel_driver_compares_bound_driver(
    tmp_path: Path, bound_driver: str | None, rule: str, expected: Measurement
) -> None:
    assert Env(tmp_path, rule, kernel_driver=bound_driver).measure() == expected


def test_check_kernel_driver_of_virtual_functions(tmp_path: Path) -> None:
    env = Env(tmp_path, "product=37c9,kernel_driver=vfio-pci", totalvfs=2)
    first, second = env.tree.enable_virtual_functions(PF, 2)
    env.tree._link(env.tree.bus / first / "driver", env.tree.root / "bus/pci/drivers/vfio-pci")
    assert env.measure() == unhealthy(f"{second} has no kernel driver, expected vfio-pci")


def test_measure_missing_function_is_omitted(env: Env) -> None:
    devices = env.driver.discover()
    env.tree.remove_function(PF)
    assert env.driver.measure(devices) == {}


def test_measure_fatal_xid_is_unhealthy(env: Env, caplog: pytest.LogCaptureFixture) -> None:
    assert env.measure() == HEALTHY
    assert "Xid errors will not be detected" in caplog.text
    env.log_line("6,339,5140900,-;pci 0000:3b:00.0: enabling device")
    env.log_line("3,340,5140901,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=7, Ch 00000008, MMU Fault")
    env.log_line("3,341,5140902,-;NVRM: Xid (PCI:0000:3c:00): 79, GPU has fallen off the bus.")
    assert env.measure() == HEALTHY
    env.log_line("3,342,5140903,-;NVRM: Xid (PCI:0000:3B:00 GPU-I:05): 95, pid=7194, Uncontained")
    env.log_line("3,343,5140904,-;NVRM: Xid (PCI:0000:3b:00): 48, pid=7, An uncorrectable DBE")
    env.log_line(" DEVICE=+pci:0000:3b:00.0")
    expected = unhealthy("Xid 48 (double bit ECC error), Xid 95 (uncontained memory error)")
    assert env.measure() == expected
    assert env.measure() == expected, "the state persists"
    begin = "3,344,5140905,-;NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from"
    env.log_line(f"{begin} 0x0 (None) to 0x1 (GPU Reset Required)")
    action = "Xid 154 (recovery action: {})"
    assert env.measure() == unhealthy(f"{expected.reason}, {action.format('GPU Reset Required')}")
    env.log_line(f"{begin} 0x1 (GPU Reset Required) to 0x0 (None)")
    assert env.measure() == HEALTHY
    env.log_line(f"{begin} 0x0 (None) to 0x2 (Node Reboot Required)")
    assert env.measure() == unhealthy(action.format("Node Reboot Required"))
    env.log_line(f"{begin} 0x2 (Node Reboot Required) to 0x4 (Drain and Reset)")
    assert env.measure() == unhealthy(action.format("Drain and Reset"))
    env.log_line("3,1,2,-;NVRM: Xid (PCI:0000:3b:00): 54, pid=7")
    env.log_line(f"{begin} 0x4 (Drain and Reset) to 0x0 (None)")
    assert env.measure() == unhealthy("Xid 54 (auxiliary power is not connected)")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x00000000)",
            "Xid 149 (fatal NVLink error of NETIR)",
        ),
        ("144, SAW_MVB Fatal XC 1 i 2 Link 01 [0x0000000a]", "Xid 144 (fatal NVLink error of SAW)"),
        ("145, RLW_CTRL Nonfatal XC0 i0 Link 00 (0x00000003 0x80000000)", None),
        ("109, pid=7, name=train.py, Ch 00000008", "Xid 109 (context switch timeout)"),
        ("136, pid='<unknown>', name=<unknown>", "Xid 136 (NVLink training failed)"),
        ("143, GPU_INIT_ERROR", "Xid 143 (GPU initialization error)"),
        ("158, Fatal timeout", "Xid 158 (GPU fatal timeout)"),
        *((f"{code}, pid=7, name=train.py", None) for code in (8, 13, 31, 43, 45, 63, 94)),
        *((f"{code}, Fatal words of another error", None) for code in (121, 137, 155)),
        ("154, words without an action", None),
    ],
)
def test_measure_xid_by_its_recovery(env: Env, text: str, reason: str | None) -> None:
    env.log_line(f"3,1,2,-;NVRM: Xid (PCI:0000:3b:00): {text}")
    assert env.measure() == (HEALTHY if reason is None else unhealthy(reason))


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
def test_measure_other_log_lines_are_ignored(env: Env, line: str) -> None:
    env.log_line(line)
    assert env.measure() == HEALTHY


def test_measure_disabled_checks_are_skipped(env: Env) -> None:
    (env.folder / "config").write_bytes(b"\xff" * 64)
    driver = GenericDriver("g", {"devices": ["vendor=8086"], "health": ["aer"]}, env.tree.root)
    assert driver.measure(driver.discover()) == {PF: HEALTHY}
    assert driver.abilities == {"measures"}
    assert GenericDriver("g", {"health": []}, env.tree.root).abilities == frozenset()


def test_unknown_check_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        Misconfigured, match=r"^\[g\] health: found 'smell'; expected one of aer, link"
    ):
        GenericDriver("g", {"health": ["aer", "smell"]}, tmp_path)
