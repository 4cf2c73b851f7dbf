# SPDX-License-Identifier: Apache-2.0
"""Names for people of what is on the bus, from udev's hardware database."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Names:
    """What people call a function's vendor and model; None where nobody knows."""

    vendor: str | None = None
    model: str | None = None


Lookup = Callable[[str], Names]
"""From the address of a function on this host's bus to its names."""


def nobody_knows(address: str) -> Names:
    """Know no names: the lookup for a sysfs that is not this host's."""
    return Names()


def udev_names(address: str) -> Names:
    """Ask udev, which looked the names up when it met the device."""
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
    """Return the way to libudev; None on a host without it, said once."""
    try:
        import pyudev

        return pyudev.Context()
    except (ImportError, OSError) as missing:
        LOG.warning("Devices are shown by their numbers: libudev cannot be used (%s)", missing)
        return None


def _plain(name: Any) -> str | None:
    """Return a name as a report may hold it."""
    text = "".join(c if c.isprintable() else " " for c in str(name or "")).strip()
    return text[:255] or None
