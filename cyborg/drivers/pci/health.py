# SPDX-License-Identifier: Apache-2.0
"""Health checks of PCI functions, based on sysfs and the kernel log.

Each check returns a measurement. It returns None if the health is unknown, because a file is
missing or the PCI function is suspended. A suspended PCI function is not resumed. Each check names
the kernel document of the files that it reads, in ``Documentation/ABI/testing`` unless stated
otherwise. ``power/runtime_status`` is described in ``sysfs-devices-power``.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from cyborg.core.inventory import device_state as health
from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_state import HEALTHY, Measurement
from cyborg.drivers.pci.kernel_log import XidLog
from cyborg.drivers.pci.topology import NO_WIDTH, is_unknown_speed
from cyborg.drivers.sysfs import Sysfs

CHECKS = ("aer", "link", "link_width", "temperature", "bus", "driver", "xid")
"""Names of all checks, as the option ``health`` lists them."""

DEFAULT = ("aer", "link", "bus", "driver")
"""Checks that need no privilege and access only the configuration space of the device."""

_AER = {"fatal": "aer_dev_fatal", "non-fatal": "aer_dev_nonfatal"}
_NO_RESPONSE = b"\xff\xff\xff\xff"


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
            if self._sysfs.read_text(_folder(address) / "vendor") is not None
        }

    def _measure_function(
        self, address: str, drivers: Mapping[str, Collection[str]]
    ) -> Measurement:
        folder, results = _folder(address), list[Measurement | None]()
        if "driver" in self._checks:
            results += [check_kernel_driver(self._sysfs, f, names) for f, names in drivers.items()]
        if "aer" in self._checks:
            results.append(self._aer(address))
        if self._xids is not None:
            results.append(self._xids.measure(address))
        # Each of these would wake it: the kernel resumes a device to read its configuration space.
        if self._sysfs.read_text(folder / "power/runtime_status") != "suspended":
            if "bus" in self._checks:
                results.append(check_bus(self._sysfs, folder))
            if "link" in self._checks:
                results.append(check_link(self._sysfs, folder))
            if "link_width" in self._checks:
                results.append(check_link_width(self._sysfs, folder))
            if "temperature" in self._checks:
                results.append(check_temperature(self._sysfs, folder))
        return health.combine(m for m in results if m is not None)

    def _aer(self, address: str) -> Measurement | None:
        """Return unhealthy if uncorrectable PCIe errors increased since the last measurement.

        The first measurement only stores the counters. ``sysfs-bus-pci-devices-aer_stats``: the
        last line of a file has the total (TOTAL_ERR_FATAL or TOTAL_ERR_NONFATAL).
        """
        previous, current = self._errors[address], dict[str, int]()
        for kind, name in _AER.items():
            total = _total(self._sysfs.read_text(_folder(address) / name))
            if total is not None:
                current[kind] = total
        self._errors[address] = current
        rising = [kind for kind in current if current[kind] > previous.get(kind, current[kind])]
        if rising:
            reason = f"{' and '.join(rising)} PCIe errors (AER)"
            return Measurement(Health.UNHEALTHY, reason)
        return HEALTHY if current else None


def check_bus(sysfs: Sysfs, folder: Path) -> Measurement | None:
    """Return unhealthy if the configuration space reads as 0xff: the function does not respond.

    ``Documentation/PCI/sysfs-pci.rst``, ``config``. A virtual function is not checked: its ids
    read as 0xffff (``init_pci_cap_basic_perm`` of ``drivers/vfio/pci/vfio_pci_config.c``).
    """
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
    """Return unhealthy if the link is down. A link narrower than the maximum is healthy.

    ``current_link_speed_show`` and the functions next to it in ``drivers/pci/pci-sysfs.c`` write
    the files. Many cards are in narrow slots. The speed is not reported: an idle card lowers it to
    save power.
    """
    widest = sysfs.read_int(folder / "max_link_width")
    fastest = sysfs.read_text(folder / "max_link_speed")
    width = sysfs.read_int(folder / "current_link_width")
    speed = sysfs.read_text(folder / "current_link_speed")
    if (
        widest is None
        or widest in NO_WIDTH
        or is_unknown_speed(fastest)
        or width is None
        or speed is None
    ):
        return None
    if width == 0 or is_unknown_speed(speed):
        return Measurement(Health.UNHEALTHY, "PCIe link down")
    if width < widest:
        return Measurement(Health.OK, f"PCIe link x{width}, the device supports x{widest}")
    return HEALTHY


def check_link_width(sysfs: Sysfs, folder: Path) -> Measurement | None:
    """Return unhealthy if the link has fewer lanes than both the function and its slot support.

    ``current_link_width_show`` and ``max_link_width_show`` of ``drivers/pci/pci-sysfs.c`` write the
    files. Those of the slot are in the folder of the bridge above the function. The speed is not
    checked: an idle card lowers it to save power.
    """
    # The entry of the bus is a link, so ".." is the bridge and not the bus.
    maxima = [sysfs.read_int(at / "max_link_width") for at in (folder, folder / "..")]
    supported = [width for width in maxima if width is not None and width not in NO_WIDTH]
    width = sysfs.read_int(folder / "current_link_width")
    if maxima[0] in NO_WIDTH or width is None or width in NO_WIDTH:
        return None
    if width < min(supported):
        return Measurement(
            Health.UNHEALTHY,
            f"PCIe link x{width}, the device and its slot support x{min(supported)}",
        )
    return HEALTHY


def check_temperature(sysfs: Sysfs, folder: Path) -> Measurement | None:
    """Return unhealthy if a sensor is at or above its critical temperature (millidegrees Celsius).

    ``sysfs-class-hwmon``: ``temp*_input`` and ``temp*_crit``.
    """
    hot: list[str] = []
    measured = False
    for sensors in _hwmons(sysfs, folder):
        for name in sysfs.list_names(sensors):
            if not (name.startswith("temp") and name.endswith("_input")):
                continue
            sensor = name.removesuffix("_input")
            current, critical = (
                sysfs.read_int(sensors / name),
                sysfs.read_int(sensors / f"{sensor}_crit"),
            )
            if current is None or critical is None or critical <= 0:
                continue
            measured = True
            if current >= critical:
                label = sysfs.read_text(sensors / f"{sensor}_label") or sensor
                hot.append(f"{label} at its critical {critical / 1000:g} °C or above")
    if hot:
        return Measurement(Health.UNHEALTHY, f"too hot: {', '.join(hot)}")
    return HEALTHY if measured else None


def check_kernel_driver(
    sysfs: Sysfs, address: str, required: Collection[str]
) -> Measurement | None:
    """Return unhealthy if a PCI function is not bound to one of the required kernel drivers.

    ``sysfs-bus-pci``: the link ``driver``.
    """
    if not required:
        return None
    found = sysfs.read_link(_folder(address) / "driver")
    if found in required:
        return HEALTHY
    has = "no kernel driver" if found is None else f"the kernel driver {found}"
    return Measurement(
        Health.UNHEALTHY, f"{address} has {has}, expected {' or '.join(sorted(required))}"
    )


def _hwmons(sysfs: Sysfs, folder: Path) -> list[Path]:
    """Return the sensor folders of a PCI function; for an NVMe drive, of its controller.

    ``nvme_hwmon_init`` of ``drivers/nvme/host/hwmon.c``: the sensors belong to the controller.
    """
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


def _folder(address: str) -> Path:
    return Path("bus/pci/devices") / address
