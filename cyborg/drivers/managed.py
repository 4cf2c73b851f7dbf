# SPDX-License-Identifier: Apache-2.0
"""Devices that an operator adds to a backend (adopts) or removes from it (releases) at run time.

A driver supports this if its options include ``OPTIONS``. The service then adds an address to one
of these lists, removes it from the other list, and recreates the backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cyborg.core.address import PciAddress
from cyborg.core.errors import Invalid
from cyborg.drivers.base import Driver, Option

OPTIONS = (
    Option(
        "adopt",
        "list",
        (),
        "PCI addresses of devices that are always offered; this overrides all other options. A "
        "device added over the API must be present. An absent device of the configuration file is "
        "ignored until it appears.",
    ),
    Option(
        "release",
        "list",
        (),
        "PCI addresses of devices that are never offered; this overrides all other options.",
    ),
)


@dataclass(frozen=True, slots=True)
class ManagedDevices:
    """Addresses of adopted and released devices in the kernel's notation."""

    adopted: tuple[str, ...]
    released: tuple[str, ...]

    def decision(self, address: str, parent: str | None = None) -> bool | None:
        """Return True for an adopted device, False for a released one, and None for any other.

        ``parent`` is the address of the device that contains this one, if any. An entry for the
        device itself overrides an entry for its parent.
        """
        for candidate in (address, parent):
            if candidate in self.released:
                return False
            if candidate in self.adopted:
                return True
        return None


@runtime_checkable
class AdoptionInterface(Protocol):
    """Interface of a driver that checks whether a device can be adopted."""

    def check_adoption(self, addresses: Sequence[str]) -> None:
        """Raise DriverFailed if one of these addresses has no device that can be offered.

        The agent calls this with the addresses that a change adds to ``adopt``, before the first
        discovery of the changed backend. Devices that were adopted before are not checked.
        """


def adopted_addresses(driver: Driver | None) -> frozenset[str]:
    """Return the canonical addresses in the option ``adopt`` of a driver."""
    values = () if driver is None else driver.options.get("adopt", ())
    return frozenset(_canonical(value) for value in values)


def _canonical(address: str) -> str:
    try:
        return str(PciAddress.parse(address))
    except Invalid:
        return address


def read_options(driver: Driver) -> ManagedDevices:
    """Return the adopted and released devices from a driver's options. Raise Misconfigured."""
    adopted, released = (_addresses(driver, option.name) for option in OPTIONS)
    if conflicts := sorted(set(adopted) & set(released)):
        raise driver.misconfigured("release", conflicts[0], "no address that is also in adopt")
    return ManagedDevices(adopted, released)


def _addresses(driver: Driver, option: str) -> tuple[str, ...]:
    addresses: list[str] = []
    for text in driver.options[option]:
        try:
            addresses.append(str(PciAddress.parse(text)))
        except Invalid as exc:
            raise driver.misconfigured(option, text, "PCI addresses such as 0000:3d:00.0") from exc
    return tuple(addresses)
