# SPDX-License-Identifier: Apache-2.0
"""Measuring the health of a PCI function by what sysfs and the kernel log say.

Each reader returns what it has measured, or None when it cannot tell: the function has no such
file, or sleeps. One that sleeps is not woken. Each names the kernel's document of what it reads;
their folder is ``Documentation/ABI/testing`` unless said otherwise.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from cyborg.core import health
from cyborg.core.device import Health
from cyborg.core.health import WELL, Measurement
from cyborg.drivers.kernel_log import Xids
from cyborg.drivers.sysfs import Sysfs

CHECKS = ("aer", "link", "temperature", "bus", "driver", "xid")
"""What can be measured: the names that an option takes."""

DEFAULT = ("aer", "link", "bus", "driver")
"""What needs no privilege and asks nothing of the device but its configuration space."""

_AER = {"fatal": "aer_dev_fatal", "non-fatal": "aer_dev_nonfatal"}
_NO_WIDTH = (None, 0, 255)  # a function without a link of its own, such as an integrated one
_GONE = b"\xff\xff\xff\xff"


class Readers:
    """Measures the functions of one backend; keeps what counters were when it looked last."""

    def __init__(
        self, sysfs: Sysfs, checks: Collection[str], kernel_log: str | Path | None
    ) -> None:
        """``checks`` are of CHECKS; without a kernel log there are no Xids."""
        self._sysfs = sysfs
        self._checks = frozenset(checks)
        self._xids = Xids(kernel_log) if "xid" in checks and kernel_log is not None else None
        self._errors: dict[str, dict[str, int]] = {}

    def measure(
        self, wanted: Mapping[str, Mapping[str, Collection[str]]]
    ) -> dict[str, Measurement]:
        """Return the health of functions by address.

        ``wanted`` tells for each function the kernel drivers that it or its virtual functions
        must have, by address: one with none may have any. A function that is not there now is
        left out.
        """
        if self._xids is not None:
            self._xids.read()
        self._errors = {address: self._errors.get(address, {}) for address in wanted}
        return {
            address: self._one(address, drivers)
            for address, drivers in wanted.items()
            if self._sysfs.text(_folder(address) / "vendor") is not None
        }

    def _one(self, address: str, drivers: Mapping[str, Collection[str]]) -> Measurement:
        folder, found = _folder(address), list[Measurement | None]()
        if "driver" in self._checks:
            found += [kernel_driver(self._sysfs, f, names) for f, names in drivers.items()]
        if "aer" in self._checks:
            found.append(self._aer(address))
        if self._xids is not None:
            found.append(self._xids.of(address))
        # Any of these would wake it: the kernel resumes a device to read its configuration space.
        if self._sysfs.text(folder / "power/runtime_status") != "suspended":
            if "bus" in self._checks:
                found.append(bus(self._sysfs, folder))
            if "link" in self._checks:
                found.append(link(self._sysfs, folder))
            if "temperature" in self._checks:
                found.append(temperature(self._sysfs, folder))
        return health.worst(m for m in found if m is not None)

    def _aer(self, address: str) -> Measurement | None:
        """Uncorrectable PCIe errors are sick while they rise; those before the first look are not.

        ``sysfs-bus-pci-devices-aer_stats``: the last line is TOTAL_ERR_FATAL or TOTAL_ERR_NONFATAL.
        """
        before, now = self._errors[address], dict[str, int]()
        for kind, name in _AER.items():
            total = _total(self._sysfs.text(_folder(address) / name))
            if total is not None:
                now[kind] = total
        self._errors[address] = now
        rising = [kind for kind in now if now[kind] > before.get(kind, now[kind])]
        if rising:
            said = f"{' and '.join(rising)} PCIe errors (AER)"
            return Measurement(Health.UNHEALTHY, said)
        return WELL if now else None


def bus(sysfs: Sysfs, folder: Path) -> Measurement | None:
    """A configuration space of ones alone is that of a function which does not answer.

    ``sysfs-bus-pci``, ``config``. A virtual function has ones for its vendor by the specification
    of SR-IOV, so it is not asked.
    """
    if sysfs.link(folder / "physfn") is not None:
        return None
    start = sysfs.start(folder / "config", len(_GONE))
    if start is None or len(start) < len(_GONE):
        return None
    if start == _GONE:
        return Measurement(Health.UNHEALTHY, "fallen off the bus: its configuration reads as ones")
    return WELL


def link(sysfs: Sysfs, folder: Path) -> Measurement | None:
    """A link that is down is sick; one narrower than the device could be is told, and ok.

    ``sysfs-bus-pci``, ``current_link_speed`` and its like. Many cards stand in narrow slots, and
    a slow link is what a card at rest has, to save power: the speed is not told.
    """
    widest = sysfs.number(folder / "max_link_width")
    fastest = sysfs.text(folder / "max_link_speed")
    width = sysfs.number(folder / "current_link_width")
    speed = sysfs.text(folder / "current_link_speed")
    if widest is None or widest in _NO_WIDTH or _unknown(fastest) or width is None or speed is None:
        return None
    if width == 0 or _unknown(speed):
        return Measurement(Health.UNHEALTHY, "PCIe link down")
    if width < widest:
        return Measurement(Health.OK, f"PCIe link x{width}, the device can x{widest}")
    return WELL


def temperature(sysfs: Sysfs, folder: Path) -> Measurement | None:
    """A sensor at or above its own critical temperature is sick; both are in millidegrees Celsius.

    ``Documentation/hwmon/sysfs-interface.rst``: ``temp*_input`` and ``temp*_crit``.
    """
    hot: list[str] = []
    seen = False
    for sensors in _hwmons(sysfs, folder):
        for name in sysfs.names(sensors):
            if not (name.startswith("temp") and name.endswith("_input")):
                continue
            sensor = name.removesuffix("_input")
            now, critical = sysfs.number(sensors / name), sysfs.number(sensors / f"{sensor}_crit")
            if now is None or critical is None or critical <= 0:
                continue
            seen = True
            if now >= critical:
                label = sysfs.text(sensors / f"{sensor}_label") or sensor
                hot.append(f"{label} at its critical {critical / 1000:g} °C or above")
    if hot:
        return Measurement(Health.UNHEALTHY, f"too hot: {', '.join(hot)}")
    return WELL if seen else None


def kernel_driver(sysfs: Sysfs, address: str, wanted: Collection[str]) -> Measurement | None:
    """A function without the kernel driver that it must have is sick.

    ``sysfs-bus-pci``: the link ``driver``.
    """
    if not wanted:
        return None
    found = sysfs.link(_folder(address) / "driver")
    if found in wanted:
        return WELL
    has = "no kernel driver" if found is None else f"the kernel driver {found}"
    return Measurement(
        Health.UNHEALTHY, f"{address} has {has}, expected {' or '.join(sorted(wanted))}"
    )


def _hwmons(sysfs: Sysfs, folder: Path) -> list[Path]:
    """Return the folders of a device's sensors; an NVMe drive's are its controller's."""
    below = [folder, *(folder / "nvme" / name for name in sysfs.names(folder / "nvme"))]
    at = [(where / "hwmon", name) for where in below for name in sysfs.names(where / "hwmon")]
    # The controller's own are directly in its folder.
    at += [(where, name) for where in below[1:] for name in sysfs.names(where)]
    return [where / name for where, name in at if name.startswith("hwmon") and name != "hwmon"]


def _total(text: str | None) -> int | None:
    for line in reversed((text or "").splitlines()):
        name, _, count = line.rpartition(" ")
        if name.startswith("TOTAL_ERR_") and count.isdecimal():
            return int(count)
    return None


def _unknown(speed: str | None) -> bool:
    return speed is None or speed.startswith("Unknown")


def _folder(address: str) -> Path:
    return Path("bus/pci/devices") / address
