# SPDX-License-Identifier: Apache-2.0
"""vGPUs of NVIDIA without mediated devices, as the kernel driver shows them in sysfs.

NVIDIA calls this the vendor-specific VFIO framework ("Virtual GPU Software User Guide"). The
attributes are described in ``README.md`` of NVIDIA's kubevirt-gpu-device-plugin; the errors of a
write are those of the module ``nvidia-vgpu-vfio`` of its driver for hosts, which is not part of
open-gpu-kernel-modules. A virtual function of a card has

* ``nvidia/creatable_vgpu_types``: the types of which the card can have one more vGPU now, such as
  ``1414  : NVIDIA H200X-1-18C``, below the line ``ID    : vGPU Name``;
* ``nvidia/current_vgpu_type``: the id of the type of its vGPU, 0 without a vGPU. A write of an id
  creates the vGPU and a write of 0 removes it. Each write fails unless the function has no vGPU
  before the first one, and a vGPU that no process has open before the second;
* ``nvidia/vgpu_params``: parameters of the vGPU's plug-in, in some releases;
* ``vfio-dev``: the device of VFIO (``Documentation/ABI/testing/sysfs-devices-vfio-dev`` of Linux).

The ids of the types change with the release of the driver, so types are known by their names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cyborg.drivers.kernel.nvml import short_name
from cyborg.drivers.sysfs import PCI_DEVICES, Sysfs

# Name of a type of vGPUs, with its product line (``NVIDIA H200X-1-18C``) or without it.
TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._/()+-]{0,79}")
# Parameters as they are written to ``vgpu_params``.
PARAMETERS = re.compile(r"[a-z0-9_]+=[A-Za-z0-9_.]+(, [a-z0-9_]+=[A-Za-z0-9_.]+){0,15}")
_LINE = re.compile(r"\s*([0-9]{1,9})\s*:\s*(\S.*?)\s*")


@dataclass(frozen=True, slots=True)
class VgpuFunction:
    """A virtual function that can have a vGPU.

    ``current`` is the id of the type of its vGPU, 0 without one. ``creatable`` has the ids of the
    types that can be created, by name. ``registered`` is False if VFIO does not know the function.
    """

    address: str
    current: int
    creatable: Mapping[str, int]
    registered: bool


def attributes_folder(address: str) -> Path:
    """Return the folder with the attributes of a virtual function, relative to sysfs."""
    return PCI_DEVICES / address / "nvidia"


def read(sysfs: Sysfs, address: str) -> VgpuFunction | None:
    """Return the function at an address; None if it cannot have a vGPU of this kind."""
    folder = attributes_folder(address)
    current = sysfs.read_int(folder / "current_vgpu_type")
    types = sysfs.read_text(folder / "creatable_vgpu_types")
    if current is None or types is None:
        return None
    registered = bool(sysfs.list_names(PCI_DEVICES / address / "vfio-dev"))
    return VgpuFunction(address, current, parse_types(types), registered)


def parse_types(text: str) -> dict[str, int]:
    """Return the ids of types by name; ignore lines of another form, such as the heading."""
    found = (_LINE.fullmatch(line) for line in text.splitlines())
    return {match[2]: int(match[1]) for match in found if match is not None}


def find_type(types: Mapping[str, int], name: str) -> int | None:
    """Return the id of the type with a name, or with this name without the product line."""
    ids = {id_ for full, id_ in types.items() if name in (full, short_name(full))}
    return ids.pop() if len(ids) == 1 else None
