# SPDX-License-Identifier: Apache-2.0
"""An NVMe drive from the REST API to the device and back: no server reads data of another."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.machine import guest
from cyborg.tests.fixtures.machine.processes import BIN
from cyborg.tests.lab.cloud import DRIVE, HOST, NVME, Lab, running_lab

pytestmark = [pytest.mark.lab, pytest.mark.services, pytest.mark.matrix]

SIZE = 16 << 20
SECRET = b"secret of a tenant! "
DISK = "/dev/nvme0n{}"  # by namespace
PCI = "/sys/bus/pci"
PLUGGED = "0000:02:00.0"
SETUP = Path(__file__).with_name("programs") / "namespaces.py"
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "agent": {"enabled_drivers": "", "enabled_backends": "drives", "discovery_interval": 600},
    "drives": {"driver": "nvme", "devices": [f"class=0108,resource_class={NVME}"]},
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Path]:
    """Return the files that hold the data of the namespaces of the drive."""
    folder = tmp_path_factory.mktemp("disks")
    paths = {number: folder / f"{number}.raw" for number in (1, 2, 3)}
    for path in paths.values():
        path.write_bytes(bytes(SIZE))
    return paths


@pytest.fixture(scope="module")
def lab(
    tmp_path_factory: pytest.TempPathFactory, rabbit_url: str, images: Mapping[int, Path]
) -> Iterator[Lab]:
    devices = [*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME, *guest.EMPTY_PORTS]
    devices += ["-drive", "driver=null-co,size=16M,if=none,id=spare"]
    for number, image in images.items():
        devices += guest.add_namespace(number, image)
    folder = tmp_path_factory.mktemp("nvme")
    with running_lab(folder, rabbit_url, devices, OPTIONS, "modprobe -a nvme vfio-pci") as new_lab:
        yield new_lab


def write_secret(lab: Lab, images: Mapping[int, Path], namespace: int = 1) -> None:
    """Write data to a namespace as the server that holds it."""
    (lab.guest.share / "secret").write_bytes(SECRET * 10_000)
    disk = DISK.format(namespace)
    lab.guest.run(f"busybox dd if=/io/secret of={disk} bs=4096 seek=1000 conv=fsync")
    assert has_secret(images, namespace)


def has_secret(images: Mapping[int, Path], namespace: int = 1) -> bool:
    """Return whether data of a server is in a namespace."""
    return SECRET in images[namespace].read_bytes()


def is_dirty(lab: Lab, address: str = DRIVE) -> bool:
    """Return whether the host must clean a function before it can be bound again.

    The handle of a drive that the host was using while a discovery ran is removed when it is clean.
    """
    records = rows.read(lab.engine, schema.attach_handles)
    return any(row["needs_cleaning"] for row in records if row["address"] == address)


def await_erasure(lab: Lab, address: str = DRIVE) -> None:
    """Wait until a function is clean; an attempt that failed is repeated."""
    lab.until(f"{address} is clean", lambda: not is_dirty(lab, address))


def count_erasures(lab: Lab, namespaces: int, samples: int) -> int:
    """Return the number of erasures in the log of the agent."""
    log = (lab.guest.share / "agent.log").read_text(errors="replace")
    method = "format, user data erase"
    found = f"Erased {namespaces} namespaces by {method} (no policy), verified: {samples} samples"
    return log.count(found)


def test_data_of_a_server_is_gone_before_the_drive_is_bound_again(
    lab: Lab, images: Mapping[int, Path]
) -> None:
    (provider,) = lab.offered(NVME)
    for _ in range(2):
        request, instance = lab.bind(provider)
        assert lab.holds(request) == DRIVE
        assert lab.offered(NVME) == []
        write_secret(lab, images)
        lab.release(instance)
        assert is_dirty(lab) or not has_secret(images)
        await_erasure(lab)
        assert not has_secret(images)
    assert count_erasures(lab, 3, 48) == 2


def serial_numbers(lab: Lab) -> list[str | None]:
    """Return the serial number of the drive that is plugged in, if there is one."""
    devices = lab.call("GET", f"/v2/devices?address={PLUGGED}")["devices"]
    return [device["serial"] for device in devices]


def test_hot_plugged_drive_is_offered_until_it_is_unplugged(lab: Lab) -> None:
    (first,) = lab.offered(NVME)
    lab.plug("rp1", "nvme", serial="lab1", drive="spare")
    lab.until("both are offered", lambda: len(lab.offered(NVME)) == 2)
    # The kernel knows it only when its driver has started the controller.
    lab.until("its serial number is known", lambda: serial_numbers(lab) == ["lab1"])
    lab.unplug("rp1")
    lab.until("one is offered", lambda: lab.offered(NVME) == [first])
    assert serial_numbers(lab) == []


def test_drive_in_use_by_the_host_stays_dirty_until_it_is_erased(
    lab: Lab, images: Mapping[int, Path]
) -> None:
    (provider,) = lab.offered(NVME)
    _, instance = lab.bind(provider)
    write_secret(lab, images)
    disk = DISK.format(1)
    lab.guest.run(f"busybox mkswap {disk} && busybox swapon {disk}")
    lab.release(instance)
    lab.until("the erasure has failed", lambda: "holds swap" in errors_of_jobs(lab))
    assert is_dirty(lab)
    assert has_secret(images)

    lab.guest.run(f"busybox swapoff {disk}")
    await_erasure(lab)
    assert not has_secret(images)
    await_offer(lab, provider)


def test_drive_of_the_host_itself_is_erased_when_the_host_is_done_with_it(
    lab: Lab, images: Mapping[int, Path]
) -> None:
    (provider,) = lab.offered(NVME)
    body = {"resources": {NVME: 1}, "config_data": {"attach_target": "host"}}
    context = lab.call("POST", "/v2/device_contexts", json=body)["uuid"]
    body = {"hostname": HOST, "device_context": context}
    path = f"/v2/attachments/{lab.call('POST', '/v2/attachments', json=body)['uuid']}"
    lab.until("the host has it", lambda: lab.call("GET", path)["state"] == "attached")
    assert lab.offered(NVME) == []
    (request,) = lab.call("GET", path)["arqs"]
    assert lab.holds(request) == DRIVE
    write_secret(lab, images)
    disk = DISK.format(1)
    lab.guest.run(f"busybox mkswap {disk} && busybox swapon {disk}")

    lab.call("DELETE", path)
    lab.until("the erasure has failed", lambda: "holds swap" in errors_of_jobs(lab))
    assert lab.call("GET", path)["step"] == "clean"
    assert has_secret(images)
    lab.guest.run(f"busybox swapoff {disk}")
    await_erasure(lab)
    assert not has_secret(images)
    attachments = "/v2/attachments"
    lab.until("it is detached", lambda: not lab.call("GET", attachments)["attachments"])
    assert lab.call("GET", f"/v2/device_contexts/{context}")["state"] == "unbound"
    await_offer(lab, provider)


def await_offer(lab: Lab, provider: str) -> None:
    """Wait until the drive is offered again after the host has used it."""
    # A discovery, such as that of the unplugged drive, may have found the drive in use.
    lab.call("POST", "/v2/discoveries", json={})
    lab.until("the drive is offered", lambda: lab.offered(NVME) == [provider])


def errors_of_jobs(lab: Lab) -> str:
    """Return the errors of the jobs of the host that are retried."""
    jobs = rows.read(lab.engine, schema.jobs, state="pending")
    return " ".join(str(row["error"]) for row in jobs)


def test_data_of_a_virtual_function_is_gone_and_its_neighbour_keeps_its_own(
    lab: Lab, images: Mapping[int, Path]
) -> None:
    """The last test of the drive: it loses the namespaces of the virtual functions."""
    (provider,) = lab.offered(NVME)
    lab.guest.run(f"{BIN}/python -I -S {SETUP} {PCI}/devices/{DRIVE} 2 3", 60)
    namespaces = {"0000:01:00.1": 2, "0000:01:00.2": 3}
    lab.until("both are offered", lambda: lab.inventory(provider) == (2, 0))
    assert lab.handles() == dict.fromkeys(namespaces, False)

    bound = [lab.bind(provider) for _ in namespaces]
    servers = {lab.holds(request): instance for request, instance in bound}
    assert servers.keys() == namespaces.keys()
    for namespace in namespaces.values():
        write_secret(lab, images, namespace)
    # As libvirt leaves a function that was bound to vfio-pci before its server used it.
    second = "0000:01:00.2"
    lab.guest.run(
        f"echo {second} >{PCI}/drivers/nvme/unbind\n"
        f"echo vfio-pci >{PCI}/devices/{second}/driver_override\n"
        f"echo {second} >{PCI}/drivers_probe && [ -e {PCI}/drivers/vfio-pci/{second} ]"
    )

    neighbours = {2: True, 3: True}
    for number, (address, namespace) in enumerate(namespaces.items(), 1):
        lab.release(servers[address])
        await_erasure(lab, address)
        neighbours[namespace] = False
        assert {n: has_secret(images, n) for n in neighbours} == neighbours
        assert count_erasures(lab, 1, 16) == number
        lab.until("it is offered", lambda: lab.offered(NVME) == [provider])
    lab.guest.run(f"echo 0 >{PCI}/devices/{DRIVE}/sriov_numvfs")
    lab.until("the drive is whole again", lambda: lab.handles() == {DRIVE: False})
