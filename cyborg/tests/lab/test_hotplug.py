# SPDX-License-Identifier: Apache-2.0
"""Hot-plug on a real kernel, and the time until Placement is updated.

The agent receives uevents. Periodic discovery has no effect: its interval is ten minutes. Python is
about twenty times slower in the guest than on hardware. On a quiet machine Placement is updated
within two seconds nevertheless; the summary shows the time.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cyborg.tests.fixtures.machine import guest
from cyborg.tests.lab.cloud import DRIVE, NVME, Lab, running_lab

pytestmark = [pytest.mark.lab, pytest.mark.services]

EDU = "CUSTOM_EDU"
# Seconds from the uevent until Placement is updated, with other tests on the same cores. Without
# uevents the next heartbeat would update it, after up to ten seconds.
SOON = 5.0
SLOW = 1.0  # seconds that the kernel waits when it disables SR-IOV
EMPTY_PORT = ("-device", "pcie-root-port,id=rp1,chassis=2,slot=2")
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "agent": {"enabled_drivers": "", "enabled_backends": "cards", "discovery_interval": 600},
    "cards": {
        "driver": "generic",
        "devices": [f"class=0108,resource_class={NVME}", f"vendor=1234,resource_class={EDU}"],
        "vf_counts": "0,2",
    },
    # The defaults: a shorter interval would hide missing uevents.
    "conductor": {"hello_interval": 10, "publish_interval": 5},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[Lab]:
    # No kernel driver binds the created VFs.
    setup = (
        "modprobe -a nvme vfio-pci; drive=$(dirname /sys/bus/pci/devices/*/sriov_totalvfs)\n"
        "echo 0 >$drive/sriov_drivers_autoprobe"
    )
    devices = [*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME, *EMPTY_PORT]
    folder = tmp_path_factory.mktemp("hotplug")
    with running_lab(folder, rabbit_url, devices, OPTIONS, setup) as new_lab:
        yield new_lab


def test_hot_plugged_device_is_offered_until_it_is_unplugged(
    lab: Lab, record_property: Any
) -> None:
    assert lab.offered(EDU) == []
    lab.guest.monitor.execute("device_add", driver="edu", bus="rp1", id="card")
    appearance = lab.until("the card is offered", lambda: lab.offered(EDU))
    lab.guest.monitor.execute("device_del", id="card")
    lab.guest.monitor.wait_for("DEVICE_DELETED", device="card")
    disappearance = lab.until("the card is not offered", lambda: not lab.offered(EDU))
    record_property(
        "summary",
        f"hot-plug: in Placement after {appearance:.2f} s, out after {disappearance:.2f} s",
    )
    assert appearance < SOON
    assert disappearance < SOON


def test_removed_bound_virtual_function_is_drained(lab: Lab, record_property: Any) -> None:
    (provider,) = lab.offered(NVME)
    assert lab.inventory(provider) == (1, 0)

    lab.guest.run("echo 2 >$drive/sriov_numvfs")
    offer_time = lab.until("two functions are offered", lambda: lab.inventory(provider) == (2, 0))
    first, second = "0000:01:00.1", "0000:01:00.2"
    assert lab.handles() == {first: False, second: False}

    bound = dict(lab.bind(provider) for _ in range(2))
    holders = {lab.holds(request): request for request in bound}
    assert set(holders) == {first, second}

    # The kernel cannot remove a single VF: all are removed, and one is recreated.
    begin = time.monotonic()
    lab.guest.run("echo 0 >$drive/sriov_numvfs")
    lab.until(
        "the two are drained and the drive is whole",
        lambda: lab.handles() == {first: True, second: True, DRIVE: False},
    )
    seconds_to_drain = time.monotonic() - begin
    lab.guest.run("echo 1 >$drive/sriov_numvfs")
    lab.until("the first is back", lambda: lab.handles() == {first: False, second: True})
    assert {request: lab.state(request) for request in bound} == dict.fromkeys(bound, "Bound")
    lab.until("none is offered: each is held", lambda: not lab.offered(NVME))

    # The others keep working.
    lab.release(bound.pop(holders[first]))
    lab.until("what is left is offered", lambda: lab.offered(NVME) == [provider])
    new_arq, instance = lab.bind(provider)
    assert lab.holds(new_arq) == first
    lab.until("none is offered any more", lambda: not lab.offered(NVME))
    assert lab.state(holders[second]) == "Bound"

    lab.release(bound[holders[second]])
    lab.until("the second is forgotten", lambda: lab.handles() == {first: False})
    lab.until("there is one", lambda: lab.inventory(provider) == (1, 0))
    lab.release(instance)

    lab.guest.run("echo 0 >$drive/sriov_numvfs")
    lab.until("the drive is whole again", lambda: lab.handles() == {DRIVE: False})
    record_property(
        "summary",
        f"VFs: in Placement after {offer_time:.2f} s, drained after {seconds_to_drain:.2f} s",
    )
    assert offer_time < SOON
    assert seconds_to_drain < SOON + SLOW


def start_layout(lab: Lab, layout: str, drain: bool = False) -> str:
    """Start to set the layout of the drive over the API; return the job."""
    (device,) = lab.call("GET", f"/v2/devices?address={DRIVE}")["devices"]
    body = {"layout": layout, "drain": drain}
    return str(lab.call("PUT", f"/v2/devices/{device['uuid']}/layout", json=body)["uuid"])


def set_layout(lab: Lab, layout: str) -> None:
    """Set the layout of the drive over the API, and wait for its job."""
    await_layout(lab, start_layout(lab, layout))


def await_layout(lab: Lab, job: str) -> None:
    """Wait until a layout is set."""
    lab.until("the job has ended", lambda: lab.call("GET", f"/v2/jobs/{job}")["state"] != "pending")
    assert lab.call("GET", f"/v2/jobs/{job}")["state"] == "done"


def test_layout_creates_virtual_functions_and_removes_free_ones(lab: Lab) -> None:
    (provider,) = lab.offered(NVME)
    set_layout(lab, "vfs-2")
    lab.until("two functions are offered", lambda: lab.inventory(provider) == (2, 0))
    request, instance = lab.bind(provider)
    assert lab.holds(request) == "0000:01:00.1"
    with pytest.raises(AssertionError, match=f"in use by 1 request.*{request}"):
        set_layout(lab, "vfs-0")
    assert lab.guest.run("cat $drive/sriov_numvfs").split() == ["2"]

    job = start_layout(lab, "vfs-0", drain=True)
    lab.until("both functions are reserved", lambda: lab.inventory(provider) == (2, 2))
    assert lab.guest.run("cat $drive/sriov_numvfs").split() == ["2"]
    lab.release(instance)
    await_layout(lab, job)
    lab.until("the drive is whole again", lambda: lab.handles() == {DRIVE: False})
    lab.until("it is offered", lambda: lab.inventory(provider) == (1, 0))
