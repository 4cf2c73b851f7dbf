# SPDX-License-Identifier: Apache-2.0
"""Access of drivers to a host: nothing of this host for another sysfs, no early import."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.pci.classes import Names

CARD, MDEV = "0000:3d:00.0", "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
CHANGES: dict[str, tuple[Any, ...]] = {
    "reset": (CARD,),
    "set_count": (CARD, 4, False, False),
    "set_services": (CARD, "dc"),
    "create_mdev": (CARD, "nvidia-222", MDEV),
    "create_vgpu": (CARD, "H200X-70C", ""),
    "set_sriov": (CARD, True, "/usr/lib/nvidia/sriov-manage"),
    "set_heterogeneous": (CARD, True),
    "set_mig_mode": (CARD, True, "/usr/bin/nvidia-smi"),
    "set_scheduling": (CARD, {"exec_quantum_ms": "20"}),
    "set_partition_mode": (CARD, "CPX"),
    "set_instances": (CARD, {"1g.10gb": 7}),
    "load_firmware": ("fpga0", MDEV, "/image", 1),
    "reconfigure": ("dfl-fme.0", 0, "/image", 1, 0),
    "run_tool": ("xbutil", CARD, "/image", 1, 10.0),
    "erase": (CARD, 10.0, ["sanitize, crypto erase"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_of_another_sysfs_is_refused(tmp_path: Path, name: str) -> None:
    change: Callable[..., Any] = getattr(HostAccess.of(tmp_path), name)
    with pytest.raises(DriverFailed, match=f"{CHANGES[name][0]} cannot be .*of this host"):
        change(*CHANGES[name])


def test_mediated_device_of_another_sysfs_is_removed_only_if_absent(tmp_path: Path) -> None:
    devices = tmp_path / "bus/mdev/devices"
    devices.mkdir(parents=True)
    access = HostAccess.of(tmp_path)
    access.remove_mdev(CARD, "nvidia-222", MDEV)
    (devices / MDEV).mkdir()
    with pytest.raises(DriverFailed, match="is not a device of this host"):
        access.remove_mdev(CARD, "nvidia-222", MDEV)


def test_another_sysfs_reads_nothing_of_this_host(tmp_path: Path) -> None:
    access = HostAccess.of(tmp_path)
    assert access.kernel_log is None
    assert access.nvml("0000:3b:00.0") is None
    assert access.lookup(CARD) == Names(None, None)
    assert access.read_methods(Path("/dev/nvme0"), "240:0") is None


def test_access_to_this_host_does_not_load_privsep() -> None:
    code = (
        "import sys; from pathlib import Path; from cyborg.drivers.pci.access import HostAccess\n"
        "HostAccess.of(Path('/sys')); print('oslo_privsep' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
