# SPDX-License-Identifier: Apache-2.0
"""An NVMe drive from the REST API to the device and back: no server reads data of another."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.machine import guest
from cyborg.tests.lab.cloud import DRIVE, NVME, Lab, running_lab

pytestmark = [pytest.mark.lab, pytest.mark.services]

SIZE = 16 << 20
SECRET = b"secret of a tenant! "
DISK = "/dev/nvme0n1"
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "agent": {"enabled_drivers": "", "enabled_backends": "drives"},
    "drives": {"driver": "nvme", "devices": [f"class=0108,resource_class={NVME}"]},
}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that holds the data of the drive."""
    path = tmp_path_factory.mktemp("disk") / "disk.raw"
    path.write_bytes(bytes(SIZE))
    return path


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str, image: Path) -> Iterator[Lab]:
    devices = [*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME]
    devices += ["-drive", f"file={image},format=raw,if=none,id=disk0"]
    devices += ["-device", "nvme-ns,drive=disk0,bus=nvme0"]
    folder = tmp_path_factory.mktemp("nvme")
    with running_lab(folder, rabbit_url, devices, OPTIONS, "modprobe -a nvme vfio-pci") as new_lab:
        yield new_lab


def write_secret(lab: Lab, image: Path) -> None:
    """Write data to the drive as the server that holds it."""
    (lab.guest.share / "secret").write_bytes(SECRET * 10_000)
    lab.guest.run(f"busybox dd if=/io/secret of={DISK} bs=4096 seek=1000 conv=fsync")
    assert SECRET in image.read_bytes()


def is_dirty(lab: Lab) -> bool:
    """Return whether the host must clean the drive before it can be bound again."""
    (handle,) = rows.read(lab.engine, schema.attach_handles)
    return bool(handle["needs_cleaning"])


def test_data_of_a_server_is_gone_before_the_drive_is_bound_again(lab: Lab, image: Path) -> None:
    (provider,) = lab.offered(NVME)
    for _ in range(2):
        request, instance = lab.bind(provider)
        assert lab.holds(request) == DRIVE
        assert lab.offered(NVME) == []
        write_secret(lab, image)
        lab.release(instance)
        assert is_dirty(lab) or SECRET not in image.read_bytes()
        lab.until("the drive is clean", lambda: not is_dirty(lab), 60)
        assert SECRET not in image.read_bytes()
    log = (lab.guest.share / "agent.log").read_text(errors="replace")
    assert log.count("Erased by format, user data erase: 1 namespaces, none of 16 samples") == 2


@pytest.mark.matrix
def test_drive_in_use_by_the_host_stays_dirty_until_it_is_erased(lab: Lab, image: Path) -> None:
    (provider,) = lab.offered(NVME)
    _, instance = lab.bind(provider)
    write_secret(lab, image)
    lab.guest.run(f"busybox mkswap {DISK} && busybox swapon {DISK}")
    lab.release(instance)
    lab.until("the erasure has failed", lambda: "holds swap" in errors_of_jobs(lab), 60)
    assert is_dirty(lab)
    assert SECRET in image.read_bytes()

    lab.guest.run(f"busybox swapoff {DISK}")
    lab.until("the drive is clean", lambda: not is_dirty(lab), 90)
    assert SECRET not in image.read_bytes()


def errors_of_jobs(lab: Lab) -> str:
    """Return the errors of the jobs of the host."""
    return " ".join(str(row["error"]) for row in rows.read(lab.engine, schema.jobs))
