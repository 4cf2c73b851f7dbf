# SPDX-License-Identifier: Apache-2.0
"""Servers in build with a real Nova, while their card is cordoned or the conductor is killed.

Nova allocates the units of all servers of one request, and then binds their ARQs one after another.
So most of these binds come after the allocation and the cordon.
"""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from cyborg.cli import app
from cyborg.tests.fixtures.clouds.keystone_cloud import HANDLES
from cyborg.tests.fixtures.clouds.nova_cloud import NovaCloud, nova_cloud
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.nova.servers import PATIENCE, Servers

__all__ = ["nova_cloud"]

pytestmark = [
    pytest.mark.services,
    pytest.mark.requires("nova"),
    pytest.mark.long,
    pytest.mark.timeout(1800),
]

# The action begins when Nova has bound this number of ARQs, and ends before the last bind.
BEFORE = 2

Run = Callable[..., str]


@pytest.fixture
def servers(nova_cloud: NovaCloud) -> Iterator[Servers]:
    """Yield the servers of a project; delete those that a failed test leaves."""
    created = Servers(nova_cloud)
    yield created
    created.delete_all()


@pytest.fixture
def cyborg(
    nova_cloud: NovaCloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Return a function that runs ``cyborg`` as administrator and returns its output."""

    def run(*words: str) -> str:
        for key, value in nova_cloud.keystone.environment("admin").items():
            monkeypatch.setenv(key, value)
        code = app.main(list(words))
        output = capsys.readouterr()
        assert code == 0, output.err
        return output.out

    return run


def binds(cloud: NovaCloud) -> int:
    """Return the number of bind requests that the API has answered, all with 202."""
    found = [a.status for a in cloud.answers() if a.method == "PATCH"]
    assert set(found) <= {202}, found
    return len(found)


def device(cloud: NovaCloud) -> dict[str, Any]:
    """Return the card."""
    (found,) = cloud.call("admin", "GET", "/v2/devices").json()["devices"]
    return dict(found)


def reserved(cloud: NovaCloud) -> int:
    """Return the number of reserved units of the card in Placement."""
    path = f"/resource_providers/{cloud.provider}/inventories"
    return int(cloud.placement.get(path).json()["inventories"]["FPGA"]["reserved"])


def disable(cyborg: Run, card: str) -> Callable[[], object]:
    cyborg("device-disable", card)
    return partial(cyborg, "device-enable", card)


def maintain(cyborg: Run, card: str) -> Callable[[], object]:
    cyborg("device-maintain", card, "--until", "+1h")
    return partial(cyborg, "device-maintain", card, "--end")


def update_driver(cyborg: Run, _card: str) -> Callable[[], object]:
    job = json.loads(cyborg("update-driver", "fake", "--config", "setup=ok", "-f", "json"))
    return partial(finish, cyborg, job["UUID"])


def change_layout(cyborg: Run, card: str) -> Callable[[], object]:
    words = ("device-layout-set", "8", card, "--drain", "-f", "json")
    (job,) = json.loads(cyborg(*words))
    return partial(cyborg, "job-cancel", job["Job"])


def finish(cyborg: Run, job: str) -> None:
    """Wait until a rollout is complete."""

    def state() -> str:
        return str(json.loads(cyborg("job-show", job, "-f", "json"))["State"])

    wait_until("the driver is updated", lambda: state() != "pending", PATIENCE)
    assert state() == "done", cyborg("job-show", job)


@pytest.mark.parametrize("attempt", range(3), ids="attempt-{}".format)
@pytest.mark.parametrize("act", [disable, maintain, update_driver, change_layout])
def test_servers_in_build_get_their_devices_after_a_cordon(
    servers: Servers, cyborg: Run, act: Callable[[Run, str], Callable[[], object]], attempt: int
) -> None:
    """Nova builds no server again after a refused bind: one refusal would be seen."""
    cloud = servers.cloud
    card, before = device(cloud)["uuid"], binds(cloud)
    built = servers.request_many(servers.make_flavor(servers.make_profile()), HANDLES)
    wait_until("Nova binds", lambda: binds(cloud) >= before + BEFORE, PATIENCE)
    undo = act(cyborg, card)
    bound = binds(cloud) - before
    assert bound < HANDLES, "all servers were bound before the cordon"
    for server in built:
        servers.wait_for_status(server, "ACTIVE")
    undo()
    for server in built:
        servers.request_delete(server)
    for server in built:
        servers.wait_until_free(server)
    wait_until("the card is offered", lambda: reserved(cloud) == 0, PATIENCE)


@pytest.mark.parametrize("attempt", range(3), ids="attempt-{}".format)
@pytest.mark.parametrize("seconds", [4, 10])
def test_servers_in_build_survive_a_killed_conductor(
    servers: Servers, seconds: int, attempt: int
) -> None:
    """One conductor, killed while it binds, and started again.

    After 10 seconds the deadlines of the agent's heartbeats have passed. Nova may bind before the
    next heartbeat arrives.
    """
    cloud, count = servers.cloud, 12
    cloud.daemons["conductor-2"].stop()
    before = binds(cloud)
    built = servers.request_many(servers.make_flavor(servers.make_profile()), count)
    wait_until("Nova binds", lambda: binds(cloud) >= before + BEFORE, PATIENCE)
    cloud.daemons["conductor-1"].kill()
    bound = binds(cloud) - before
    time.sleep(seconds)
    cloud.conductor("conductor-1")
    assert bound < count, "all servers were bound before the kill"
    for server in built:
        servers.wait_for_status(server, "ACTIVE")
    cloud.conductor("conductor-2")
    for server in built:
        servers.request_delete(server)
    for server in built:
        servers.wait_until_free(server)
