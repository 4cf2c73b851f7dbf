# SPDX-License-Identifier: Apache-2.0
"""Hot-plug on a real kernel, and the time until Placement is updated.

The agent receives uevents. Periodic discovery has no effect: its interval is an hour. The summary
shows the time until Placement is updated; Python is about twenty times slower in the guest than on
hardware.
"""

import re
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cyborg.tests.fixtures.machine import guest
from cyborg.tests.lab.cloud import DRIVE, NVME, Lab, running_lab

pytestmark = [pytest.mark.lab, pytest.mark.services, pytest.mark.matrix]

EDU, NIC = "CUSTOM_EDU", "CUSTOM_NIC"
CARD = "0000:03:00.0"  # in the port rp2
# Seconds. Longer than these tests: without uevents the agent would not see a change.
NEVER = 3600
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "agent": {"enabled_drivers": "", "enabled_backends": "cards,nics", "discovery_interval": NEVER},
    "cards": {
        "driver": "generic",
        "devices": [f"class=0108,resource_class={NVME}", f"vendor=1234,resource_class={EDU}"],
        "vf_counts": "0,2",
    },
    "nics": {
        "driver": "nic",
        "devices": "vendor=8086,product=10d3",
        "physical_networks": f"physnet1:{CARD}",
        "check_carrier": "false",  # the link needs a second
    },
    # The default: a shorter interval would hide that a change starts a report.
    "conductor": {"hello_interval": 10},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[Lab]:
    # No kernel driver binds the created VFs.
    setup = (
        "modprobe -a nvme vfio-pci e1000e; drive=$(dirname /sys/bus/pci/devices/*/sriov_totalvfs)\n"
        "echo 0 >$drive/sriov_drivers_autoprobe"
    )
    devices = [*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME, *guest.EMPTY_PORTS]
    folder = tmp_path_factory.mktemp("hotplug")
    with running_lab(folder, rabbit_url, devices, OPTIONS, setup) as new_lab:
        yield new_lab


def test_hot_plugged_device_is_offered_until_it_is_unplugged(
    lab: Lab, record_property: Any
) -> None:
    assert lab.offered(EDU) == []
    lab.plug("rp1", "edu")
    appearance = lab.until("the card is offered", lambda: lab.offered(EDU))
    lab.unplug("rp1")
    disappearance = lab.until("the card is not offered", lambda: not lab.offered(EDU))
    record_property(
        "summary",
        f"hot-plug: in Placement after {appearance:.2f} s, out after {disappearance:.2f} s",
    )


def show_device(lab: Lab, address: str) -> Any:
    """Return a device as the service shows it."""
    (device,) = lab.call("GET", f"/v2/devices?address={address}")["devices"]
    return device


def configure_interface(lab: Lab, command: str) -> None:
    """Configure the interface of the card while it has a link; make the kernel report it.

    The kernel sends no uevent for an address: the agent would find it by the next discovery.
    """
    lab.guest.run(
        f"cd /sys/bus/pci/devices/{CARD}/net && card=$(ls) && busybox ip link set up dev $card\n"
        "until grep -q 1 $card/carrier; do sleep 0.1; done\n"
        f"busybox ip {command} $card && echo change >../uevent; cd /"
    )


def test_network_card_is_offered_except_while_the_host_uses_it(lab: Lab) -> None:
    lab.add_profile("nic", NIC)
    lab.plug("rp2", "e1000e")
    lab.until("the card is offered", lambda: lab.offered(NIC))
    (provider,) = lab.offered(NIC)
    assert show_device(lab, CARD)["deliverable"]

    configure_interface(lab, "addr add 192.0.2.1/24 dev")
    lab.until("the card is not offered", lambda: lab.offered(NIC) == [])
    # A discovery may have found the link before the address.
    reason = r"the host uses it: eth[0-9] has a route"
    lab.until(
        "the reason is its route",
        lambda: re.match(reason, show_device(lab, CARD).get("undeliverable_reason") or ""),
    )
    assert not show_device(lab, CARD)["deliverable"]
    with pytest.raises(AssertionError, match="does not exist"):
        lab.start_bind(provider, "nic", str(uuid.uuid4()))

    # The address alone may come back: the card is in use until its interface is down.
    configure_interface(lab, "addr del 192.0.2.1/24 dev")
    configure_interface(lab, "link set down dev")
    lab.until("the card is offered", lambda: lab.offered(NIC) == [provider])
    request, instance = lab.bind(provider, "nic", resource_class=NIC)
    bound = lab.call("GET", f"/v2/accelerator_requests/{request}")
    assert lab.holds(request) == CARD
    assert bound["attach_handle_info"]["physical_network"] == "physnet1"
    assert lab.offered(NIC) == []
    lab.release(instance)
    lab.until("the card is free", lambda: lab.offered(NIC) == [provider])
    lab.unplug("rp2")
    lab.until("the card is not offered", lambda: lab.offered(NIC) == [])
    # The interface goes before the function, which is not offered without it.
    lab.until(
        "the card is gone", lambda: not lab.call("GET", f"/v2/devices?address={CARD}")["devices"]
    )


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


def start_layout(lab: Lab, layout: str, drain: bool = False) -> str:
    """Start to set the layout of the drive over the API; return the job."""
    device = show_device(lab, DRIVE)
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
