# SPDX-License-Identifier: Apache-2.0
"""Single devices that an operator takes into a backend, or out of it, while it runs.

A driver that has the options of ``OPTIONS`` can do this: the service adds an address to one of the
lists, takes it from the other, and makes the backend anew.
"""

from dataclasses import dataclass

from cyborg.core.address import PciAddress
from cyborg.core.errors import Invalid
from cyborg.drivers.base import Driver, Option

OPTIONS = (
    Option(
        "adopt",
        "list",
        (),
        "PCI addresses of devices that are offered, whatever the other options say. One that is "
        "not there is passed over until it is.",
    ),
    Option(
        "release",
        "list",
        (),
        "PCI addresses of devices that are never offered, whatever the other options say.",
    ),
)


@dataclass(frozen=True, slots=True)
class Managed:
    """The two lists, each address as the kernel writes it."""

    adopted: tuple[str, ...]
    released: tuple[str, ...]

    def decides(self, address: str, within: str | None = None) -> bool | None:
        """Tell whether an operator adopted or released a device; None is neither.

        ``within`` is the device of which it is a part, if any: what is said of the part itself
        comes first.
        """
        for one in (address, within):
            if one in self.released:
                return False
            if one in self.adopted:
                return True
        return None


def read(driver: Driver) -> Managed:
    """Return what the options of a driver say. Raises Misconfigured."""
    adopted, released = (_addresses(driver, option.name) for option in OPTIONS)
    if both := sorted(set(adopted) & set(released)):
        raise driver.misconfigured("release", both[0], "no address that adopt has, too")
    return Managed(adopted, released)


def _addresses(driver: Driver, option: str) -> tuple[str, ...]:
    found: list[str] = []
    for text in driver.options[option]:
        try:
            found.append(str(PciAddress.parse(text)))
        except Invalid as bad:
            raise driver.misconfigured(option, text, "PCI addresses such as 0000:3d:00.0") from bad
    return tuple(found)
