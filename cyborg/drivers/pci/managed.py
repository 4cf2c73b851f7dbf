# SPDX-License-Identifier: Apache-2.0
"""Devices that an operator adds to a backend (adopts) or removes from it (releases) at run time.

A driver supports this if its options include ``OPTIONS``. The service then adds an address to one
of these lists, removes it from the other list, and recreates the backend.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from cyborg.core.drivers.desired_state import ADOPT_IN_USE
from cyborg.core.drivers.registry import Option
from cyborg.drivers.base import Driver, InvalidOption
from cyborg.drivers.sysfs import canonical_address

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

# Option of drivers that find out whether the host uses a device.
IN_USE = Option(
    ADOPT_IN_USE,
    "list",
    (),
    "PCI addresses like those of adopt, of devices that the host uses, set by cyborg "
    "hardware-adopt --force: it adds the time after an @. The uses that it finds are accepted; "
    "another use withholds the device. Storage, and a device of a domain of libvirt, are never "
    "offered while in use.",
)


@dataclass(frozen=True, slots=True)
class ManagedDevices:
    """Addresses of adopted and released devices in the kernel's notation.

    ``in_use`` has those of the adopted devices that the host may use, each with the mark of its
    adoption.
    """

    adopted: tuple[str, ...]
    released: tuple[str, ...]
    in_use: Mapping[str, str] = field(default_factory=dict)

    def decision(self, address: str, parent: str | None = None) -> bool | None:
        """Return True for an adopted device, False for a released one, and None for any other.

        ``parent`` is the address of the device that contains this one, if any. An entry for the
        device itself overrides an entry for its parent.
        """
        # The device first: a virtual function can be released from a card that is adopted.
        for candidate in (address, parent):
            if candidate in self.released:
                return False
            if candidate in self.adopted:
                return True
        return None


@runtime_checkable
class AdoptionInterface(Protocol):
    """Interface of a driver that checks whether a device can be adopted."""

    def check_adoption(self, addresses: Sequence[str], forced: Collection[str] = ()) -> None:
        """Raise DriverFailed if one of these addresses has no device that can be offered.

        The agent calls this with the addresses that a change adds to ``adopt`` or ``adopt_in_use``,
        before the first discovery of the changed backend. Devices that were adopted before are not
        checked. The uses of those in ``forced`` are accepted, as far as that is possible.
        """


def added_addresses(driver: Driver, previous: Driver | None) -> tuple[list[str], list[str]]:
    """Return the canonical addresses of adoptions that a driver has and its predecessor has not.

    The second list has those of adoptions by force. A repeated adoption by force has another mark,
    and so is returned again.
    """
    added = _entries(driver, "adopt") - _entries(previous, "adopt")
    # None by force without a predecessor: an agent that starts does not know that an operator has
    # just decided so.
    forced_entries = frozenset() if previous is None else _entries(driver, IN_USE.name)
    forced_entries -= _entries(previous, IN_USE.name)
    forced = sorted({entry.partition("@")[0] for entry in forced_entries})
    return sorted({*added, *forced}), forced


def _entries(driver: Driver | None, option: str) -> frozenset[str]:
    """Return the entries of an option of a driver, with canonical addresses and marks."""
    values = () if driver is None else driver.options.get(option, ())
    return frozenset(_canonical(value) for value in values)


def _canonical(entry: str) -> str:
    address, separator, mark = entry.partition("@")
    return f"{canonical_address(address) or address}{separator}{mark}"


def read_options(driver: Driver) -> ManagedDevices:
    """Return the adopted and released devices from a driver's options. Raise Misconfigured."""
    adopted, released, in_use = (
        driver.parse_option(option, _parse_addresses) if option in driver.options else ()
        for option in ("adopt", "release", IN_USE.name)
    )
    # Over the API this cannot happen: it removes an address from the other list.
    if conflicts := sorted({*adopted, *in_use} & set(released)):
        raise driver.misconfigured(
            "release", conflicts[0], "no address that is also in adopt or adopt_in_use"
        )
    entries = driver.options.get(IN_USE.name, ())
    # An entry is ADDRESS@TIME; the time is the mark of the adoption.
    marks = {a: entry.partition("@")[2] for a, entry in zip(in_use, entries, strict=True)}
    return ManagedDevices((*adopted, *in_use), released, marks)


def _parse_addresses(texts: Sequence[str]) -> tuple[str, ...]:
    addresses: list[str] = []
    for text in texts:
        if (address := canonical_address(text.partition("@")[0])) is None:
            raise InvalidOption(text, "PCI addresses such as 0000:3d:00.0")
        addresses.append(address)
    return tuple(addresses)
