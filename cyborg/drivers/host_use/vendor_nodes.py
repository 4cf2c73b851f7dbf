# SPDX-License-Identifier: Apache-2.0
"""Device nodes of accelerators whose kernel drivers are not part of Linux, by maker.

Some drivers give a node a device in sysfs below the PCI function. Others do not: there, an open
node counts for all functions of the maker that are bound to a kernel driver.

Sources: the files that the tables name, in the repositories tenstorrent/tt-kmd,
hailo-ai/hailort-drivers, Xilinx/XRT, Xilinx/dma_ip_drivers, google/gasket-driver, hicann/driver,
jklincn/cambricon-mlu-driver, aws-neuron/aws-neuron-driver, memryx/mx3_driver_pub,
furiosa-ai/device-api, rebellions-sw/rbln-k8s-device-plugin, dixyes/mtgpu-drv, Xilinx/amr and
Xilinx/SLASH on GitHub; for Kunpeng ``uacce_alloc`` of ``drivers/misc/uacce/uacce.c`` and
``qm_alloc_uacce`` of ``drivers/crypto/hisilicon/qm.c`` of Linux; for the vendor ids pci.ids. The
driver of Graphcore's Poplar SDK is not public: its names are those that users report.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cyborg.core.inventory.delivery import is_vfio
from cyborg.drivers.sysfs import PciFunction

CLASSES: Mapping[str, tuple[str, ...]] = {
    "tenstorrent/": ("tenstorrent",),  # chardev.c of tt-kmd
    "hailo": ("hailo_chardev",),  # linux/pcie/src/pcie.c of hailort-drivers from 4.23 on
    "h1x-": ("hailo1x",),  # the same file from 5.3 on
    "xclmgmt": ("xrt_mgmt",),  # mgmt-core.c of XRT
    "xdma": ("xdma",),  # xdma_cdev.c of AMD's dma_ip_drivers
    "qdma": ("qdma-pf", "qdma-vf"),  # cdev.c and version.h of AMD's dma_ip_drivers
    "hisi_": ("uacce",),  # SEC, HPRE and ZIP of Kunpeng
    "apex_": ("apex",),  # gasket_core.c of Coral
}
"""The classes in sysfs of the nodes whose path in ``/dev`` begins so."""


@dataclass(frozen=True, slots=True)
class Maker:
    """PCI functions of a maker; all of its vendor id and class prefix if ``products`` is empty."""

    vendor: str
    class_code: str = ""
    products: frozenset[str] = frozenset()

    def has(self, function: PciFunction) -> bool:
        """Return whether a PCI function is one of them and has a kernel driver of the host."""
        return (
            function.vendor == self.vendor
            and function.class_code.startswith(self.class_code)
            and (not self.products or function.product in self.products)
            and function.kernel_driver is not None
            and not is_vfio(function.kernel_driver)
        )


MAKERS: Mapping[str, Maker] = {
    # Programs close /dev/davinci0 again, and work by /dev/davinci_manager (uda_user_kernel_api.c
    # and trs_dev_drv.c of Huawei's CANN driver).
    "davinci": Maker("19e5", "12"),
    "cambricon": Maker("cabc"),  # cnhost_dev_sysfs.c of Cambricon
    "neuron": Maker(  # neuron_device.h of AWS, and pci.ids
        "1d0f",
        products=frozenset(
            {"7064", "7065", "7066", "7067", "7164", "7264", "7364", "7564", "7565"}
        ),
    ),
    "memx": Maker("1fe9"),  # memx_cascade_pciemain.c of MemryX
    "npu": Maker("1ed2"),  # warboy.rs of FuriosaAI's device-api
    "rngd/npu": Maker("1ed2"),  # rngd.rs
    "rbln": Maker("1eff"),  # rebellionsInfoProvider.go of Rebellions
    "ipu": Maker("1d95"),  # of Graphcore
    "mtgpu": Maker("1ed5"),  # mtgpu_defs.h and mtgpu_core.o_binary of Moore Threads
    "ami": Maker("10ee", products=frozenset({"50b4", "50bc"})),  # ami_cdev.c of AMD's AMR
    # slash_config.h of SLASH
    "slash_": Maker("10ee", products=frozenset({"50b4", "50b5", "50b6", "50bd", "50c1", "50c2"})),
}
"""The makers of the nodes whose path in ``/dev`` begins so, without a device in sysfs."""

PATTERN = "|".join(
    (
        r"tenstorrent/[0-9]+|hailo[0-9]+|h1x-[0-9]+|xclmgmt[0-9]+|xdma[0-9]+_[a-z0-9_]+",
        r"qdma[0-9a-f]+-[A-Z]+-[0-9]+|hisi_[a-z0-9]+-[0-9]+|apex_[0-9]+",
        r"davinci(?:[0-9]+|_manager(?:_docker)?)|cambricon(?:_dev[0-9]+|_ctl|-caps/[a-z0-9_-]+)",
        r"neuron[0-9]+|memx[0-9]+(?:_feature)?|npu[0-9]+(?:pe[0-9]+(?:-[0-9]+)?|_mgmt)?",
        r"rngd/npu[0-9]+(?:pe[0-9]+(?:-[0-9]+)?|mgmt|bar[0-9])|rbln[0-9]+|mtgpu\.?[0-9]+",
        r"ipu[0-9]+(?:_ex|_mailbox|_mem)?|ami[0-9]+|slash_[a-z]+_?[a-z]*[0-9]*",
    )
)
"""Regular expression of the paths of these nodes below ``/dev``."""

MANAGERS = frozenset(
    {
        *("npu-smi", "cnmon", "neuron-ls", "neuron-monitor", "neuron-top", "rbln-stat"),
        *("furiosa-smi", "tt-smi", "mthreads-gmi", "ami_tool", "v80-smi"),
    }
)
"""Programs that only read the state of these devices, as ``/proc/PID/comm`` names them."""


def find_maker(path: str) -> Maker | None:
    """Return the maker of a node in ``MAKERS``, by its path in /dev; None for any other node."""
    return next((maker for prefix, maker in MAKERS.items() if path.startswith(prefix)), None)


def list_nodes(functions: Iterable[PciFunction]) -> list[str]:
    """Return a node for each maker in ``MAKERS`` of which the host has a function."""
    present = list(functions)
    return [
        f"/dev/{prefix}"
        for prefix, maker in MAKERS.items()
        if any(maker.has(function) for function in present)
    ]
