# SPDX-License-Identifier: Apache-2.0
"""Search for the processes that have device nodes open, and the nodes of makers of accelerators.

Kernel drivers that are not part of Linux differ: some give a node a device in sysfs below the PCI
function. Others do not: there, an open node counts for all functions of the maker that are bound to
a kernel driver.

Sources: the files that the tables name, in the repositories tenstorrent/tt-kmd,
hailo-ai/hailort-drivers, Xilinx/XRT, Xilinx/dma_ip_drivers, google/gasket-driver, hicann/driver,
jklincn/cambricon-mlu-driver, aws-neuron/aws-neuron-driver, memryx/mx3_driver_pub,
furiosa-ai/device-api, rebellions-sw/rbln-k8s-device-plugin, dixyes/mtgpu-drv, Xilinx/amr and
Xilinx/SLASH on GitHub; for Kunpeng ``uacce_alloc`` of ``drivers/misc/uacce/uacce.c`` and
``qm_alloc_uacce`` of ``drivers/crypto/hisilicon/qm.c`` of Linux; for the vendor ids pci.ids. The
driver of Graphcore's Poplar SDK is not public: its names are those that users report.

``Documentation/filesystems/proc.rst`` of Linux describes ``/proc/PID/fd``, ``comm``, ``stat`` and
the mount option ``hidepid``.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cyborg.core.errors import CyborgError, TimedOut
from cyborg.core.inventory.delivery import is_vfio
from cyborg.drivers.sysfs import PciFunction

# The classes in sysfs of the nodes whose path in ``/dev`` begins so.
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


# The makers of the nodes whose path in ``/dev`` begins so, without a device in sysfs.
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

# Regular expression of the paths of these nodes below ``/dev``.
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

# Programs that only read the state of these devices, as ``/proc/PID/comm`` names them.
MANAGERS = frozenset(
    {
        *("npu-smi", "cnmon", "neuron-ls", "neuron-monitor", "neuron-top", "rbln-stat"),
        *("furiosa-smi", "tt-smi", "mthreads-gmi", "ami_tool", "v80-smi"),
    }
)


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


PROC = Path("/proc")
MAX_SECONDS = 5.0
# Seconds for which ``SharedScan`` keeps a result.
MAX_AGE = 1.0
MAX_NODES = 10_000
MAX_ANCESTORS = 32
# Inode of the PID namespace of the host: PROC_PID_INIT_INO of ``include/linux/proc_ns.h``.
INITIAL_NAMESPACE = 0xEFFFFFFC

# Nodes of devices, also those of a container below another folder. A node of the device mapper or
# of MD is not among them: ``holders`` in sysfs shows the devices below it.
# The modules ``processes`` and this one name the sources of most of them. Of VFIO: ``vfio_devnode``
# of ``drivers/vfio/group.c`` and ``vfio_device_devnode`` of ``drivers/vfio/device_cdev.c``. Of
# disks and tapes: ``Documentation/admin-guide/devices.txt``.
NODE = re.compile(
    r"(?:/[^ ]*)?(/dev/(?:nvidia[0-9]+|dri/[a-zA-Z]+[0-9]+|accel/accel[0-9]+|uio[0-9]+"
    r"|hl(?:_controlD)?[0-9]+|infiniband/(?:uverbs|umad|issm)[0-9]+"
    r"|vfio/(?:noiommu-)?[0-9]+|vfio/devices/vfio[0-9]+"
    r"|(?:dsa|iax)/wq[0-9]+\.[0-9]+|dfl-(?:fme|port)\.[0-9]+"
    r"|(?:nvme|ng)[0-9][0-9np]*|sg[0-9]+|n?st[0-9]+[alm]?|(?:s|v|xv|h)d[a-z]+[0-9]*"
    rf"|{PATTERN}))"
)


class SharedScan:
    """Search that threads share: each backend of an agent discovers at about the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, list[str]] = {}
        self._error: Exception | None = None
        self._end = 0.0

    def read(self) -> dict[str, list[str]]:
        """Return the result of ``scan`` without this process, or raise its error.

        Both are at most MAX_AGE old.
        """
        with self._lock:
            if time.monotonic() >= self._end:
                self._error = None
                try:
                    check_namespace()
                    self._found = scan({os.getpid()})
                except (CyborgError, OSError) as exc:
                    self._error = exc
                self._end = time.monotonic() + MAX_AGE
            if self._error is not None:
                raise self._error
            return self._found


def check_namespace(proc: Path = PROC) -> None:
    """Raise PermissionError where ``proc`` does not show all processes of the host."""
    # That is so in another PID namespace, and where ``/proc`` is mounted with ``hidepid``.
    namespace = os.stat(proc / "self/ns/pid").st_ino
    if namespace != INITIAL_NAMESPACE or not (proc / "1").exists():
        raise PermissionError(
            "this process does not see the processes of the host: it needs their PID namespace, "
            "and a /proc without hidepid"
        )


def scan(
    ignored: Collection[int], proc: Path = PROC, max_seconds: float = MAX_SECONDS
) -> dict[str, list[str]]:
    """Return the names of the programs that have a device node open, by the path of the node.

    The processes with the ids ``ignored`` and their descendants are left out: the agent reads
    devices, and starts the tools of vendors. Raise TimedOut after ``max_seconds``, PermissionError
    for a process that cannot be read.
    """
    end = time.monotonic() + max_seconds
    programs_by_node: dict[str, set[str]] = {}
    for name in os.listdir(proc):
        if not name.isdecimal() or int(name) in ignored:
            continue
        # A process may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            nodes = _nodes_of(proc / name / "fd")
            if nodes and not _descends(proc, int(name), ignored):
                program = (proc / name / "comm").read_text(errors="replace").rstrip("\n")
                for node in nodes:
                    if node in programs_by_node or len(programs_by_node) < MAX_NODES:
                        programs_by_node.setdefault(node, set()).add(program)
        if time.monotonic() > end:
            raise TimedOut(f"the open files of all processes were not read in {max_seconds:g} s")
    return {node: sorted(programs) for node, programs in programs_by_node.items()}


def _nodes_of(folder: Path) -> set[str]:
    """Return the device nodes among the open files of a process."""
    found: set[str] = set()
    with os.scandir(folder) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if (match := NODE.fullmatch(os.readlink(file.path))) is not None:
                    found.add(match[1])
    return found


def _descends(proc: Path, process: int, ancestors: Collection[int]) -> bool:
    """Return whether a process was started by one of ``ancestors``, or by one of their children."""
    for _ in range(MAX_ANCESTORS):
        if process in ancestors:
            return True
        if process <= 1:
            break
        # The name, in parentheses, may contain spaces; the state and the parent follow.
        text = (proc / str(process) / "stat").read_text(errors="replace")
        process = int(text.rpartition(")")[2].split()[1])
    return False
