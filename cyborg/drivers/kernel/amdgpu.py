# SPDX-License-Identifier: Apache-2.0
"""Partitions of AMD GPUs for computing (MI300 and later), as ``amdgpu`` shows them in sysfs.

``amdgpu_gfx.c``, ``amdgpu_gmc.c`` and ``aqua_vanjaram.c`` of ``drivers/gpu/drm/amd/amdgpu`` of
Linux. A PCI function has

* ``current_compute_partition``: the mode in which its dies are divided. A write changes it at once.
  Errors: EINVAL for a mode that the card cannot have with its memory mode, EBUSY while a process
  uses the GPU by ``/dev/kfd``, EPERM during a reset;
* ``available_compute_partition``: the modes that the card can have now, such as ``SPX, DPX, CPX``.
  With NPS1 each mode is valid that divides the dies; SPX is valid with NPS1 only, DPX with at most
  two memory partitions, QPX and CPX with one or four;
* ``current_memory_partition``, ``available_memory_partition``: NPS1 and others. Since Linux 6.13 a
  write stores a request for all cards that are linked by XGMI (``current_memory_partition_store``).
  It is sent to the firmware of these cards when the first one loses its driver
  (``amdgpu_gmc_prepare_nps_mode_change``, called by ``amdgpu_pci_remove``), and applies when the
  module is loaded again: "please remove and reload the driver" in the log of the kernel.

A partition is no PCI function but a node of DRM (``amdgpu_xcp``) for processes of the host.
"""

from cyborg.drivers.sysfs import PCI_DEVICES, Sysfs

AMD = "1002"
KERNEL_DRIVER = "amdgpu"

COMPUTE_MODE = "current_compute_partition"

# In the order of the number of partitions. In the first one, the card is one GPU.
WHOLE = "SPX"
MODES = (WHOLE, "DPX", "TPX", "QPX", "CPX")


def read_mode(sysfs: Sysfs, address: str) -> str | None:
    """Return the compute partition mode of a card; None if it is unknown."""
    mode = sysfs.read_text(PCI_DEVICES / address / COMPUTE_MODE)
    return mode if mode in MODES else None


def read_available(sysfs: Sysfs, address: str) -> tuple[str, ...]:
    """Return the compute partition modes that a card can have now; empty if it has none."""
    text = sysfs.read_text(PCI_DEVICES / address / "available_compute_partition") or ""
    found = {name.strip() for name in text.split(",")}
    return tuple(mode for mode in MODES if mode in found)


def read_memory_mode(sysfs: Sysfs, address: str) -> str | None:
    """Return the memory partition mode of a card, such as NPS1; None if it is unknown."""
    return sysfs.read_text(PCI_DEVICES / address / "current_memory_partition") or None
