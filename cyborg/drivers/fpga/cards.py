# SPDX-License-Identifier: Apache-2.0
"""Functions of a card, and the regions that its deployables stand for."""

from collections.abc import Mapping
from pathlib import Path

from cyborg.core.inventory.device import Deployable, Device
from cyborg.drivers.fpga.families import find_family, management_product
from cyborg.drivers.fpga.regions import CardRegions, Region
from cyborg.drivers.sysfs import PciFunction, Sysfs

_DEVICES = Path("bus/pci/devices")
_SUFFIX = "-region"


def list_regions(sysfs: Sysfs, card: PciFunction, found: CardRegions | None) -> list[Region]:
    """Return the regions of a card; ``found`` are those that the kernel shows.

    The kernel shows none of an Alveo card: its region belongs to the user function, whose folder
    gets another identity when the function is removed and added again.
    """
    if found is not None and found.regions:
        return list(found.regions)
    family = find_family(card.vendor, card.product)
    if family is None or not family.has_management:
        return []
    return [Region("", identity=sysfs.identity(_DEVICES / card.address))]


def find_management(card: PciFunction, functions: Mapping[str, PciFunction]) -> str | None:
    """Return the management function of an Alveo card: in the same slot, with the id before."""
    family = find_family(card.vendor, card.product)
    if family is None or not family.has_management:
        return None
    slot, product = card.address.rpartition(".")[0], management_product(card.product)
    for other in functions.values():
        if other.address.rpartition(".")[0] == slot and other.product == product:
            return other.address
    return None


def split(
    sysfs: Sysfs, card: Device, function: PciFunction, count: int
) -> list[tuple[int, Deployable]]:
    """Return the deployables of a card, each with the number of its region.

    ``count`` is the number of regions. Return an empty list if it is not known which function uses
    which region. With a virtual function for each port, the kernel has given the ports to them in
    order (``dfl_fpga_cdev_config_ports_vf`` of ``drivers/fpga/dfl.c``).
    """
    if count == 1:
        return [(0, deployable) for deployable in card.deployables]
    if not count or len(card.deployables) != 1 or function.numvfs != count:
        return []
    whole = card.deployables[0]
    handles = {handle.address: handle for handle in whole.handles}
    found: list[tuple[int, Deployable]] = []
    for number in range(count):
        virtual = sysfs.read_link(_DEVICES / card.address / f"virtfn{number}")
        if virtual is None or virtual not in handles:
            continue
        address = card.address if number == 0 else f"{card.address}{_SUFFIX}{number}"
        part = Deployable(
            address=address,
            resource_class=whole.resource_class,
            traits=whole.traits,
            handles=(handles[virtual],),
            attributes=whole.attributes,
        )
        found.append((number, part))
    return found if len(found) == len(handles) else []


def parse_region(card: str, deployable: str, count: int) -> int | None:
    """Return the number of the region of a deployable; None if it has none.

    ``count`` is the number of regions of the card: its only region is that of all deployables.
    """
    if deployable == card or (count == 1 and deployable.startswith(f"{card}-")):
        return 0
    prefix, _, number = deployable.rpartition(_SUFFIX)
    if prefix != card or not (number.isascii() and number.isdigit()):
        return None
    return int(number) if int(number) < count else None
