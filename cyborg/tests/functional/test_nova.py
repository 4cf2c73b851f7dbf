# SPDX-License-Identifier: Apache-2.0
"""Device contexts and attachments with a real Nova: keystone, Glance, Placement, Nova's daemons.

Only the hypervisor and Neutron are doubles. A file of the hypervisor shows which accelerators Nova
gave to a guest when it was started.
"""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from cyborg.cli import app
from cyborg.clients.nova import Nova
from cyborg.tests.fixtures.clouds.keystone_cloud import HOST
from cyborg.tests.fixtures.clouds.nova_cloud import MICROVERSION, NovaCloud, nova_cloud
from cyborg.tests.fixtures.machine import tutorial
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.fixtures.nova.servers import MEMBER, PATIENCE, Devices, Servers

__all__ = ["nova_cloud"]

pytestmark = [
    pytest.mark.services,
    pytest.mark.requires("nova"),
    pytest.mark.matrix,
    # Four databases, and ten daemons, on a machine that may be busy with other tests.
    pytest.mark.timeout(1200),
]

Run = Callable[..., str]


@pytest.fixture
def servers(nova_cloud: NovaCloud) -> Iterator[Servers]:
    """Yield the servers of a project; delete those that a failed test leaves."""
    created = Servers(nova_cloud)
    yield created
    nova_cloud.gate.touch()
    nova_cloud.nova.guests.release_reboots()
    created.delete_all()


@pytest.fixture
def cyborg(
    nova_cloud: NovaCloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Return a function that runs ``cyborg`` as a user and returns its output."""

    def run(user: str, *words: str) -> str:
        for key, value in nova_cloud.keystone.environment(user).items():
            monkeypatch.setenv(key, value)
        code = app.main(list(words))
        output = capsys.readouterr()
        assert code == 0, output.err
        return output.out

    return run


def reads_of(cloud: NovaCloud, server: str) -> int:
    """Return how often Nova has read the ARQs of a server, besides these tests."""
    address = f"/v2/accelerator_requests?instance={server}"
    return sum(a.method == "GET" and a.address == address for a in cloud.answers())


def events_for(cloud: NovaCloud, arq: str) -> int:
    """Return how many events for an ARQ nova-api has passed to nova-compute."""
    log = cloud.daemons["nova-api"].log.read_text()
    return log.count(f"Creating event accelerator-request-bound:{arq} for instance")


def boot_with_profile(servers: Servers) -> tuple[str, str]:
    """Build a server with one accelerator; return it and the device profile of its flavor."""
    profile = servers.make_profile()
    return servers.boot(servers.make_flavor(profile)), profile


def test_server_with_a_device_profile_is_built_and_deleted(servers: Servers) -> None:
    began = datetime.now(UTC).replace(tzinfo=None) - timedelta(seconds=1)
    nova = Nova(servers.cloud.compute("admin"), PATIENCE)
    server, _ = boot_with_profile(servers)
    assert servers.has_devices(server, 1), servers.devices(server)
    assert server not in nova.deleted_servers(began)
    servers.delete(server)
    assert server in nova.deleted_servers(began)


def test_server_waits_for_the_event_of_its_context(servers: Servers, cyborg: Run) -> None:
    """Create a context, boot a server with it, and delete both."""
    cloud = servers.cloud
    context = cyborg(MEMBER, "device-context-create", "--resources=FPGA:2").strip()
    assert str(UUID(context)) == context
    flavor = servers.make_flavor(f"ctx-{context}")
    cloud.gate.unlink()
    server = servers.request(flavor)

    def show() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            cyborg(MEMBER, "device-context-show", context, "-f", "json")
        )
        return found

    wait_until("Nova reads the ARQs", lambda: reads_of(cloud, server), PATIENCE)
    assert show()["State"] == "binding"
    assert servers.show(server)["status"] == "BUILD"
    assert cloud.nova.guests.find(server) is None
    cloud.gate.touch()
    servers.wait_for_status(server, "ACTIVE")
    assert servers.has_devices(server, 2), servers.devices(server)
    for arq in servers.devices(server).listed:
        assert events_for(cloud, arq) >= 1
    shown = show()
    assert (shown["State"], shown["Instance"], shown["Host"]) == ("bound", server, HOST)
    servers.delete(server)
    wait_until("the context is unbound", lambda: show()["State"] == "unbound", PATIENCE)
    cyborg(MEMBER, "device-context-delete", context)


def test_reserved_context_boots_a_server(servers: Servers, cyborg: Run) -> None:
    """Create, candidates, pre-bind; boot the server, whose bind by Nova takes the lease; delete."""
    cloud = servers.cloud
    context = cyborg(MEMBER, "device-context-create", "--resources=FPGA:1").strip()
    path = f"/v2/device_contexts/{context}"
    found = cloud.call("admin", "GET", f"{path}/allocation_candidates").json()
    (candidate,) = found["allocation_candidates"]
    assert candidate == {"hostname": HOST, "mappings": {"0": [cloud.provider]}}
    words = ("--host", HOST, "--mapping", f"0={cloud.provider}", "--lease-seconds", "600")
    token = ("--service-token", cloud.token("nova"))
    cyborg("admin", "device-context-pre-bind", context, *words, *token)

    def state() -> str:
        return str(cloud.call(MEMBER, "GET", path).json()["state"])

    wait_until("the context is reserved", lambda: state() == "reserved", PATIENCE)
    server = servers.boot(servers.make_flavor(f"ctx-{context}"))
    assert state() == "bound"
    assert servers.has_devices(server, 1), servers.devices(server)
    # Bound in the answer to Nova's bind: nova-compute has waited for no event.
    assert [events_for(cloud, arq) for arq in servers.devices(server).listed] == [0]
    servers.delete(server)
    wait_until("the context is unbound", lambda: state() == "unbound", PATIENCE)
    cyborg(MEMBER, "device-context-delete", context)


def test_attach_with_reboot_and_detach(servers: Servers, cyborg: Run) -> None:
    cloud = servers.cloud
    server, profile = boot_with_profile(servers)
    before, reads = servers.devices(server), reads_of(cloud, server)
    cyborg("admin", "attach-instance", server, "--profile", profile, "--reboot", "--wait")
    (row,) = json.loads(cyborg("admin", "attachment-list", "--instance", server, "-f", "json"))
    assert row["State"] == "attached"
    wait_until("the guest has both", lambda: servers.has_devices(server, 2), PATIENCE)
    servers.wait_for_status(server, "ACTIVE")
    after = servers.devices(server)
    assert set(before.listed) < set(after.listed)
    assert servers.reboot_results(server) == [["Success"]]
    assert reads_of(cloud, server) > reads
    cyborg("admin", "detach-instance", server, "--reboot", "--wait")
    assert servers.has_devices(server, 1), servers.devices(server)
    assert servers.devices(server) == before
    assert servers.reboot_results(server) == [["Success"], ["Success"]]
    guest = cloud.nova.guests.find(server)
    assert guest is not None
    assert guest["starts"] == 3
    servers.delete(server)


def test_attach_without_reboot_takes_effect_at_the_next_start(
    servers: Servers, cyborg: Run
) -> None:
    server, profile = boot_with_profile(servers)
    (first,) = servers.devices(server).listed
    cyborg("admin", "attach-instance", server, "--profile", profile, "--wait")
    found = servers.devices(server)
    assert (len(found.listed), found.allocated, found.composed) == (2, 2, [first])
    servers.act(server, "os-stop")
    servers.wait_for_status(server, "SHUTOFF")
    servers.act(server, "os-start")
    servers.wait_for_status(server, "ACTIVE")
    assert servers.has_devices(server, 2), servers.devices(server)
    servers.act(server, "os-stop")
    servers.wait_for_status(server, "SHUTOFF")
    cyborg("admin", "detach-instance", server, "--wait")
    assert servers.devices(server) == Devices([first], [], 1, 1)
    servers.act(server, "os-start")
    servers.wait_for_status(server, "ACTIVE")
    assert servers.has_devices(server, 1), servers.devices(server)
    servers.delete(server)


def test_server_with_attachments_is_deleted(servers: Servers, cyborg: Run) -> None:
    server, profile = boot_with_profile(servers)
    cyborg("admin", "attach-instance", server, "--profile", profile, "--reboot", "--wait")
    servers.wait_for_status(server, "ACTIVE")
    servers.delete(server)
    listed = f"/v2/attachments?instance={server}"
    wait_until(
        "the attachment is deleted",
        lambda: not servers.cloud.call("admin", "GET", listed).json()["attachments"],
        PATIENCE,
    )


DAEMONS = ("nova-api", "nova-compute", "conductors")
# Nova's power state of a guest that was shut down.
STOPPED = 4


def kill(cloud: NovaCloud, daemon: str) -> None:
    """Kill a daemon of Nova, or all conductors."""
    for name in cloud.conductors if daemon == "conductors" else (daemon,):
        cloud.daemons[name].kill()


def restart(cloud: NovaCloud, daemon: str) -> None:
    """Start it again."""
    if daemon != "conductors":
        cloud.start_nova(daemon)
        return
    for name in cloud.conductors:
        cloud.conductor(name)


def attachment(cloud: NovaCloud, server: str) -> dict[str, Any] | None:
    """Return the only attachment of a server, None if there is none."""
    answer = cloud.call("admin", "GET", f"/v2/attachments?instance={server}")
    found: list[dict[str, Any]] = answer.json()["attachments"]
    assert len(found) <= 1
    return found[0] if found else None


def is_attached(servers: Servers, server: str) -> bool:
    """Return whether the attach of a second device is complete."""
    servers.cloud.restart_ended_nova()
    row = attachment(servers.cloud, server)
    assert row is not None
    assert row["state"] in ("attaching", "attached"), row
    return row["state"] == "attached" and servers.owns_devices(server, 2)


def is_detached(servers: Servers, server: str) -> bool:
    """Return whether the detach of the second device is complete."""
    servers.cloud.restart_ended_nova()
    return attachment(servers.cloud, server) is None and servers.owns_devices(server, 1)


def boot_and_hold_attach(servers: Servers, cyborg: Run) -> str:
    """Build a server and attach a second accelerator, which the host does not prepare yet."""
    cloud = servers.cloud
    server, profile = boot_with_profile(servers)
    cloud.gate.unlink()
    cyborg("admin", "attach-instance", server, "--profile", profile, "--reboot")
    wait_until(
        "the host prepares the device",
        lambda: (attachment(cloud, server) or {})["step"] == "prepare",
        PATIENCE,
    )
    return server


@pytest.mark.parametrize("daemon", sample(DAEMONS, "nova-api", mark=pytest.mark.long))
def test_daemon_killed_before_the_reboot_of_an_attach(
    servers: Servers, cyborg: Run, daemon: str
) -> None:
    cloud = servers.cloud
    server = boot_and_hold_attach(servers, cyborg)
    kill(cloud, daemon)
    cloud.gate.touch()
    if daemon == "nova-api":
        wait_until(
            "Nova does not answer",
            lambda: "Nova" in ((attachment(cloud, server) or {})["error"] or ""),
            PATIENCE,
        )
    restart(cloud, daemon)
    wait_until("it is attached", lambda: is_attached(servers, server), PATIENCE)
    servers.ensure_running(server)
    assert servers.has_devices(server, 2), servers.devices(server)
    servers.delete(server)


@pytest.mark.parametrize(
    "daemon", sample([*DAEMONS, "nova-scheduler"], "conductors", mark=pytest.mark.long)
)
def test_daemon_killed_in_the_reboot_of_a_detach(
    servers: Servers, cyborg: Run, daemon: str
) -> None:
    cloud = servers.cloud
    server, profile = boot_with_profile(servers)
    cyborg("admin", "attach-instance", server, "--profile", profile, "--reboot", "--wait")
    wait_until("the guest has both", lambda: is_attached(servers, server), PATIENCE)
    servers.wait_for_status(server, "ACTIVE")
    hold_reboot(servers, server, lambda: cyborg("admin", "detach-instance", server, "--reboot"))
    kill(cloud, daemon)
    cloud.nova.guests.release_reboots()
    restart(cloud, daemon)
    wait_until("it is detached", lambda: is_detached(servers, server), PATIENCE)
    servers.ensure_running(server)
    assert servers.has_devices(server, 1), servers.devices(server)
    servers.delete(server)


@pytest.mark.long
@pytest.mark.parametrize("daemon", [*DAEMONS, "nova-conductor"])
def test_daemon_killed_in_the_reboot_of_an_attach(
    servers: Servers, cyborg: Run, daemon: str
) -> None:
    cloud = servers.cloud
    server, profile = boot_with_profile(servers)
    attach = ("attach-instance", server, "--profile", profile, "--reboot")
    hold_reboot(servers, server, lambda: cyborg("admin", *attach))
    kill(cloud, daemon)
    cloud.nova.guests.release_reboots()
    restart(cloud, daemon)
    wait_until("it is attached", lambda: is_attached(servers, server), PATIENCE)
    servers.ensure_running(server)
    assert servers.has_devices(server, 2), servers.devices(server)
    servers.delete(server)


def test_daemons_killed_while_a_server_with_a_context_is_built(
    servers: Servers, cyborg: Run
) -> None:
    cloud, daemons = servers.cloud, ("nova-conductor", "nova-scheduler")
    context = cyborg(MEMBER, "device-context-create", "--resources=FPGA:1").strip()
    flavor = servers.make_flavor(f"ctx-{context}")
    cloud.gate.unlink()
    server = servers.request(flavor)
    wait_until("Nova reads the ARQs", lambda: reads_of(cloud, server), PATIENCE)
    for daemon in daemons:
        kill(cloud, daemon)
    cloud.gate.touch()
    for daemon in daemons:
        restart(cloud, daemon)
    servers.wait_for_status(server, "ACTIVE")
    assert servers.has_devices(server, 1), servers.devices(server)
    servers.delete(server)
    state = f"/v2/device_contexts/{context}"
    wait_until(
        "the context is unbound",
        lambda: cloud.call(MEMBER, "GET", state).json()["state"] == "unbound",
        PATIENCE,
    )
    cyborg(MEMBER, "device-context-delete", context)


def hold_reboot(servers: Servers, server: str, request: Callable[[], Any]) -> None:
    """Request work with a reboot, and wait until the old guest has ended; the new one waits."""
    guests = servers.cloud.nova.guests
    guests.hold_reboots()
    request()
    wait_until(
        "the guest has ended",
        lambda: (guests.find(server) or {})["power"] == STOPPED,
        PATIENCE,
    )


def test_server_deleted_in_an_attach_leaves_nothing(servers: Servers, cyborg: Run) -> None:
    cloud = servers.cloud
    server = boot_and_hold_attach(servers, cyborg)
    servers.request_delete(server)
    cloud.gate.touch()
    servers.wait_until_free(server)
    wait_until(
        "the attach is undone",
        lambda: (attachment(cloud, server) or {"state": "error"})["state"] == "error",
        PATIENCE,
    )


@pytest.mark.long
def test_tutorial_matches_output(nova_cloud: NovaCloud, servers: Servers) -> None:
    for name in ("nova", "admin", "accelerator_admin", MEMBER):
        variables = nova_cloud.keystone.environment(name)
        # Older versions of Nova's API cannot create a server without a network.
        variables["OS_COMPUTE_API_VERSION"] = MICROVERSION
        tutorial.write_openrc(nova_cloud.folder, name, variables)
    tutorial.execute(nova_cloud.folder, tutorial.NOVA)
