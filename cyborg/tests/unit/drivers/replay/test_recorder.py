# SPDX-License-Identifier: Apache-2.0
"""A capture of a tree shows the same devices to each driver as the tree does."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.capture.model import Capture
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.inventory.device import Device
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Driver
from cyborg.drivers.crypto.driver import CryptoDriver
from cyborg.drivers.fake import FakeDriver
from cyborg.drivers.fpga.driver import FpgaDriver
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.kernel.nvml import GpuFacts
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.pci.classes import Names
from cyborg.drivers.replay.host import ReplayedHost
from cyborg.drivers.replay.recorder import load_capture, record_host, save_capture
from cyborg.testing import captures
from cyborg.testing.machine import build_machine, load_machine
from cyborg.tests.fixtures.drivers import pci_drivers
from cyborg.tests.unit.drivers.crypto.simulated_qat import make_host
from cyborg.tests.unit.drivers.fpga import simulated_fpga
from cyborg.tests.unit.drivers.gpu.simulated_gpu import SimulatedKernel

DRIVERS: Sequence[type[Driver]] = (CryptoDriver, GpuDriver, NvmeDriver, GenericDriver)
CARD, DRIVE = "0000:0a:00.0", "0000:0b:00.0"
UUID = "GPU-83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
MIG_FACTS = GpuFacts(
    UUID,
    40 * 2**30,
    mig="enabled",
    mig_profiles={"1g.5gb": 7},
    mig_instances={"1g.5gb": 7},
    vgpu_profiles={"A100-1-5C": "1g.5gb"},
)
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "crypto": {"devices": ["vendor=8086", "vendor=1af4", "vendor=1022"]},
    "gpu": {"devices": ["address=*"], "mdev_types": ["parent=mtty,type=mtty-1"]},
    "nvme": {"devices": ["address=*"]},
    "generic": {"devices": ["address=*"]},
}


def busy_host(folder: Path) -> Path:
    """Return the sysfs of a host with accelerators, a boot disk, a NIC in use and a screen."""
    tree = make_host(folder)
    tree.add_function(CARD, "10de", "2236", "030200", kernel_driver="nvidia")
    tree.add_function(DRIVE, "144d", "a80a", "010802", kernel_driver="nvme")
    tree.add_disk("nvme0n1", f"pci0000:00/{DRIVE}/nvme/nvme0", ["nvme0n1p1"])
    tree.mount("nvme0n1p1", "/")
    tree.add_function("0000:0c:00.0", "8086", "1593", "020000", kernel_driver="ice", totalvfs=4)
    tree.add_interface("eth0", "0000:0c:00.0")
    tree.add_route("eth0")
    tree.add_function("0000:0d:00.0", "1a03", "2000", "030000", kernel_driver="ast")
    tree.add_display("0000:0d:00.0", "fb0")
    tree.add_function("0000:0e:00.0", "8086", "1593", "020000", totalvfs=4)
    tree.enable_virtual_functions("0000:0e:00.0", 2, "1889", "020000")
    return tree.root


def names(address: str) -> Names:
    return Names("Vendor", f"Model {address}")


def discover(driver: type[Driver], root: Path) -> Sequence[Device]:
    access = replace(HostAccess.of(root), lookup=names)
    return driver(driver.name, OPTIONS[driver.name], root, access).discover()  # type: ignore[call-arg]


@pytest.mark.slow
@pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.name)
def test_replay_shows_the_devices_of_the_host(tmp_path: Path, driver: type[Driver]) -> None:
    root = busy_host(tmp_path / "host")
    capture, errors = record_host(DRIVERS, "test", root, replace(HostAccess.of(root), lookup=names))
    assert errors == []
    save_capture(capture, tmp_path / "host.jsonl.gz")
    host = ReplayedHost(load_capture(tmp_path / "host.jsonl.gz"))
    try:
        replayed = host.create_driver(driver, driver.name, OPTIONS[driver.name]).discover()
        assert replayed == discover(driver, root)
        assert replayed or driver is GpuDriver
    finally:
        host.close()


def test_replay_shows_parents_of_mediated_devices(tmp_path: Path) -> None:
    kernel = SimulatedKernel(tmp_path)
    kernel.add_parent("mtty", 2, {"mtty-1": 1, "mtty-2": 2})
    kernel.add_function(CARD, "10de", "2236", "030200")
    kernel.add_parent(CARD, 4, {"nvidia-1": 1})
    capture, _ = record_host(DRIVERS, "test", kernel.root)
    host = ReplayedHost(capture)
    try:
        options = {"mdev_types": ["parent=mtty,type=mtty-1", f"address={CARD},type=nvidia-1"]}
        replayed = host.create_driver(GpuDriver, "gpu", options).discover()
        assert replayed == GpuDriver("gpu", options, kernel.root).discover()
        slots = [len(d.handles) for device in replayed for d in device.deployables]
        assert slots == [4, 2]
    finally:
        host.close()


def test_replay_shows_layouts_of_a_gpu_with_virtual_functions(tmp_path: Path) -> None:
    root = build_machine(load_machine("gpu-a40-sriov"), tmp_path).root
    capture, errors = record_host([GenericDriver], "test", root)
    assert errors == []
    host = ReplayedHost(capture)
    try:
        options = {"devices": ["address=*,functions=all"], "vf_counts": ["2"]}
        replayed = host.create_driver(GenericDriver, "generic", options)
        backend = GenericDriver("generic", options, root)
        devices = backend.discover()
        assert replayed.discover() == devices
        assert isinstance(replayed, GenericDriver)
        layouts = [layout.name for device in devices for layout in backend.layouts(device)]
        assert layouts == ["vfs-32", "vfs-2"]
        assert [n.name for device in devices for n in replayed.layouts(device)] == layouts
    finally:
        host.close()


class OneGpu:
    """NVML of a host with one GPU of NVIDIA, in MIG mode."""

    def read(self, address: str) -> GpuFacts | None:
        assert address == CARD, "NVML knows no other card"
        return MIG_FACTS


def test_replay_shows_the_answers_of_nvml(tmp_path: Path) -> None:
    kernel = SimulatedKernel(tmp_path)
    kernel.add_function(CARD, "10de", "20b0", "030200", kernel_driver="nvidia")
    kernel.add_function("0000:0f:00.0", "10de", "20b0", "030200", kernel_driver="vfio-pci")
    kernel.add_parent(CARD, 4, {"nvidia-1": 1})
    types = kernel.root / "bus/pci/devices" / CARD / "mdev_supported_types"
    (types / "nvidia-1/name").write_text("NVIDIA A100-1-5C\n")
    capture, _ = record_host(
        DRIVERS, "test", kernel.root, replace(HostAccess.of(kernel.root), nvml=OneGpu().read)
    )
    save_capture(capture, tmp_path / "host.jsonl")
    host = ReplayedHost(load_capture(tmp_path / "host.jsonl"))
    try:
        options = {"mdev_types": [f"address={CARD},type=nvidia-1"], "mig_layouts": True}
        driver = host.create_driver(GpuDriver, "gpu", options)
        assert isinstance(driver, GpuDriver)
        (device,) = driver.discover()
        assert (device.serial, device.std_board_info["memory_bytes"]) == (UUID, "42949672960")
        names = [layout.name for layout in driver.layouts(device)]
        assert names == ["7x1g.5gb"]
        with pytest.raises(DriverFailed, match="MIG instances are not simulated"):
            driver.partition(WorkItem("gpu", CARD, ""), "none")
    finally:
        host.close()


def test_answers_of_nvml_are_checked() -> None:
    with pytest.raises(Invalid, match="nvml: TypeError"):
        ReplayedHost(Capture("x", {}, nvml={CARD: {"memory": "much"}}))


def test_replay_shows_regions_of_fpga_cards(tmp_path: Path) -> None:
    kernel = simulated_fpga.SimulatedKernel(tmp_path)
    kernel.add_plain_card()
    kernel.add_dfl_card(ports=2, virtual=2)
    capture, _ = record_host([FpgaDriver], "test", kernel.root)
    host = ReplayedHost(capture)
    try:
        options = {"devices": ["address=*,type=FPGA"]}
        replayed = host.create_driver(FpgaDriver, "fpga", options).discover()
        assert replayed == FpgaDriver("fpga", options, kernel.root).discover()
        assert sum(len(device.deployables) for device in replayed) == 3
    finally:
        host.close()


@pytest.mark.slow
def test_record_changes_nothing(tmp_path: Path) -> None:
    root = busy_host(tmp_path)
    before = sorted((str(p), p.lstat().st_mtime_ns) for p in tmp_path.rglob("*"))
    record_host(DRIVERS, "test", root)
    assert sorted((str(p), p.lstat().st_mtime_ns) for p in tmp_path.rglob("*")) == before


def test_record_skips_devices_that_are_simulated(tmp_path: Path) -> None:
    capture, errors = record_host([FakeDriver], "test", make_host(tmp_path).root)
    assert errors == []
    assert [path for path in capture.folders if "pci" in path] == []


def test_record_keeps_only_vfio_of_the_module_index(tmp_path: Path) -> None:
    root = make_host(tmp_path).root
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text("6.1.0\n")
    index = tmp_path / "usr/lib/modules/6.1.0/modules.dep"
    index.parent.mkdir(parents=True)
    index.write_text("kernel/a.ko: kernel/b.ko\nkernel/drivers/vfio/pci/vfio-pci.ko.xz:\n")
    (tmp_path / "lib").symlink_to("usr/lib")
    (root / "module/vfio_pci/parameters/disable_denylist").unlink()
    for folder in ("module/vfio_pci/parameters", "module/vfio_pci", "bus/pci/drivers/vfio-pci"):
        (root / folder).rmdir()
    capture, _ = record_host(DRIVERS, "test", root)
    files = capture.folders["lib/modules/6.1.0"].files
    assert files == {"modules.dep": b"kernel/drivers/vfio/pci/vfio-pci.ko.xz:\n"}
    assert capture.kernel == "6.1.0"


@pytest.mark.parametrize("name", captures.capture_names())
def test_capture_of_a_card_names_its_source_and_has_its_devices(name: str) -> None:
    capture = captures.load(name)
    assert capture.source.startswith("Hand-made: ")
    assert "No card was read." in capture.source or "No drive was read." in capture.source
    host = ReplayedHost(capture)
    try:
        devices = [
            device
            for driver in pci_drivers().values()
            for device in host.create_driver(
                driver, driver.name, captures.DRIVERS[driver.name]
            ).discover()
        ]
        assert {device.address for device in devices} == set(capture.names)
        assert all(device.deliverable for device in devices)
    finally:
        host.close()
