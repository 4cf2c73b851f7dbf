# SPDX-License-Identifier: Apache-2.0
"""Devices of a real kernel in a running domain of libvirt, attached and detached over the REST API.

The domain is a guest of the lab's guest, so that its kernel is slow: it boots in a minute or two.
"""

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborg.testing.fake_nova import FakeNova, serve_nova
from cyborg.tests.fixtures.machine import embedded_libvirt, guest, kernel_module, nested_guest
from cyborg.tests.fixtures.machine.processes import BIN
from cyborg.tests.lab.cloud import DRIVE, HOST, NVME, Lab, running_lab
from cyborg.tests.lab.test_nvme_service import PCI, SECRET, SETUP

pytestmark = [
    pytest.mark.lab,
    pytest.mark.services,
    pytest.mark.long,
    pytest.mark.requires("libvirt_qemu", "libvirt_python", "kernel_headers"),
]

VGPU = "VGPU"
SERVER = str(uuid.uuid4())
FUNCTION = "0000:01:00.1"
DISK = "/dev/nvme0n2"
# PCI device ids of QEMU's NVMe controller, and of mtty, as the server sees them.
IDS = {"drive": "0x0010", "vgpu": "0x3253"}
SLOW = 600.0  # seconds for what the server does
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "agent": {"enabled_drivers": "", "enabled_backends": "drives,vgpus", "discovery_interval": 5},
    "drives": {"driver": "nvme", "devices": [f"class=0108,resource_class={NVME}"]},
    "vgpus": {"driver": "gpu", "mdev_types": ["parent=mtty,type=mtty-2,traits=CUSTOM_TTY"]},
    "conductor": {"prepare_timeout": 300},
    "libvirt": {
        "live_attach": "true",
        "connection_uri": embedded_libvirt.URI,
        "request_timeout": 120,
        "detach_timeout": 60,
        "reassert_interval": 30,
    },
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str, image: Path) -> Iterator[Lab]:
    devices = [*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME]
    devices += [*guest.add_namespace(1), *guest.add_namespace(2, image)]
    setup = f"modprobe -a nvme vfio-pci mdev vfio && insmod {kernel_module.build()[0]}"
    setup += f" && {BIN}/python -I -S {SETUP} {PCI}/devices/{DRIVE} 2"
    program = f"{BIN}/python -m cyborg.tests.lab.programs.live_agent"
    agent = f"{program} {SERVER} {nested_guest.kernel()} {nested_guest.build_initrd()}"
    nova = FakeNova()
    with serve_nova(nova):
        options = {
            **OPTIONS,
            "nova": {"send_events": "true", "auth_type": "none", "endpoint_override": nova.url},
        }
        folder = tmp_path_factory.mktemp("live")
        with running_lab(
            folder, rabbit_url, devices, options, setup, agent=agent, memory="3G"
        ) as new_lab:
            # The flavor has no device profile.
            nova.add_server(SERVER, HOST, tenant_id="p", locked=False, flavor={"extra_specs": {}})
            new_lab.add_profile("vgpu", VGPU)
            allocate(new_lab)
            new_lab.until("the function is offered", lambda: FUNCTION in new_lab.handles())
            new_lab.until("mtty is offered", lambda: new_lab.offered(VGPU))
            yield new_lab


def allocate(lab: Lab) -> None:
    """Give the server the allocation of its flavor."""
    answer = lab.cloud.placement.get(f"/resource_providers?name={HOST}").json()
    (node,) = answer["resource_providers"]
    body: dict[str, Any] = {
        "resource_provider_generation": node["generation"],
        "inventories": {"VCPU": {"total": 8}},
    }
    path = f"/resource_providers/{node['uuid']}/inventories"
    assert lab.cloud.placement.put(path, json=body).status_code == 200
    body = {
        "allocations": {node["uuid"]: {"resources": {"VCPU": 1}}},
        "project_id": "p",
        "user_id": "u",
        "consumer_generation": None,
        "consumer_type": "INSTANCE",
    }
    answer = lab.cloud.placement.put(f"/allocations/{SERVER}", json=body)
    assert answer.status_code == 204, answer.text


def shown(lab: Lab) -> list[str]:
    """Return the complete lines that the server has written since its last start."""
    path = lab.guest.share / "server.log"
    text = path.read_text(errors="replace") if path.exists() else ""
    complete, _, _ = text.rpartition("\n")
    return complete.rpartition(nested_guest.READY)[2].splitlines()


def sees(lab: Lab, profile: str) -> bool:
    """Return whether the operating system of the server shows a device now."""
    lines = [line for line in shown(lab) if line.startswith("devices:")]
    return bool(lines) and IDS[profile] in lines[-1]


def is_ready(lab: Lab, starts: int) -> bool:
    """Return whether the server has booted for the nth time."""
    path = lab.guest.share / "server.log"
    return path.exists() and path.read_text(errors="replace").count(nested_guest.READY) >= starts


def domain_devices(lab: Lab) -> int:
    """Return the number of host devices of the domain, as its QEMU shows them in the status."""
    status = f"{embedded_libvirt.ROOT}/run/qemu/server.xml"
    found = lab.guest.run(f"grep -c '<hostdev' {status} 2>/dev/null || true")
    return int(found or 0)  # without a domain there is no file


def attach(lab: Lab, profile: str) -> str:
    """Attach a device to the running server; return the attachment."""
    body = {"instance_uuid": SERVER, "device_profile": profile, "mode": "live"}
    created = str(lab.call("POST", "/v2/attachments", json=body)["uuid"])
    path = f"/v2/attachments/{created}"
    lab.until("it has ended", lambda: lab.call("GET", path)["state"] != "attaching", SLOW)
    row = lab.call("GET", path)
    assert row["state"] == "attached", row
    return created


def detach(lab: Lab, attachment: str) -> None:
    """Detach a device from the running server."""
    lab.call("DELETE", f"/v2/attachments/{attachment}")

    def status() -> int:
        headers = {"OpenStack-API-Version": "accelerator latest"}
        url = f"{lab.cloud.endpoint}/v2/attachments/{attachment}"
        return requests.get(url, headers=headers, timeout=60).status_code

    lab.until("it is detached", lambda: status() == 404, SLOW)


def kernel_driver(lab: Lab) -> str:
    """Return the kernel driver of the function on the host."""
    return lab.guest.run(f"basename $(readlink {PCI}/devices/{FUNCTION}/driver)").strip()


def test_running_server_gets_devices_keeps_them_over_a_restart_and_loses_them(
    lab: Lab, image: Path
) -> None:
    lab.until("the server has booted", lambda: is_ready(lab, 1), SLOW)
    assert not sees(lab, "drive")

    # The data of the function that the host has, as if the server had written it.
    (lab.guest.share / "secret").write_bytes(SECRET * 10_000)
    lab.guest.run(
        f"[ -b {DISK} ] && busybox dd if=/io/secret of={DISK} bs=4096 seek=1000 conv=fsync"
    )
    assert SECRET in image.read_bytes()

    drive = attach(lab, "drive")
    assert kernel_driver(lab) == "vfio-pci"
    lab.until("the server sees the function", lambda: sees(lab, "drive"), SLOW)
    vgpu = attach(lab, "vgpu")
    lab.until("the server sees the mediated device", lambda: sees(lab, "vgpu"), SLOW)
    assert domain_devices(lab) == 2

    (lab.guest.share / "restart").touch()
    restarted = lab.guest.share / "restart"
    lab.until("the server is started again", lambda: not restarted.exists(), SLOW)
    lab.until("it has the devices again", lambda: domain_devices(lab) == 2, SLOW)
    lab.until("the server has booted again", lambda: is_ready(lab, 2), SLOW)
    lab.until("the server sees both", lambda: sees(lab, "drive") and sees(lab, "vgpu"), SLOW)

    detach(lab, vgpu)
    lab.until("the server sees the function only", lambda: not sees(lab, "vgpu"), SLOW)
    assert sees(lab, "drive")
    assert lab.guest.run("ls /sys/bus/mdev/devices").split() == []

    detach(lab, drive)
    lab.until("the server sees no device", lambda: not sees(lab, "drive"), SLOW)
    assert domain_devices(lab) == 0
    assert SECRET not in image.read_bytes()
    assert kernel_driver(lab) == "nvme"
    assert len(lab.offered(VGPU)) == len(lab.offered(NVME)) == 1


def test_devices_are_attached_again_after_a_reboot_of_the_host(lab: Lab) -> None:
    """The last test: the server does not boot long enough to release them."""
    attach(lab, "drive")
    attach(lab, "vgpu")
    assert domain_devices(lab) == 2

    lab.cycle_power()
    lab.until("the server has the devices again", lambda: domain_devices(lab) == 2, SLOW)
    assert kernel_driver(lab) == "vfio-pci"
    # The agent has created the mediated device before.
    restored = lab.call("GET", "/v2/jobs?kind=restore")["jobs"]
    assert {job["state"] for job in restored} == {"done"}
    found = lab.call("GET", f"/v2/attachments?instance={SERVER}")["attachments"]
    assert [row["state"] for row in found] == ["attached", "attached"]
