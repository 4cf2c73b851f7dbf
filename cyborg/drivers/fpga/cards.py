# SPDX-License-Identifier: Apache-2.0
"""PCI functions of an FPGA card, and the FPGA region of each of its deployables."""

from collections.abc import Mapping
from pathlib import Path

from cyborg.core.inventory.device import Deployable, Device
from cyborg.drivers.fpga.families import find_family
from cyborg.drivers.fpga.management import management_product
from cyborg.drivers.fpga.regions import CardRegions, Region
from cyborg.drivers.sysfs import PciFunction, Sysfs

_DEVICES = Path("bus/pci/devices")
_SUFFIX = "-region"


def list_regions(sysfs: Sysfs, card: PciFunction, found: CardRegions | None) -> list[Region]:
    """Return the regions of a card; ``found`` are the regions that the kernel shows.

    The kernel shows no region of an Alveo card. Such a card has one region, with the identity of
    the sysfs folder of its user function; a function that is removed and added again has a new
    identity.
    """
    if found is not None and found.regions:
        return list(found.regions)
    family = find_family(card.vendor, card.product)
    if family is None or not family.has_management:
        return []
    return [Region("", identity=sysfs.identity(_DEVICES / card.address))]


def find_management(card: PciFunction, functions: Mapping[str, PciFunction]) -> str | None:
    """Return the address of the management PCI function of an Alveo card, or None."""
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

    ``count`` is the number of regions. Return an empty list if it is not known which PCI function
    uses which region. A virtual function has one port (``Documentation/fpga/dfl.rst``, "FPGA
    virtualization"; ``dfl_fpga_cdev_config_ports_vf`` of ``drivers/fpga/dfl.c``). If there are as
    many as ports, virtual function ``n`` is taken to have port ``n``: Linux does not say it.
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
    """Return the number of the region of a deployable; None if the deployable has no region.

    ``count`` is the number of regions of the card. If it is 1, all deployables have region 0.
    """
    if deployable == card or (count == 1 and deployable.startswith(f"{card}-")):
        return 0
    prefix, _, number = deployable.rpartition(_SUFFIX)
    if prefix != card or not (number.isascii() and number.isdigit()):
        return None
    return int(number) if int(number) < count else None
