# SPDX-License-Identifier: Apache-2.0
"""A mediated device of a real kernel, from the REST API to sysfs and back."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cyborg.core.naming import handle_uuid
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.machine import kernel_module
from cyborg.tests.lab.cloud import HOST, Lab, running_lab

pytestmark = [
    pytest.mark.lab,
    pytest.mark.services,
    pytest.mark.long,
    pytest.mark.requires("kernel_headers"),
]

VGPU = "VGPU"
DEVICES = "/sys/bus/mdev/devices"
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "agent": {"enabled_drivers": "", "enabled_backends": "vgpus", "discovery_interval": 5},
    "vgpus": {"driver": "gpu", "mdev_types": ["parent=mtty,type=mtty-2,traits=CUSTOM_TTY"]},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[Lab]:
    setup = f"modprobe -a mdev vfio && insmod {kernel_module.build()[0]}"
    folder = tmp_path_factory.mktemp("vgpus")
    with running_lab(folder, rabbit_url, [], OPTIONS, setup, VGPU) as new_lab:
        yield new_lab


def existing(lab: Lab) -> list[str]:
    """Return the uuids of the mediated devices in the guest."""
    return lab.guest.run(f"ls {DEVICES}").split()


def dirty(lab: Lab) -> list[str]:
    """Return the addresses of the handles that the host must clean."""
    records = rows.read(lab.engine, schema.attach_handles)
    return [str(row["address"]) for row in records if row["needs_cleaning"]]


def errors_of_jobs(lab: Lab) -> str:
    """Return the errors of the jobs of the host."""
    return " ".join(str(row["error"]) for row in rows.read(lab.engine, schema.jobs))


def test_device_exists_while_a_server_has_it(lab: Lab) -> None:
    (provider,) = lab.offered(VGPU)
    assert lab.inventory(provider) == (12, 0)
    answer = lab.cloud.placement.get(f"/resource_providers/{provider}/traits")
    assert {"CUSTOM_TTY", "CUSTOM_MDEV_MTTY_2"} <= set(answer.json()["traits"])
    assert existing(lab) == []

    servers = [lab.bind(provider) for _ in range(2)]
    found = [lab.call("GET", f"/v2/accelerator_requests/{request}") for request, _ in servers]
    assert {arq["attach_handle_type"] for arq in found} == {"MDEV"}
    for arq in found:
        assert arq["attach_handle_info"] == {"parent": "mtty", "asked_type": "mtty-2"}
    assert existing(lab) == sorted(arq["attach_handle_uuid"] for arq in found)
    slots = {handle_uuid(HOST, "mtty", f"mtty/mtty-2/{number}") for number in range(12)}
    assert set(existing(lab)) <= slots
    lab.guest.run(f"grep -q 'Dual port' {DEVICES}/{existing(lab)[0]}/mdev_type/name")
    assert lab.inventory(provider) == (12, 0)

    lab.release(servers[0][1])
    kept = found[1]["attach_handle_uuid"]
    lab.until("its device is removed", lambda: existing(lab) == [kept])
    lab.release(servers[1][1])
    lab.until("all devices are removed", lambda: existing(lab) == [])
    lab.until("all handles are clean", lambda: dirty(lab) == [])
    assert lab.inventory(provider) == (12, 0)


def test_device_that_a_process_uses_is_removed_later(lab: Lab) -> None:
    """The handle stays dirty, so that no other server gets it."""
    (provider,) = lab.offered(VGPU)
    _, instance = lab.bind(provider)
    (device,) = existing(lab)
    group = f"/dev/vfio/$(basename $(readlink {DEVICES}/{device}/iommu_group))"
    # Opened before the process starts, which may take longer than the release.
    lab.guest.run(f"exec 9<>{group}; sleep 1000 & echo $! >/io/user; exec 9>&-")
    lab.release(instance)
    lab.until("the removal has failed", lambda: "may still be used" in errors_of_jobs(lab))
    assert existing(lab) == [device]
    assert len(dirty(lab)) == 1

    lab.guest.run("kill $(cat /io/user)")
    lab.until("the device is removed", lambda: existing(lab) == [])
    lab.until("the handle is clean", lambda: dirty(lab) == [])


def test_handles_are_the_same_after_all_devices_were_lost(lab: Lab) -> None:
    """A boot of the host has the same effect: the parent disappears, and comes without devices."""
    (provider,) = lab.offered(VGPU)
    request, instance = lab.bind(provider)
    before = handle_uuids(lab)
    assert len(before) == 12
    lab.guest.run("rmmod mtty")
    lab.until("the free handles have disappeared", lambda: len(handle_uuids(lab)) == 1)
    assert lab.state(request) == "Bound"

    lab.guest.run(f"insmod {kernel_module.build()[0]}")
    lab.until("all handles are back", lambda: handle_uuids(lab) == before)
    lab.until("all are in Placement", lambda: lab.inventory(provider) == (12, 0))
    assert existing(lab) == []
    assert lab.state(request) == "Bound"

    lab.release(instance)
    lab.until("the handle is clean", lambda: dirty(lab) == [])


def restore_states(lab: Lab) -> set[str]:
    """Return the states of the jobs that prepare devices again."""
    found = rows.read(lab.engine, schema.jobs)
    return {str(row["state"]) for row in found if row["kind"] == "restore"}


def test_device_of_a_server_is_created_again_after_a_boot(lab: Lab) -> None:
    """The power of the host is cut; its kernel forgets all mediated devices."""
    (provider,) = lab.offered(VGPU)
    request, instance = lab.bind(provider)
    (device,) = existing(lab)
    lab.cycle_power()
    lab.until("the device exists again", lambda: device in existing(lab))
    assert existing(lab) == [device]
    assert lab.state(request) == "Bound"
    lab.until("all are in Placement", lambda: lab.inventory(provider) == (12, 0))
    # The agent creates the device before the conductor has the result of the job.
    lab.until("the restore job is done", lambda: restore_states(lab) <= {"done"})

    lab.release(instance)
    lab.until("the device is removed", lambda: existing(lab) == [])
    lab.until("the handle is clean", lambda: dirty(lab) == [])


def handle_uuids(lab: Lab) -> dict[str, str]:
    """Return the uuids of the handles by address."""
    records = rows.read(lab.engine, schema.attach_handles)
    return {str(row["address"]): str(row["uuid"]) for row in records}
