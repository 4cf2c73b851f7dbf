# SPDX-License-Identifier: Apache-2.0
"""Servers that a real Nova builds through a real libvirt, with devices of a real kernel inside.

Each server is a guest of the lab's guest. Its operating system writes the PCI ids of its devices to
its console, which the test reads by Nova's API, as a user of the cloud would. Each test has the
server of the test before it, since a boot of a server takes minutes. A test writes the ids that it
has seen, and the seconds that passed, to its standard output.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.address import PciAddress
from cyborg.tests.fixtures.machine import guest, nested_guest
from cyborg.tests.fixtures.machine.processes import BIN, wait_until
from cyborg.tests.fixtures.nova.libvirt_cloud import (
    URI,
    ComputeNode,
    LibvirtCloud,
    run_libvirt_cloud,
)
from cyborg.tests.fixtures.nova.servers import Servers, send
from cyborg.tests.lab.cloud import DRIVE, NVME
from cyborg.tests.lab.test_nvme_service import PCI, SECRET, SETUP

pytestmark = [
    pytest.mark.lab,
    pytest.mark.services,
    pytest.mark.long,
    pytest.mark.requires("libvirt_qemu", "libvirt_python", "libvirtd", "nova", "glance"),
]

EDU, SLICE = "CUSTOM_EDU", "CUSTOM_SLICE"
# The virtual function of the drive, a card, and one that Nova does not attach: it stands for a vGPU
# without mediated device, and is bound to vfio-pci by hand. Each card is behind a port of its own.
FUNCTION, CARD, VFIO = "0000:01:00.1", "0000:02:00.0", "0000:03:00.0"
# PCI device ids of QEMU's NVMe controller and of its card edu, as a server sees them.
DRIVE_ID, EDU_ID = "0x0010", "0x11e8"
# What the server of a flavor with a function of the drive and the second card sees.
FLAVOR = (DRIVE_ID, EDU_ID)
SECOND_CARD = (
    *("-device", "pcie-root-port,id=rp9,chassis=9,slot=9"),
    *("-device", "edu,bus=rp9"),
)
BIND = (
    f"modprobe -a nvme vfio-pci && {BIN}/python -I -S {SETUP} {PCI}/devices/{DRIVE} 2"
    f" && echo vfio-pci >{PCI}/devices/{VFIO}/driver_override && echo {VFIO} >{PCI}/drivers_probe"
)
SLOW = 1500.0  # seconds for what a server does
POLL = 4.0  # seconds between two looks
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "agent": {
        "enabled_drivers": "",
        "enabled_backends": "drives,cards,slices",
        "discovery_interval": 10,
    },
    "drives": {"driver": "nvme", "devices": [f"class=0108,resource_class={NVME}"]},
    "cards": {"driver": "generic", "devices": [f"address={CARD},resource_class={EDU}"]},
    "slices": {"driver": "generic", "devices": [f"address={VFIO},resource_class={SLICE}"]},
    # A heartbeat of the guest costs as much as twenty on hardware.
    "conductor": {"hello_interval": 5, "down_heartbeats": 12, "prepare_timeout": 600},
    "libvirt": {
        "live_attach": "true",
        "connection_uri": URI,
        "request_timeout": 120,
        "detach_timeout": 60,
        "reassert_interval": 30,
    },
}


class Compute(Servers):
    """The servers of the compute node, with what their operating systems see."""

    def __init__(self, cloud: LibvirtCloud) -> None:
        super().__init__(cloud, SLOW)
        self.node = cloud
        self._begin = time.monotonic()

    def console(self, server: str) -> list[str]:
        """Return the lines that a server has written to its console since its last start."""
        answer = self._member.post(
            f"/servers/{server}/action", json={"os-getConsoleOutput": {"length": 200}}
        )
        if not answer.ok:  # the server has no console between two starts
            return []
        text = str(answer.json()["output"])
        return text.rpartition(nested_guest.READY)[2].splitlines()

    def wait_until_seen(self, step: str, server: str, *ids: str) -> None:
        """Wait until the operating system of a server shows exactly these of our devices."""

        def shows() -> bool:
            lines = [line for line in self.console(server) if line.startswith("devices:")]
            # The last line can be incomplete.
            found = lines[-2].split() if len(lines) > 1 else []
            return Counter(id_ for id_ in found if id_ in FLAVOR) == Counter(ids)

        self.until(f"{step}: the console shows {ids}", shows)
        seconds = time.monotonic() - self._begin
        self._begin += seconds
        print(f"{step}: {seconds:.0f} s, the console shows {', '.join(ids) or 'no device'}")  # noqa: T201

    def until(self, event: str, condition: Callable[[], Any]) -> None:
        """Wait for a condition. A look at it costs the emulated host much of a second."""

        def look() -> Any:
            time.sleep(POLL)
            return condition()

        wait_until(event, look, SLOW)

    def act_with(self, server: str, action: str, **values: Any) -> None:
        """Request an action with values as a member of the project."""
        send(self._member, f"/servers/{server}/action", **{action: values})

    def refusal(self, user: str, server: str, action: str, values: Any) -> tuple[int, str]:
        """Request an action as a user; return the status and the text of the answer."""
        body = {action: values}
        answer = self.cloud.compute(user).post(f"/servers/{server}/action", json=body)
        return answer.status_code, answer.text

    def attach(self, server: str, profile: str, **values: Any) -> str:
        """Attach a device of a profile to a server; return the attachment."""
        body = {"instance_uuid": server, "device_profile": profile, **values}
        answer = self.cloud.call("admin", "POST", "/v2/attachments", body)
        assert answer.status_code in (200, 201, 202), answer.text
        path = f"/v2/attachments/{answer.json()['uuid']}"

        def row() -> dict[str, Any]:
            found: dict[str, Any] = self.cloud.call("admin", "GET", path).json()
            return found

        self.until("the attachment has ended", lambda: row()["state"] != "attaching")
        assert row()["state"] == "attached", row()
        return path

    def detach(self, path: str) -> None:
        """Delete an attachment, and wait until it is gone."""
        answer = self.cloud.call("admin", "DELETE", path)
        assert answer.status_code == 202, answer.text
        gone = path.partition("?")[0]
        self.until(
            "the device is detached",
            lambda: self.cloud.call("admin", "GET", gone).status_code == 404,
        )

    def holders(self) -> dict[str, str]:
        """Return the server of each ARQ that is bound, by the address of its function."""
        arqs = self.cloud.call("admin", "GET", "/v2/accelerator_requests").json()["arqs"]
        found = {}
        for arq in arqs:
            assert arq["state"] == "Bound", arq
            address = PciAddress.parse_attach_info(arq["attach_handle_info"])
            found[str(address)] = str(arq["instance_uuid"])
        return found

    def is_offered(self, resource_class: str) -> bool:
        """Return whether a device of a class is free in Placement."""
        answer = self.cloud.placement.get(f"/resource_providers?resources={resource_class}:1")
        return answer.ok and bool(answer.json()["resource_providers"])


@pytest.fixture(scope="module")
def compute(
    tmp_path_factory: pytest.TempPathFactory, rabbit_url: str, image: Path
) -> Iterator[Compute]:
    devices = [*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME, *guest.EDU_BEHIND_PORT, *SECOND_CARD]
    node = ComputeNode(
        [*devices, *guest.add_namespace(1), *guest.add_namespace(2, image)],
        BIND,
        OPTIONS,
        f"LAB_VFIO={VFIO} {BIN}/python -m cyborg.tests.lab.programs.vfio_agent",
    )
    with run_libvirt_cloud(tmp_path_factory.mktemp("nova"), rabbit_url, node) as running:
        found = Compute(running)
        for resource_class in (NVME, EDU, SLICE):
            found.until(f"{resource_class} is offered", partial(found.is_offered, resource_class))
        yield found


@pytest.fixture(scope="module")
def card(compute: Compute) -> str:
    """Return a device profile of the card."""
    return compute.make_profile(EDU)


@pytest.fixture(scope="module")
def server(compute: Compute) -> str:
    """Return a server whose flavor has a function of the drive, and the second card."""
    return compute.boot(compute.make_flavor(compute.make_profile(NVME, SLICE), ram=256))


def write_secret(image: Path) -> None:
    """Write to the namespace, as the operating system of a server writes to its drive."""
    with image.open("r+b") as file:
        file.seek(4 << 20)
        file.write(SECRET * 1000)


def test_server_has_the_device_of_its_flavor(compute: Compute, server: str) -> None:
    compute.wait_until_seen("build", server, *FLAVOR)
    assert compute.holders() == {FUNCTION: server, VFIO: server}
    assert not compute.is_offered(NVME)


def test_running_server_gets_a_card_and_loses_it(compute: Compute, server: str, card: str) -> None:
    attachment = compute.attach(server, card, mode="live")
    compute.wait_until_seen("attach live", server, *FLAVOR, EDU_ID)
    assert compute.holders() == {FUNCTION: server, VFIO: server, CARD: server}
    compute.act_with(server, "reboot", type="HARD")
    compute.wait_for_status(server, "ACTIVE")
    compute.wait_until_seen("hard reboot", server, *FLAVOR, EDU_ID)
    compute.detach(attachment)
    compute.wait_until_seen("detach live", server, *FLAVOR)
    compute.until("the card is offered", lambda: compute.is_offered(EDU))


def test_server_gets_a_card_at_its_next_start(compute: Compute, server: str, card: str) -> None:
    attachment = compute.attach(server, card, mode="next-boot", reboot=True)
    compute.wait_until_seen("attach next-boot", server, *FLAVOR, EDU_ID)
    compute.detach(f"{attachment}?reboot=true")
    compute.wait_until_seen("detach with reboot", server, *FLAVOR)


def test_nova_refuses_what_it_does_not_support(compute: Compute, server: str) -> None:
    actions: Mapping[str, tuple[str, Any]] = {
        "suspend": ("member", None),
        "resize": ("member", {"flavorRef": compute.make_flavor(compute.make_profile(EDU))}),
        "os-migrateLive": ("admin", {"host": None, "block_migration": "auto"}),
    }
    for action, (user, values) in actions.items():
        status, text = compute.refusal(user, server, action, values)
        print(f"{action}: {status} {text}")  # noqa: T201
        assert status in (400, 403, 409), action
        assert "ccelerator" in text, action
    compute.wait_for_status(server, "ACTIVE")


def test_rebuilt_server_has_the_device(compute: Compute, server: str) -> None:
    compute.act_with(server, "rebuild", imageRef=compute.cloud.image)
    compute.wait_for_status(server, "ACTIVE")
    compute.wait_until_seen("rebuild", server, *FLAVOR)


def test_started_server_has_the_device(compute: Compute, server: str) -> None:
    compute.act(server, "os-stop")
    compute.wait_for_status(server, "SHUTOFF")
    assert compute.holders() == {FUNCTION: server, VFIO: server}
    compute.act(server, "os-start")
    compute.wait_for_status(server, "ACTIVE")
    compute.wait_until_seen("stop and start", server, *FLAVOR)


def test_shelved_server_returns_the_device(compute: Compute, server: str, image: Path) -> None:
    write_secret(image)
    compute.act(server, "shelve")
    compute.wait_for_status(server, "SHELVED_OFFLOADED")
    compute.until("the function is offered", lambda: compute.is_offered(NVME))
    assert compute.holders() == {}
    assert SECRET not in image.read_bytes()
    compute.act(server, "unshelve")
    compute.wait_for_status(server, "ACTIVE")
    compute.wait_until_seen("shelve and unshelve", server, *FLAVOR)


def test_death_of_the_daemons_changes_nothing(compute: Compute, server: str) -> None:
    compute.node.kill_compute()
    compute.node.kill_agent()
    compute.node.start_agent()
    compute.node.start_compute()
    compute.act_with(server, "reboot", type="HARD")
    compute.wait_for_status(server, "ACTIVE")
    compute.wait_until_seen("death of nova-compute and agent, hard reboot", server, *FLAVOR)
    assert compute.holders() == {FUNCTION: server, VFIO: server}


def test_server_has_the_device_after_a_reboot_of_the_host(compute: Compute, server: str) -> None:
    compute.node.cycle_power()
    compute.wait_until_seen("reboot of the host", server, *FLAVOR)
    compute.wait_for_status(server, "ACTIVE")
    assert compute.holders() == {FUNCTION: server, VFIO: server}


def test_deleted_server_leaves_no_data(compute: Compute, server: str, image: Path) -> None:
    write_secret(image)
    compute.request_delete(server)
    compute.until("the function is offered", lambda: compute.is_offered(NVME))
    assert SECRET not in image.read_bytes()
    assert compute.holders() == {}
    assert compute.node.guest.run("ls /run/libvirt/qemu/ | grep xml || true") == ""
    driver = compute.node.guest.run(f"basename $(readlink {PCI}/devices/{VFIO}/driver)")
    assert driver.strip() == "vfio-pci"
