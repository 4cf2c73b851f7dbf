# SPDX-License-Identifier: Apache-2.0
"""Devices that can be members of sets, as the drivers of GPUs and NICs report them."""

from collections.abc import Sequence
from dataclasses import replace

from cyborg.core.inventory.device import (
    NOT_OFFERED,
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
    Layout,
)
from cyborg.drivers.gpu.facts import UNREAD

ROOT = "0000:00:01.0"


def make_device(
    address: str,
    bridges: str = "",
    *,
    backend: str = "gpu",
    numa: int | None = None,
    functions: Sequence[str] | None = None,
    handle_type: HandleType = HandleType.PCI,
    resource_class: str = "PGPU",
    model: str = "H100",
    traits: Sequence[str] = (),
    **topology: str,
) -> Device:
    """Return a device below bridges such as ``00:01.0/15:00.0``, whole or with these functions."""
    path = [f"0000:{bridge}" for bridge in bridges.split("/") if bridge]
    topology = {"pci_path": "/".join([*path, address]), **topology}
    handles = tuple(AttachHandle(a, handle_type) for a in functions or [address])
    part = Deployable(address, resource_class, frozenset(traits), handles)
    type_ = DeviceType.GPU if backend == "gpu" else DeviceType.NIC
    return Device(
        address,
        type_,
        "10de",
        model,
        backend,
        numa_node=numa,
        topology=topology,
        deployables=(part,),
    )


def in_mig_mode(device: Device, *, hidden: bool = True) -> Device:
    """Return a GPU in MIG mode, which offers nothing if it is ``hidden``, as a whole GPU does."""
    parts = () if hidden else device.deployables
    return replace(device, std_board_info={"mig": "enabled"}, deployables=parts)


def divided(device: Device, functions: int) -> Device:
    """Return a GPU with this number of vGPUs, which also has a layout as a whole."""
    addresses = [f"{device.address[:-1]}{number + 1}" for number in range(functions)]
    handles = tuple(AttachHandle(address, HandleType.VFIO) for address in addresses)
    part = Deployable(f"{device.address}-H100-40C", "VGPU", handles=handles)
    layouts = (Layout("whole", {"PGPU": 1}), Layout("vgpus", {"VGPU": functions}))
    return replace(device, deployables=(part,), layouts=layouts, layout="vgpus")


def unread(device: Device) -> Device:
    """Return a GPU that NVML has not read yet: it offers nothing, and its topology is unknown."""
    topology = {"pci_path": device.topology["pci_path"]}
    info = {NOT_OFFERED: UNREAD}
    return replace(device, vendor_board_info=info, deployables=(), topology=topology)


def slot(number: int) -> str:
    """Return the address of a GPU in a slot."""
    return f"0000:{0x20 + number:02x}:00.0"


def hgx(modules: Sequence[int]) -> list[Device]:
    """Return GPUs with these module ids, in slots in the order of the ids in the list."""
    return [
        make_device(slot(n), module_id=str(module), traits=["CUSTOM_H100"])
        for n, module in enumerate(modules)
    ]
