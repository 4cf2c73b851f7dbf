# SPDX-License-Identifier: Apache-2.0
"""Attachments to running guests over REST and by commands: a whole service, guests in memory."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cyborg.agent.guests import reassertion as factory
from cyborg.testing.fake_nova import FakeNova, serve_nova
from cyborg.tests.fixtures.clouds.standalone import running
from cyborg.tests.fixtures.hosts.fake_hypervisor import FakeHypervisor
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.functional.test_attachment_commands import GROUPS, Service


class Host(Service):
    """A stand-alone service whose agent attaches devices to guests in memory."""

    hypervisor: FakeHypervisor
    on_start: Callable[[], None]

    def start(self, instance: str) -> None:
        """Start the guest of a server without devices, which its agent notices."""
        self.hypervisor.start(instance)
        self.on_start()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    hypervisor, callbacks = FakeHypervisor(), []

    def make(uri: str, timeout: float, on_start: Callable[[], None]) -> Any:
        assert (uri, timeout) == ("qemu:///system", 7.0)
        callbacks.append(on_start)
        return hypervisor

    with (
        pytest.MonkeyPatch.context() as patch,
        serve_nova(FakeNova()) as nova,
    ):
        patch.setattr(factory, "LibvirtHypervisor", make)
        with running(
            tmp_path_factory.mktemp("live"),
            handles=8,
            nova={"auth_type": "none", "endpoint_override": nova.url},
            libvirt={"live_attach": True, "request_timeout": 7, "detach_timeout": 1},
        ) as stack:
            host = Host(stack, nova)
            host.hypervisor, host.on_start = hypervisor, callbacks[0]
            answer = host.call("POST", "device_profiles", {"name": "one-fpga", "groups": GROUPS})
            assert answer.status_code == 201, answer.text
            yield host


def test_running_server_gets_a_device_keeps_it_and_loses_it(host: Host) -> None:
    instance = host.boot()
    host.start(instance)
    uuid = host.cyborg.field(f"attach-instance {instance} --profile one-fpga --mode live --wait")
    assert host.cyborg.field(f"attachment-show {uuid}", "Mode") == "live"
    assert (host.hypervisor.count(instance), host.allocated(instance)) == (1, 2)
    assert len(host.arqs(instance)) == 2
    host.start(instance)
    wait_until("it has the device again", lambda: host.hypervisor.count(instance) == 1)
    host.cyborg.run(f"detach-instance {instance} --wait")
    assert (host.hypervisor.count(instance), host.allocated(instance)) == (0, 1)
    assert host.nova.reboots == []
    host.start(instance)
    assert host.cyborg.run(f"attachment-list --instance {instance}")[1] == "no attachments\n"
    assert host.hypervisor.count(instance) == 0


@pytest.mark.matrix
def test_guest_that_keeps_its_device_delays_the_detach(host: Host) -> None:
    instance = host.boot()
    host.start(instance)
    host.cyborg.run(f"attach-instance {instance} --profile one-fpga --mode live --wait")
    host.hypervisor.keeps = True
    host.cyborg.run(f"detach-instance {instance}")

    def shown() -> Any:
        (row,) = host.call("GET", f"attachments?instance={instance}").json()["attachments"]
        return row

    wait_until("its error is shown", lambda: "must confirm the removal" in str(shown()["error"]))
    assert (shown()["state"], shown()["step"]) == ("detaching", "unplug")
    assert (host.allocated(instance), host.hypervisor.count(instance)) == (2, 1)
    host.hypervisor.keeps = False
    gone = f"attachments?instance={instance}"
    wait_until(
        "it is detached", lambda: host.call("GET", gone).json() == {"attachments": []}, seconds=60
    )
    assert (host.allocated(instance), host.hypervisor.count(instance)) == (1, 0)


@pytest.mark.matrix
def test_server_without_a_guest_on_the_host_gets_nothing(host: Host) -> None:
    instance = host.boot()
    _, error = host.cyborg.run(
        f"attach-instance {instance} --profile one-fpga --mode live --wait", code=1
    )
    assert f"server {instance} does not run on this host" in error
    assert host.allocated(instance) == 1
