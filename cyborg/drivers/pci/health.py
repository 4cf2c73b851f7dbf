# SPDX-License-Identifier: Apache-2.0
"""Health checks of PCI functions, based on sysfs and on NVIDIA's Xid errors in the kernel log.

NVIDIA's "Xid Errors", chapter "Analyzing Xid Errors with the Xid Catalog", describes the meaning of
each Xid and the required action. An example of a line in the log is
``NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.``; the comments of
``kern_gpu_error_cont_ga100.c`` of NVIDIA's open kernel modules have such lines, and ``nverror.h``
there has the names of most codes.

Each check returns a measurement. It returns None if the health is unknown, because a file is
missing or the PCI function is suspended. A suspended PCI function is not resumed. Each check names
the kernel document of the files that it reads, in ``Documentation/ABI/testing`` unless stated
otherwise. ``power/runtime_status`` is described in ``sysfs-devices-power``.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_state import HEALTHY, Measurement, combine
from cyborg.drivers.base import InvalidOption
from cyborg.drivers.kernel.log import KernelLog
from cyborg.drivers.pci.topology import NO_WIDTH, is_unknown_speed
from cyborg.drivers.sysfs import PCI_DEVICES, Sysfs

# Xids after which the GPU needs a reset, a reboot of the host, or the vendor's support.
# They are those of the catalog's "Resolution Bucket (Immediate Action)" with RESET_GPU, RESTART_BM
# or CHECK_MECHANICALS, and 48 and 74, whose workflows end with a reset. Excluded are Xids that a
# faulty program causes (RESTART_APP: 13, 31, 43, 45), and Xids after which the GPU continues to
# work (IGNORE): a remapped row (63), an error that affects only one program (94), a corrected error
# of C2C (121). So is 155, which the driver also logs where a link is switched off on purpose.
FATAL_XIDS: Mapping[int, str] = {
    46: "GPU stopped processing",
    48: "double bit ECC error",
    54: "auxiliary power is not connected",
    62: "internal micro-controller halt",
    64: "memory remapping failure",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
    156: "resource retirement event",
    158: "GPU fatal timeout",
}
# Xids of NVLink 5 (Blackwell) with the unit: "Fatal" or "Nonfatal" in the text says which it is,
# such as ``149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 ...)``.
LINK_XIDS: Mapping[int, str] = {
    144: "SAW",
    145: "RLW",
    146: "TLW",
    147: "TREX",
    148: "NVLPW_CTRL",
    149: "NETIR",
    150: "MSE",
}
# Xids of the machine that no recovery of the GPU ends.
LASTING_XIDS = frozenset({54})
# The Xid of drivers from R565 on with the required recovery action of the GPU, such as ``154, GPU
# recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)``. "None" means no action
# (``GPU_RECOVERY_ACTION_CHANGED`` in ``gpu.c`` of NVIDIA's open kernel modules).
RECOVERY_XID = 154

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]*\): (\d+)")
_ACTION = re.compile(r"\bto 0x([0-9a-fA-F]{1,8}) \(([A-Za-z0-9 /-]{1,64})\)")
_FATAL = re.compile(r"\bFatal\b")


class XidLog:
    """Fatal Xids of each GPU since the boot, or since the log was cleared (``dmesg --clear``).

    A restarted agent reads the log again. After a reset of a GPU an operator must clear the log and
    restart the agent, unless the driver logs that the GPU recovered.
    """

    def __init__(self, path: str | Path = "/dev/kmsg") -> None:
        """Store the path; the log is opened by the first ``read``."""
        self._log = KernelLog(path, "Xid")
        self._faults: dict[str, dict[int, str]] = {}  # descriptions by device and Xid

    def read(self) -> None:
        """Process the new records of the log. Warn once if the log cannot be read."""
        for text in self._log.read():
            self._process(text)

    def measure(self, address: str) -> Measurement:
        """Return the health of the device at a PCI address; its function number is ignored."""
        faults = self._faults.get(address.rpartition(".")[0].lower())
        if not faults:
            return HEALTHY
        reason = ", ".join(f"Xid {code} ({text})" for code, text in sorted(faults.items()))
        return Measurement(Health.UNHEALTHY, reason)

    def _process(self, text: str) -> None:
        match = _XID.match(text)
        if match is None:
            return
        device, code = match[1].lower(), int(match[2])
        action = _ACTION.search(text) if code == RECOVERY_XID else None
        if action is not None and int(action[1], 16) == 0:
            faults = self._faults.get(device, {})
            self._faults[device] = {xid: faults[xid] for xid in faults if xid in LASTING_XIDS}
        elif (fault := _describe(code, text, action)) is not None:
            self._faults.setdefault(device, {})[code] = fault


def _describe(code: int, text: str, action: re.Match[str] | None) -> str | None:
    """Return a description of the fault that an Xid reports; None if it reports none."""
    if action is not None:
        return f"recovery action: {action[2]}"
    if code in LINK_XIDS and _FATAL.search(text):
        return f"fatal NVLink error of {LINK_XIDS[code]}"
    return FATAL_XIDS.get(code)


# Names of all checks, as the option ``health`` lists them.
CHECKS = ("aer", "link", "link_width", "temperature", "bus", "driver", "xid")

# Checks that need no privilege and access only the configuration space of the device.
DEFAULT = ("aer", "link", "bus", "driver")

_AER = {"fatal": "aer_dev_fatal", "non-fatal": "aer_dev_nonfatal"}
_NO_RESPONSE = b"\xff\xff\xff\xff"


def parse_checks(names: Sequence[str]) -> Sequence[str]:
    """Return the names of checks. Raise InvalidOption for an unknown one."""
    if unknown := sorted(set(names) - set(CHECKS)):
        raise InvalidOption(unknown[0], f"one of {', '.join(CHECKS)}")
    return names


class HealthReader:
    """Health checks of one backend's PCI functions, with the last values of error counters."""

    def __init__(
        self, sysfs: Sysfs, checks: Collection[str], kernel_log: str | Path | None
    ) -> None:
        """``checks`` are names of CHECKS. Without ``kernel_log`` the check ``xid`` is off."""
        self._sysfs = sysfs
        self._checks = frozenset(checks)
        self._xids = XidLog(kernel_log) if "xid" in checks and kernel_log is not None else None
        self._errors: dict[str, dict[str, int]] = {}

    def measure(
        self, functions: Mapping[str, Mapping[str, Collection[str]]]
    ) -> dict[str, Measurement]:
        """Return the health of PCI functions by address.

        ``functions`` maps the address of each PCI function to a second mapping. The second mapping
        has the required kernel drivers of this PCI function and of its virtual functions, by
        address; an empty collection permits any driver. Absent PCI functions are not in the result.
        """
        if self._xids is not None:
            self._xids.read()
        self._errors = {address: self._errors.get(address, {}) for address in functions}
        return {
            address: self._measure_function(address, drivers)
            for address, drivers in functions.items()
            if self._sysfs.read_text(PCI_DEVICES / address / "vendor") is not None
        }

    def _measure_function(
        self, address: str, drivers: Mapping[str, Collection[str]]
    ) -> Measurement:
        """Return the combined result of the enabled checks of a function."""
        folder, results = PCI_DEVICES / address, list[Measurement | None]()
        if "driver" in self._checks:
            results += [check_kernel_driver(self._sysfs, f, names) for f, names in drivers.items()]
        if "aer" in self._checks:
            results.append(self._aer(address))
        if self._xids is not None:
            results.append(self._xids.measure(address))
        # These checks would wake the function: the kernel resumes it to read its configuration
        # space.
        if self._sysfs.read_text(folder / "power/runtime_status") != "suspended":
            results += [
                check(self._sysfs, folder)
                for name, check in _WAKING_CHECKS.items()
                if name in self._checks
            ]
        return combine(m for m in results if m is not None)

    def _aer(self, address: str) -> Measurement | None:
        """Return unhealthy if uncorrectable PCIe errors increased since the last measurement.

        The first measurement only stores the counters.
        """
        # ``sysfs-bus-pci-devices-aer_stats``: the last line of a file has the total
        # (TOTAL_ERR_FATAL or TOTAL_ERR_NONFATAL).
        previous, current = self._errors[address], dict[str, int]()
        for kind, name in _AER.items():
            total = _total(self._sysfs.read_text(PCI_DEVICES / address / name))
            if total is not None:
                current[kind] = total
        self._errors[address] = current
        rising = [kind for kind in current if current[kind] > previous.get(kind, current[kind])]
        if rising:
            reason = f"{' and '.join(rising)} PCIe errors (AER)"
            return Measurement(Health.UNHEALTHY, reason)
        return HEALTHY if current else None


def check_bus(sysfs: Sysfs, folder: Path) -> Measurement | None:
    """Return unhealthy if the configuration space reads as 0xff: the function does not respond."""
    # ``Documentation/PCI/sysfs-pci.rst``, ``config``. A virtual function is not checked: its ids
    # read as 0xffff (``init_pci_cap_basic_perm`` of ``drivers/vfio/pci/vfio_pci_config.c``).
    if sysfs.read_link(folder / "physfn") is not None:
        return None
    start = sysfs.read_bytes(folder / "config", len(_NO_RESPONSE))
    if start is None or len(start) < len(_NO_RESPONSE):
        return None
    if start == _NO_RESPONSE:
        return Measurement(
            Health.UNHEALTHY, "not responding on the bus: its configuration space reads as ones"
        )
    return HEALTHY


def check_link(sysfs: Sysfs, folder: Path) -> Measurement | None:
    """Return unhealthy if the link is down. A link narrower than the maximum is healthy."""
    # Many cards are in narrow slots. The speed is not reported: an idle card lowers it to save
    # power.
    # ``current_link_speed_show`` and the functions next to it in ``drivers/pci/pci-sysfs.c`` write
    # the files.
    widest = sysfs.read_int(folder / "max_link_width")
    fastest = sysfs.read_text(folder / "max_link_speed")
    width = sysfs.read_int(folder / "current_link_width")
    speed = sysfs.read_text(folder / "current_link_speed")
    # A function without its own link, or without power, has no known maximum: see NO_WIDTH.
    has_link = widest not in NO_WIDTH and not is_unknown_speed(fastest)
    if not has_link or widest is None or width is None or speed is None:
        return None
    if width == 0 or is_unknown_speed(speed):
        return Measurement(Health.UNHEALTHY, "PCIe link down")
    if width < widest:
        return Measurement(Health.OK, f"PCIe link x{width}, the device supports x{widest}")
    return HEALTHY


def check_link_width(sysfs: Sysfs, folder: Path) -> Measurement | None:
    """Return unhealthy if the link has fewer lanes than both the function and its slot support."""
    # The speed is not checked: an idle card lowers it to save power.
    # ``current_link_width_show`` and ``max_link_width_show`` of ``drivers/pci/pci-sysfs.c`` write
    # the files. Those of the slot are in the folder of the bridge above the function.
    # The entry of the bus is a link, so ".." is the bridge and not the bus.
    own = sysfs.read_int(folder / "max_link_width")
    of_slot = sysfs.read_int(folder / ".." / "max_link_width")
    supported = [lanes for lanes in (own, of_slot) if lanes is not None and lanes not in NO_WIDTH]
    width = sysfs.read_int(folder / "current_link_width")
    # A function without a link of its own, or one whose link is down, which ``check_link`` reports.
    if own in NO_WIDTH or width is None or width in NO_WIDTH:
        return None
    if width < min(supported):
        return Measurement(
            Health.UNHEALTHY,
            f"PCIe link x{width}, the device and its slot support x{min(supported)}",
        )
    return HEALTHY


def check_temperature(sysfs: Sysfs, folder: Path) -> Measurement | None:
    """Return unhealthy if a sensor is at or above its critical temperature."""
    # ``sysfs-class-hwmon``: ``temp*_input`` and ``temp*_crit``, in millidegrees Celsius.
    hot: list[str] = []
    measured = False
    for sensors in _hwmons(sysfs, folder):
        for name in sysfs.list_names(sensors):
            if not (name.startswith("temp") and name.endswith("_input")):
                continue
            sensor = name.removesuffix("_input")
            current = sysfs.read_int(sensors / name)
            critical = sysfs.read_int(sensors / f"{sensor}_crit")
            if current is None or critical is None or critical <= 0:
                continue  # without a sensible limit, the temperature says nothing
            measured = True
            if current >= critical:
                label = sysfs.read_text(sensors / f"{sensor}_label") or sensor
                hot.append(f"{label} at its critical {critical / 1000:g} °C or above")
    if hot:
        return Measurement(Health.UNHEALTHY, f"too hot: {', '.join(hot)}")
    return HEALTHY if measured else None


_WAKING_CHECKS: Mapping[str, Callable[[Sysfs, Path], Measurement | None]] = {
    "bus": check_bus,
    "link": check_link,
    "link_width": check_link_width,
    "temperature": check_temperature,
}


def check_kernel_driver(
    sysfs: Sysfs, address: str, required: Collection[str]
) -> Measurement | None:
    """Return unhealthy if a PCI function is not bound to one of the required kernel drivers."""
    # ``sysfs-bus-pci``: the link ``driver``.
    if not required:
        return None
    target = sysfs.read_link(PCI_DEVICES / address / "driver")
    if target in required:
        return HEALTHY
    has = "no kernel driver" if target is None else f"the kernel driver {target}"
    return Measurement(
        Health.UNHEALTHY, f"{address} has {has}, expected {' or '.join(sorted(required))}"
    )


def _hwmons(sysfs: Sysfs, folder: Path) -> list[Path]:
    """Return the sensor folders of a PCI function; for an NVMe drive, of its controller."""
    # ``nvme_hwmon_init`` of ``drivers/nvme/host/hwmon.c``: the sensors belong to the controller.
    below = [folder, *(folder / "nvme" / name for name in sysfs.list_names(folder / "nvme"))]
    at = [(where / "hwmon", name) for where in below for name in sysfs.list_names(where / "hwmon")]
    # The sensors of the controller are directly in its folder.
    at += [(where, name) for where in below[1:] for name in sysfs.list_names(where)]
    return [where / name for where, name in at if name.startswith("hwmon") and name != "hwmon"]


def _total(text: str | None) -> int | None:
    for line in reversed((text or "").splitlines()):
        name, _, count = line.rpartition(" ")
        if name.startswith("TOTAL_ERR_") and count.isdecimal():
            return int(count)
    return None
