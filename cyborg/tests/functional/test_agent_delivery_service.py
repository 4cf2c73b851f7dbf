# SPDX-License-Identifier: Apache-2.0
"""Handles that Nova does not attach, over REST: a whole service, guests in memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.guests import reassertion as factory
from cyborg.core import naming
from cyborg.core.address import PciAddress
from cyborg.core.inventory.device import AttachHandle, HandleType
from cyborg.drivers import fake
from cyborg.testing.fake_nova import FakeNova, serve_nova
from cyborg.tests.fixtures.clouds.standalone import HOST, running
from cyborg.tests.fixtures.hosts.fake_hypervisor import FakeHypervisor
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.functional.test_attachment_commands import GROUPS, Service

# Seconds from the event of the hypervisor to the device of the guest; the check that is due next
# is a minute away.
SOON = 1.0
SECOND = "0000:0d:00.0"


class Host(Service):
    """A service whose agent attaches VFIO handles to guests in memory."""

    hypervisor: FakeHypervisor
    on_start: Callable[[], None]

    def start(self, instance: str) -> None:
        """Start the guest of a server as Nova does, which its agent notices."""
        self.hypervisor.start(instance)
        self.on_start()

    def arq(self, instance: str) -> dict[str, Any]:
        """Return the ARQ of a server."""
        (row,) = self.call("GET", f"accelerator_requests?instance={instance}").json()["arqs"]
        return dict(row)


make_test_handle = fake._handle


def make_vfio_handle(card: PciAddress, number: int) -> AttachHandle:
    """Return a handle of the driver ``fake``, as that of a vGPU without mediated device."""
    return replace(make_test_handle(card, number), type=HandleType.VFIO)


def make_mixed_handle(card: PciAddress, number: int) -> AttachHandle:
    """Return a handle, of the type VFIO only on the card SECOND."""
    make = make_vfio_handle if str(card) == SECOND else make_test_handle
    return make(card, number)


@contextmanager
def running_host(
    folder: Path, make_handle: Callable[..., AttachHandle], cards: int, **libvirt: Any
) -> Iterator[Host]:
    """Run a service until the block ends; one of its ``cards`` is offered at the beginning."""
    hypervisor, callbacks = FakeHypervisor(), []

    def make(uri: str, timeout: float, on_start: Callable[[], None]) -> Any:
        callbacks.append(on_start)
        return hypervisor

    with pytest.MonkeyPatch.context() as patch, serve_nova(FakeNova()) as nova:
        patch.setattr(factory, "LibvirtHypervisor", make)
        patch.setattr(fake, "_handle", make_handle)
        endpoint = {"auth_type": "none", "endpoint_override": nova.url}
        more = {"num_devices": cards}
        with running(folder, handles=4, fake=more, nova=endpoint, libvirt=libvirt) as stack:
            host = Host(stack, nova)
            host.hypervisor = hypervisor
            host.on_start = callbacks[0] if callbacks else lambda: None
            answer = host.call("POST", "device_profiles", {"name": "one-fpga", "groups": GROUPS})
            assert answer.status_code == 201, answer.text
            yield host


def test_server_gets_its_device_soon_after_each_start(tmp_path: Path) -> None:
    with running_host(tmp_path, make_vfio_handle, 1, live_attach=True) as host:
        instance = host.boot()
        arq = host.arq(instance)
        assert (arq["state"], arq["attached_at"]) == ("Bound", None)
        assert arq["attach_handle_info"]["delivery"] == "agent"
        for _ in range(2):
            host.start(instance)
            wait_until("the guest has it", lambda: host.hypervisor.count(instance) == 1, SOON)
        wait_until("it is recorded", lambda: host.arq(instance)["attached_at"])
        shown = f"arq-show {arq['uuid']}"
        assert host.cyborg.field(shown, "Handle") == "VFIO"
        assert host.cyborg.field(shown, "Attached") == host.arq(instance)["attached_at"]
        assert host.cyborg.field(shown, "Attach error") == "None"


@pytest.mark.matrix
def test_host_without_live_attach_does_not_offer_the_device(tmp_path: Path) -> None:
    with running_host(tmp_path, make_mixed_handle, 2, live_attach=False) as host:
        path = f"devices?address={SECOND}"
        (device,) = wait_until("it is shown", lambda: host.call("GET", path).json()["devices"])
        assert (device["deliverable"], device["state"]) == (False, "undeliverable")
        assert "set [libvirt] live_attach = true on this host" in device["undeliverable_reason"]
        provider = naming.provider_uuid(HOST, SECOND)
        url = f"/resource_providers/{provider}/inventories"

        def is_reserved() -> bool:
            found = host.stack.placement.get(url).json().get("inventories", {}).get("FPGA")
            return found is not None and found["reserved"] == found["total"]

        wait_until("Placement offers none of it", is_reserved)
