# SPDX-License-Identifier: Apache-2.0
"""Options of the gpu driver for vGPUs and layouts."""

from cyborg.core.drivers.registry import Option
from cyborg.drivers.pci import sriov

OPTIONS = (
    Option(
        "mdev_types",
        "multi",
        (),
        "A rule that makes functions parents of mediated devices (vGPUs) of one type, such as "
        "'address=0000:3d:00.0,type=nvidia-222,resource_class=VGPU,traits=CUSTOM_A'. The keys "
        "that match are those of devices; parent=NAME matches a parent of /sys/class/mdev_bus "
        "that is not on the PCI bus. type is a name in mdev_supported_types. max_per_card is "
        "the number of devices that all parents of a card have together. The default of "
        "resource_class is VGPU. The option can be repeated. The first rule that matches a "
        "parent applies. A matched function is never offered as a whole.",
    ),
    Option(
        "vgpu_types",
        "multi",
        (),
        "A rule that makes virtual functions of NVIDIA cards vGPUs without mediated devices, "
        "such as 'address=0000:41:00.0,type=NVIDIA H200X-1-18C,traits=CUSTOM_A'. The keys that "
        "match are those of devices; they match the card, whose SR-IOV must be enabled by "
        "sriov-manage. type is a name in creatable_vgpu_types, with or without the product "
        "line. max_per_card is the number of vGPUs of a card; NVML knows it. vgpu_params has "
        "parameters of the plug-in, as disable_vnc=1|frame_rate_limiter=0. The default of "
        "resource_class is VGPU. The option can be repeated. The first rule that matches a "
        "card applies. A matched card with virtual functions is never offered as a whole.",
    ),
    Option(
        "vgpu_layouts",
        "list",
        (),
        "Mixes of vGPUs that cards of vgpu_types can have, such as 2xH200X-70C or, in the "
        "heterogeneous mode, 1xH200X-70C+4xH200X-18C; or of GPU instances by MIG profile, such as "
        "1x3g.71gb+4x1g.18gb, which have vGPUs of the first enabled type of each profile. Each "
        "possible mix, and the whole card, is a layout that operators can change. A rule must "
        "enable all types of the mix. It needs the extra nvml. MIG profiles and MIG-backed types "
        "switch the MIG mode on, other mixes and the whole card switch it off. An empty list: the "
        "driver does not change SR-IOV.",
    ),
    Option(
        "sriov_manage",
        "str",
        "/usr/lib/nvidia/sriov-manage",
        "Path of the script of NVIDIA that enables and disables SR-IOV for vgpu_layouts. Only "
        "root may be able to change it.",
        host_only=True,
    ),
    Option(
        "nvidia_smi",
        "str",
        "/usr/bin/nvidia-smi",
        "Path of the program of NVIDIA that resets a card after a change of its MIG mode for "
        "vgpu_layouts, if the card needs it. Only root may be able to change it.",
        host_only=True,
    ),
    *sriov.OPTIONS,
    Option(
        "vf_scheduling",
        "list",
        (),
        "Scheduling of Intel GPUs and their virtual functions after a change of their number, such "
        "as exec_quantum_ms=20,preempt_timeout_us=40000,sched_priority=low. It needs the kernel "
        "driver xe of Linux 6.19 or later. An empty list: that of the kernel driver.",
    ),
    Option(
        "vf_vram_mib",
        "list",
        (),
        "Memory of each virtual function of Intel GPUs after a change of their number, in MiB by "
        "this number, such as 2:11776,4:5632. It needs the kernel driver xe of Linux 7.0 or later, "
        "and a card with memory of its own. A number that is not in the list: the kernel driver "
        "divides the memory in equal parts, each of which is a power of two.",
    ),
    Option(
        "partition_modes",
        "list",
        (),
        "Compute partition modes that AMD GPUs such as the MI300X can have, such as DPX,CPX. Each "
        "one that a card can have with its memory mode, and SPX, is a layout that operators can "
        "change. Only a card in mode SPX is offered; the partitions of others are for processes of "
        "the host. An empty list: the driver does not change the mode.",
    ),
    Option(
        "mig_layouts",
        "bool",
        False,
        "Whether the GPU instances of NVIDIA cards in MIG mode are layouts that operators can "
        "change. It needs the extra nvml and mediated devices (mdev_types).",
    ),
)
