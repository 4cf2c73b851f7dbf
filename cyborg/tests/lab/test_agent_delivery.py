# SPDX-License-Identifier: Apache-2.0
"""A function of a real kernel that Nova does not attach, in a running domain of libvirt.

The function is bound to vfio-pci by hand and stands for a vGPU without mediated device: whatever
happens to the server, it must keep its driver. The domain is a guest of the lab's guest.
"""

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cyborg.tests.fixtures.machine import embedded_libvirt, guest, nested_guest
from cyborg.tests.fixtures.machine.processes import BIN
from cyborg.tests.lab.cloud import Lab, running_lab
from cyborg.tests.lab.test_nvme_service import PCI

pytestmark = [
    pytest.mark.lab,
    pytest.mark.services,
    pytest.mark.long,
    pytest.mark.requires("libvirt_qemu", "libvirt_python"),
]

EDU = "CUSTOM_EDU"
SERVER = str(uuid.uuid4())
FUNCTION = "0000:01:00.0"
DEVICE_ID = "0x11e8"  # of QEMU's device edu, as the server sees it
SLOW = 600.0  # seconds for what the server does
SETUP = (
    f"modprobe vfio-pci && echo vfio-pci >{PCI}/devices/{FUNCTION}/driver_override"
    f" && echo {FUNCTION} >{PCI}/drivers_probe"
)
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "agent": {"enabled_drivers": "", "enabled_backends": "cards", "discovery_interval": 5},
    "cards": {"driver": "generic", "devices": [f"address={FUNCTION},resource_class={EDU}"]},
    "libvirt": {
        "live_attach": "true",
        "connection_uri": embedded_libvirt.URI,
        "request_timeout": 120,
        # Too long to explain what a test sees: only the starts of the server can.
        "reassert_interval": 3600,
        "attach_timeout": 30,
    },
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[Lab]:
    program = f"LAB_VFIO={FUNCTION} {BIN}/python -m cyborg.tests.lab.programs.live_agent"
    agent = f"{program} {SERVER} {nested_guest.kernel()} {nested_guest.build_initrd()}"
    devices = [*guest.IOMMU, *guest.EDU_BEHIND_PORT]
    folder = tmp_path_factory.mktemp("delivery")
    with running_lab(
        folder, rabbit_url, devices, OPTIONS, SETUP, EDU, agent=agent, memory="2G"
    ) as new_lab:
        command(new_lab, "stop")  # each test builds the server
        yield new_lab


def command(lab: Lab, name: str) -> None:
    """Let the program of the agent change the server, and wait for it."""
    file = lab.guest.share / name
    file.touch()
    lab.until(f"the server obeys {name}", lambda: not file.exists(), SLOW)


def domain_devices(lab: Lab) -> int:
    """Return the number of host devices of the running domain."""
    status = f"{embedded_libvirt.ROOT}/run/qemu/server.xml"
    found = lab.guest.run(f"grep -c '<hostdev.*managed=.no' {status} 2>/dev/null || true")
    return int(found or 0)  # without a domain there is no file


def kernel_driver(lab: Lab) -> str:
    """Return the kernel driver of the function on the host."""
    return lab.guest.run(f"basename $(readlink {PCI}/devices/{FUNCTION}/driver)").strip()


def wait_for_device(lab: Lab, arq: str, before: str | None) -> str:
    """Wait until the domain has the function and the ARQ shows it; return since when."""
    lab.until("the domain has the function", lambda: domain_devices(lab) == 1, SLOW)
    path = f"/v2/accelerator_requests/{arq}"
    lab.until(
        "it is recorded", lambda: lab.call("GET", path)["attached_at"] not in (None, before), SLOW
    )
    row = lab.call("GET", path)
    assert (row["state"], row["attach_error"]) == ("Bound", None)
    assert row["attach_handle_info"]["delivery"] == "agent"
    assert kernel_driver(lab) == "vfio-pci"
    return str(row["attached_at"])


def sees_function(lab: Lab) -> bool:
    """Return whether the operating system of the server shows the function since its last start."""
    text = (lab.guest.share / "server.log").read_text(errors="replace")
    lines = text.rpartition(nested_guest.READY)[2].splitlines()
    return any(line.startswith("devices:") and DEVICE_ID in line for line in lines)


def test_server_has_its_function_after_each_start(lab: Lab) -> None:
    (provider,) = lab.offered(EDU)
    arq, _ = lab.bind(provider, instance=SERVER)

    command(lab, "start")
    at = wait_for_device(lab, arq, None)
    lab.until("the server sees the function", lambda: sees_function(lab), SLOW)

    # A hard reboot: Nova ends the guest and starts it again.
    command(lab, "restart")
    at = wait_for_device(lab, arq, at)

    command(lab, "stop")
    assert (domain_devices(lab), kernel_driver(lab)) == (0, "vfio-pci")
    command(lab, "start")
    at = wait_for_device(lab, arq, at)

    # The host boots: its agent starts, and so does the server.
    lab.cycle_power()
    wait_for_device(lab, arq, at)

    command(lab, "stop")
    lab.release(SERVER)
    lab.until("the function is offered", lambda: lab.offered(EDU))
    assert kernel_driver(lab) == "vfio-pci"


def test_server_that_never_gets_its_function_has_an_error(lab: Lab) -> None:
    (provider,) = lab.offered(EDU)
    arq, _ = lab.bind(provider, instance=SERVER)
    # As if somebody had taken the function from the driver of the vendor.
    lab.guest.run(f"echo {FUNCTION} >{PCI}/drivers/vfio-pci/unbind")
    command(lab, "start")
    path = f"/v2/accelerator_requests/{arq}"
    lab.until("it has an error", lambda: lab.call("GET", path)["attach_error"], SLOW)
    row = lab.call("GET", path)
    assert row["attach_error"].startswith("libvirt refused: ")
    assert (row["state"], row["attached_at"], domain_devices(lab)) == ("Bound", None, 0)
    lab.guest.run(SETUP)
    wait_for_device(lab, arq, None)
