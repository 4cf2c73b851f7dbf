# SPDX-License-Identifier: Apache-2.0
"""Replacement of the MIG instances of a GPU with NVML.

NVIDIA documents the functions in the NVML API Reference Guide, "Multi Instance GPU Management", and
the order of the work in "Configuring a GPU for MIG-Backed vGPUs" of the NVIDIA AI Enterprise guide:
MIG mode, GPU instances, and a compute instance in each.
"""

import re
from pathlib import Path

from cyborg.core.address import PciAddress
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.gpu import nvml
from cyborg.drivers.host_use.check import mediated_parents
from cyborg.drivers.privileged import CONTEXT
from cyborg.drivers.sysfs import Sysfs

_SYS = Path("/sys")
_PROFILE = re.compile(r"[0-9a-z][0-9a-z.+-]{0,31}")


@CONTEXT.entrypoint
def set_instances(address: str, profile: str | None) -> None:
    """Replace all MIG instances of a GPU by the maximum number of one profile, or by none.

    The profile is a name such as ``1g.10gb``. Raise DriverFailed before any change if the PCI
    function is not a GPU with NVIDIA's kernel driver, is not in MIG mode, has mediated devices, or
    does not have the profile. Raise DriverFailed also if NVML fails, for example because a process
    uses an instance.
    """
    function = str(PciAddress.parse(address))
    if profile is not None and (not isinstance(profile, str) or not _PROFILE.fullmatch(profile)):
        raise Invalid(f"{profile!r} is not the name of a MIG profile", field="layout")
    found = Sysfs(_SYS).pci_function(function)
    if found is None:
        raise DriverFailed(f"there is no device {function}")
    if found.vendor != nvml.NVIDIA or found.kernel_driver != nvml.KERNEL_DRIVER or found.physfn:
        raise DriverFailed(
            f"{function} is {found.vendor}:{found.product}, bound to {found.kernel_driver}; "
            f"expected a card bound to {nvml.KERNEL_DRIVER}"
        )
    if function in mediated_parents(_SYS):
        raise DriverFailed(f"{function} has mediated devices, which servers may use")
    nvml.replace_instances(function, profile)
