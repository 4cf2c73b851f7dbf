# SPDX-License-Identifier: Apache-2.0
"""Vendor and model names of PCI devices from udev's hardware database.

``hwdb.d/20-pci-vendor-model.hwdb`` of systemd has ``ID_VENDOR_FROM_DATABASE`` and
``ID_MODEL_FROM_DATABASE``; it is made from the PCI id database (pci.ids).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cyborg.core.log import get_logger

LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Names:
    """Display names of the vendor and the model of a PCI function; None if unknown."""

    vendor: str | None = None
    model: str | None = None


Lookup = Callable[[str], Names]
"""Function that maps the address of a PCI function of this host to its names."""


def no_names(address: str) -> Names:
    """Return no names; for a sysfs that is not the sysfs of this host."""
    return Names()


def udev_names(address: str) -> Names:
    """Return the names that udev stored for the PCI function at an address."""
    context = _context()
    if context is None:
        return Names()
    import pyudev

    try:
        properties = pyudev.Devices.from_name(context, "pci", address).properties
        return Names(
            _plain(properties.get("ID_VENDOR_FROM_DATABASE")),
            _plain(properties.get("ID_MODEL_FROM_DATABASE")),
        )
    except (pyudev.DeviceNotFoundError, OSError, ValueError, UnicodeError):
        return Names()


@functools.cache
def _context() -> Any:
    """Return the libudev context; without libudev log one warning and return None."""
    try:
        import pyudev

        return pyudev.Context()
    except (ImportError, OSError) as exc:
        reason = str(exc)
    LOG.warning("Cannot use libudev, devices are shown with numeric ids: %s", reason)
    return None


def _plain(name: Any) -> str | None:
    """Return a name without unprintable characters and with at most 255 characters."""
    text = "".join(c if c.isprintable() else " " for c in str(name or "")).strip()
    return text[:255] or None
