# SPDX-License-Identifier: Apache-2.0
"""Network interfaces of PCI functions, and the representors of virtual functions.

A network card in the mode ``switchdev`` has an internal switch. Each virtual function has a port of
the switch, and the port has a network interface on the host: the representor. Sysfs does not link a
representor to a PCI function. Its ``phys_switch_id`` equals the ``phys_switch_id`` of the card's
interface, and its ``phys_port_name`` has the numbers of the physical and the virtual function, such
as ``pf0vf3`` (``Documentation/networking/representors.rst`` and ``switchdev.rst``,
``Documentation/ABI/testing/sysfs-class-net``, and ``__devlink_port_phys_port_name_get`` of
``net/devlink/port.c`` of the Linux kernel). The number of the physical function is the function
number of its PCI address (``esw/devlink_port.c`` of ``mlx5_core`` and
``ice_devlink_create_vf_port`` of ``ice``).

``Documentation/ABI/testing/sysfs-bus-pci`` describes the links ``virtfnN``;
``register_virtio_device`` of ``drivers/virtio/virtio.c`` gives a virtio device its name.
"""

import re

from cyborg.core.address import PciAddress
from cyborg.drivers.sysfs import PCI_DEVICES, Sysfs

_VIRTFN = re.compile(r"virtfn(0|[1-9][0-9]{0,4})")
# A name with the prefix "c1" is of another controller: the host does not have its functions.
_PORT = re.compile(r"(?:c0)?(?:p[0-9]+)?pf([0-9]+)vf([0-9]+)")


def of_function(sysfs: Sysfs, address: str) -> list[str]:
    """Return the network interfaces of a PCI function, without representors.

    Interfaces in other network namespaces are not returned.
    """
    # A virtio card has its interfaces in the folder of its virtio device.
    folder = PCI_DEVICES / address
    below = [folder, *(folder / n for n in sysfs.list_names(folder) if n.startswith("virtio"))]
    names = [name for where in below for name in sysfs.list_names(where / "net")]
    return [name for name in names if _representee(sysfs, name) is None]


def virtual_functions(sysfs: Sysfs, address: str) -> dict[int, str]:
    """Return the addresses of a physical function's virtual functions by number, from 0."""
    folder = PCI_DEVICES / address
    found: dict[int, str] = {}
    for name in sysfs.list_names(folder):
        if match := _VIRTFN.fullmatch(name):
            target = sysfs.read_link(folder / name)
            if target is not None:
                found[int(match[1])] = target
    return dict(sorted(found.items()))  # by number: as names, virtfn10 is before virtfn2


def switch_id(sysfs: Sysfs, address: str) -> str | None:
    """Return the id of a card's internal switch; None if it is not in the mode ``switchdev``."""
    ids = (sysfs.read_text(f"class/net/{n}/phys_switch_id") for n in of_function(sysfs, address))
    return next((id_ for id_ in ids if id_), None)


def representors(sysfs: Sysfs, address: str) -> dict[int, str]:
    """Return the interface names of the representors of a card by virtual function number."""
    switch = switch_id(sysfs, address)
    if switch is None:
        return {}
    physical, names = PciAddress.parse(address).function, dict[int, str]()
    for name in sysfs.list_names("class/net"):
        if sysfs.read_text(f"class/net/{name}/phys_switch_id") != switch:
            continue
        if (representee := _representee(sysfs, name)) is not None:
            of_physical, of_virtual = representee
            if of_physical == physical:
                names[of_virtual] = name
    return names


def _representee(sysfs: Sysfs, name: str) -> tuple[int, int] | None:
    """Return the physical and virtual function number of a representor; None for others."""
    match = _PORT.fullmatch(sysfs.read_text(f"class/net/{name}/phys_port_name") or "")
    return None if match is None else (int(match[1]), int(match[2]))
