# SPDX-License-Identifier: Apache-2.0
"""Host work of replayed hosts: it changes the tree alone, with and without faults."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.capture.model import Capture, Folder, parse_fault
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Ability, Device, Health
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers import privileged
from cyborg.drivers.base import ABILITY_INTERFACES, Driver
from cyborg.drivers.crypto.driver import CryptoDriver
from cyborg.drivers.fpga.driver import FpgaDriver
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.nic.driver import NicDriver
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.drivers.replay.host import SIMULATED, ReplayedHost
from cyborg.testing import captures

GPU, OTHER_GPU = "0000:3b:00.0", "0000:af:00.0"
DRIVE, OTHER_DRIVE = "0000:5e:00.0", "0000:d9:00.0"
QAT, OTHER_QAT = "0000:6b:00.0", "0000:e8:00.0"

MakeHost = Callable[..., ReplayedHost]


@pytest.fixture
def make_host() -> Iterator[MakeHost]:
    hosts: list[ReplayedHost] = []

    def make(*faults: str) -> ReplayedHost:
        hosts.append(ReplayedHost(captures.load_all(), [parse_fault(text) for text in faults]))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def gpu_of(host: ReplayedHost, **options: object) -> GpuDriver:
    driver = host.create_driver(GpuDriver, "gpu", {**captures.DRIVERS["gpu"], **options})
    assert isinstance(driver, GpuDriver)
    driver.host = "compute-1"
    return driver


def nvme_of(host: ReplayedHost) -> NvmeDriver:
    driver = host.create_driver(NvmeDriver, "nvme", captures.DRIVERS["nvme"])
    assert isinstance(driver, NvmeDriver)
    return driver


def crypto_of(host: ReplayedHost) -> CryptoDriver:
    driver = host.create_driver(CryptoDriver, "crypto", captures.DRIVERS["crypto"])
    assert isinstance(driver, CryptoDriver)
    return driver


def slots(driver: Driver) -> dict[str, int]:
    return {d.address: sum(len(p.handles) for p in d.deployables) for d in driver.discover()}


def item(driver: Driver, number: int = 0, device: str = GPU) -> WorkItem:
    (found,) = [d for d in driver.discover() if d.address == device]
    part = found.deployables[0]
    return WorkItem(driver.backend, found.address, part.address, part.handles[number].address)


def available(host: ReplayedHost, type_: str) -> str:
    folder = host.sysfs_root / "bus/pci/devices" / GPU / "mdev_supported_types" / type_
    return (folder / "available_instances").read_text().strip()


def mdevs(host: ReplayedHost) -> int:
    return len(list((host.sysfs_root / "bus/mdev/devices").iterdir()))


def test_mediated_devices_are_created_and_removed(make_host: MakeHost) -> None:
    host = make_host()
    driver = gpu_of(host)
    first, second = item(driver), item(driver, 1)
    driver.prepare(first, "server")
    driver.prepare(first, "server")
    driver.prepare(second, "server")
    assert mdevs(host) == 2
    assert available(host, "nvidia-593") == "2"
    assert available(host, "nvidia-596") == "0", "types of NVIDIA exclude each other"
    assert slots(driver) == {GPU: 4, OTHER_GPU: 4}
    for work in (first, second, second):
        driver.release(work)
    assert (mdevs(host), available(host, "nvidia-596")) == (0, "1")


def test_mediated_devices_of_excluded_types_are_refused(make_host: MakeHost) -> None:
    host = make_host()
    small, large = gpu_of(host), gpu_of(host, mdev_types=["vendor=10de,type=nvidia-596"])
    work = item(large)
    small.prepare(item(small), "server")
    with pytest.raises(DriverFailed, match="No space left on device"):
        large.prepare(work, "server")
    assert slots(large) == {GPU: 0, OTHER_GPU: 1}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("eio", "Input/output error"),
        ("ebusy", "Device or resource busy"),
        ("stuck_reset", "Connection timed out"),
        ("disappears", "No such device"),
    ],
)
def test_fault_of_a_gpu_leaves_its_neighbour(make_host: MakeHost, fault: str, message: str) -> None:
    host = make_host(f"{GPU}:{fault}")
    driver = gpu_of(host)
    work, other = item(driver), item(driver, device=OTHER_GPU)
    with pytest.raises(DriverFailed, match=f"could not be created at {GPU}: {message}"):
        driver.prepare(work, "server")
    assert mdevs(host) == 0
    driver.prepare(other, "server")
    assert mdevs(host) == 1
    present = {device.address for device in driver.discover()}
    assert present == ({OTHER_GPU} if fault == "disappears" else {GPU, OTHER_GPU})


def test_function_that_disappears_takes_its_mediated_devices_along(make_host: MakeHost) -> None:
    host = make_host(f"{GPU}:disappears@remove")
    driver = gpu_of(host)
    work, other = item(driver), item(driver, device=OTHER_GPU)
    driver.prepare(work, "server")
    driver.prepare(other, "server")
    with pytest.raises(DriverFailed, match="No such device"):
        driver.release(work)
    assert mdevs(host) == 1
    driver.release(work)
    assert GPU not in {device.address for device in driver.discover()}
    assert not (host.sysfs_root / "kernel/iommu_groups/31").exists()


def test_erasure_removes_the_data_of_a_server(make_host: MakeHost) -> None:
    host = make_host()
    driver = nvme_of(host)
    host.kernel.data.update({DRIVE: "secret", OTHER_DRIVE: "kept"})
    driver.sanitise(item(driver, device=DRIVE))
    assert host.kernel.data == {OTHER_DRIVE: "kept"}


def test_erasure_that_fails_twice_keeps_the_data_until_it_succeeds(make_host: MakeHost) -> None:
    host = make_host(f"{DRIVE}:eio=2@erase")
    driver = nvme_of(host)
    work = item(driver, device=DRIVE)
    host.kernel.data[DRIVE] = "secret"
    for _ in range(2):
        with pytest.raises(DriverFailed, match=f"{DRIVE} could not be erased: Input/output error"):
            driver.sanitise(work)
        assert host.kernel.data == {DRIVE: "secret"}
    driver.sanitise(work)
    assert host.kernel.data == {}


def services(driver: CryptoDriver) -> dict[str, str]:
    return {d.address: d.std_board_info["services"] for d in driver.discover()}


def device_of(driver: Driver, address: str) -> Device:
    return next(d for d in driver.discover() if d.address == address)


def test_services_change_as_the_kernel_does(make_host: MakeHost) -> None:
    driver = crypto_of(make_host())
    driver.partition(WorkItem("crypto", QAT, ""), "dc")
    assert services(driver) == {QAT: "dc", OTHER_QAT: "sym;asym"}
    names = [layout.name for layout in driver.layouts(device_of(driver, QAT))]
    assert "asym;sym" in names


@pytest.mark.parametrize("fault", ["eio", "ebusy", "stuck_reset"])
def test_fault_of_a_crypto_accelerator_keeps_its_services(make_host: MakeHost, fault: str) -> None:
    driver = crypto_of(make_host(f"{QAT}:{fault}=1"))
    with pytest.raises(DriverFailed, match="refused the services dc"):
        driver.partition(WorkItem("crypto", QAT, ""), "dc")
    assert services(driver) == {QAT: "sym;asym", OTHER_QAT: "sym;asym"}
    driver.partition(WorkItem("crypto", QAT, ""), "dc")
    assert services(driver)[QAT] == "dc"


def test_crypto_accelerator_that_does_not_start_again_is_unhealthy(make_host: MakeHost) -> None:
    driver = crypto_of(make_host(f"{QAT}:stuck_reset"))
    with pytest.raises(DriverFailed, match="could not be restored: Connection timed out"):
        driver.partition(WorkItem("crypto", QAT, ""), "dc")
    measured = driver.measure(driver.discover())
    assert measured[QAT].reason == "the QAT device is stopped: qat/state is down"
    assert measured[OTHER_QAT].health is Health.OK


class OtherDriver(NvmeDriver):
    """A driver of another package, with a known name."""


def test_driver_without_simulated_host_work_is_refused(make_host: MakeHost) -> None:
    with pytest.raises(DriverFailed, match="cannot be replayed: a replay does not simulate"):
        make_host().create_driver(OtherDriver, "nvme", {})


def test_each_replayed_driver_exists_and_reads_the_tree(make_host: MakeHost) -> None:
    host = make_host()
    for driver in (CryptoDriver, FpgaDriver, GenericDriver, GpuDriver, NicDriver, NvmeDriver):
        assert f"{driver.__module__}:{driver.__qualname__}" in SIMULATED
        created = host.create_driver(driver, driver.name, {})
        assert created.sysfs_root == host.sysfs_root
        for ability in created.abilities:
            assert isinstance(created, ABILITY_INTERFACES[Ability(ability)])


def test_close_removes_the_tree(make_host: MakeHost) -> None:
    host = make_host()
    assert host.sysfs_root.parent.stat().st_mode & 0o777 == 0o700
    host.close()
    host.close()
    assert not host.sysfs_root.parent.exists()


def test_each_unpacking_is_a_boot(make_host: MakeHost) -> None:
    first, second = make_host(), make_host()
    assert first.boot_id.read_text() != second.boot_id.read_text()


def test_link_of_a_capture_cannot_lead_out_of_the_tree(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("old")
    links = {"a": "b", "b": "c/d"}
    host = ReplayedHost(Capture("x", {"sys/bus": Folder({}, links), "sys/bus/c": Folder()}))
    try:
        root = host.sysfs_root.resolve()
        for name in links:
            assert root in (host.sysfs_root / "bus" / name).resolve().parents
    finally:
        host.close()


def test_denied_privileged_functions_fail_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from cyborg.drivers.privileged import gpu, nvme, qat

    monkeypatch.setattr(privileged.CONTEXT, "client_mode", False)
    privileged.deny_calls("a test")
    try:
        calls: list[Callable[[], Any]] = [
            lambda: nvme.erase(DRIVE, 1.0, ["sanitize, block erase"]),
            lambda: qat.set_services(QAT, "dc"),
            lambda: gpu.create(GPU, "nvidia-593", "x"),
            lambda: gpu.remove(GPU, "nvidia-593", "x"),
        ]
        for call in calls:
            with pytest.raises(DriverFailed, match="this process must not change its host: a test"):
                call()
    finally:
        privileged.deny_calls(None)


def test_function_is_reset_in_the_tree_alone(make_host: MakeHost) -> None:
    for faults, error in (((), None), ((f"{GPU}:stuck_reset@reset",), "could not be reset")):
        host = make_host(*faults)
        (host.sysfs_root / "bus/pci/devices" / GPU / "driver").unlink(missing_ok=True)
        driver = host.create_driver(
            GenericDriver, "pci", {"devices": ["address=*"], "reset": "if_possible"}
        )
        assert isinstance(driver, GenericDriver)
        item = WorkItem("pci", GPU, GPU, GPU)
        if error is None:
            driver.sanitise(item)
        else:
            with pytest.raises(DriverFailed, match=error):
                driver.sanitise(item)
