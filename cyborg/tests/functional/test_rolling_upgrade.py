# SPDX-License-Identifier: Apache-2.0
"""Daemons of two releases run side by side: no request fails while each daemon is upgraded.

The releases are wheels in environments of their own: the former release, and one with a column, an
RPC method and an option more, and a column less (``cyborg/tests/fixtures/upgrade``). Real database,
RabbitMQ and Placement.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborg.core import naming
from cyborg.rpc.contract import is_newer
from cyborg.tests.fixtures.clouds.cloud import run_cloud
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.machine import prerequisites
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample, scale
from cyborg.tests.fixtures.upgrade import compatibility
from cyborg.tests.fixtures.upgrade.boots import PROFILE, Boots
from cyborg.tests.fixtures.upgrade.cloud import AGENT, API, CONDUCTOR, KINDS, RollingCloud
from cyborg.tests.fixtures.upgrade.next_release import NOTE
from cyborg.tests.fixtures.upgrade.releases import Release, install_releases

pytestmark = [pytest.mark.services, pytest.mark.matrix]

HOST = "compute-1"
CARD = naming.provider_uuid(HOST, "0000:0c:00.0")
# One of each below the tier extended: each agent costs seconds, and so do busy clients.
HOSTS = (HOST, "compute-2")[: scale(8)]
CLIENTS = min(3, scale(8))
BODY: Any = [{"name": PROFILE, "groups": [{"resources:FPGA": "1"}]}]
# The order of the documentation first; the databases in turn.
DOCUMENTED = (CONDUCTOR, API, AGENT)
ORDERS = sorted(itertools.permutations(KINDS), key=lambda order: order != DOCUMENTED)
CASES = list(zip(ORDERS, itertools.cycle(("mysql", "postgresql")), strict=False))

Start = Callable[..., RollingCloud]


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Release, Release]]:
    for name in ("clone", "pip"):
        prerequisites.require(name)
    both = install_releases(tmp_path_factory.mktemp("releases"))
    yield both
    for release in both:
        release.server.stop()


@pytest.fixture
def start(tmp_path: Path, rabbit_url: str, releases: tuple[Release, Release]) -> Iterator[Start]:
    """Yield a function that runs a cloud of the former release on a kind of database."""
    with contextlib.ExitStack() as stack:

        def start_cloud(kind: str, hosts: tuple[str, ...], pin: str | None) -> RollingCloud:
            database = stack.enter_context(fresh_database(kind, tmp_path))
            cloud = RollingCloud(tmp_path, database, rabbit_url, releases, hosts, pin)
            stack.enter_context(run_cloud(cloud))
            inventories = f"/resource_providers/{CARD}/inventories"
            wait_until("the card is published", lambda: cloud.placement.get(inventories).ok)
            answer = cloud.create_profile(BODY)
            assert answer.status_code == 201, answer.text
            return cloud

        yield start_cloud


@pytest.mark.parametrize(("order", "kind"), sample(CASES, CASES[0], mark=pytest.mark.long))
def test_no_request_fails_while_each_daemon_is_upgraded(
    order: tuple[str, ...],
    kind: str,
    start: Start,
    releases: tuple[Release, Release],
    record_property: Callable[[str, object], None],
) -> None:
    former = releases[0].describe()["contracts"][CONDUCTOR]["version"]
    cloud = start(kind, HOSTS, pin=former)
    boots = Boots(cloud.balancer.choose, HOST, CARD, CLIENTS)
    try:
        boots.wait()
        code, output = cloud.run_dbsync("upgrade")
        assert code == 0, output
        assert "1 contract migration(s) remain" in output
        # Now the former release has the schema of the next one.
        boots.wait()
        for name in order:
            first, *others = cloud.names[name]
            cloud.upgrade(name, first)
            boots.wait()
            cloud.discover()
            for other in others:
                cloud.upgrade(name, other)
                boots.wait()
            if name == order[0]:
                # A former conductor or API still reads what the migration removes.
                code, output = cloud.run_dbsync("contract")
                assert code == 1, output
                assert "removes what daemons of an older release use" in output
        cloud.discover()
        assert set(cloud.notes().values()) == {None}
        cloud.unpin()
        wait_until("all use the new method", lambda: set(cloud.notes().values()) == {NOTE})
        code, output = cloud.run_dbsync("contract")
        assert code == 0, output
        boots.wait()
        cloud.discover()
    finally:
        boots.stop()
    record_property("cycles", boots.cycles)
    record_property("requests", boots.requests)
    record_property("longest request in seconds", round(boots.longest, 2))
    assert boots.errors == []
    assert cloud.find_problems() == []


@pytest.mark.long
def test_no_request_fails_while_daemons_return_to_the_former_release(
    start: Start, releases: tuple[Release, Release]
) -> None:
    """The database keeps the schema of the next release before its contract migration."""
    former = releases[0].describe()["contracts"][CONDUCTOR]["version"]
    cloud = start("mysql", HOSTS, pin=former)
    boots = Boots(cloud.balancer.choose, HOST, CARD, CLIENTS)
    try:
        assert cloud.run_dbsync("upgrade")[0] == 0
        for move, kinds in ((cloud.upgrade, DOCUMENTED), (cloud.downgrade, DOCUMENTED[::-1])):
            for kind in kinds:
                for name in cloud.names[kind]:
                    move(kind, name)
                    boots.wait()
            cloud.discover()
    finally:
        boots.stop()
    assert boots.errors == []
    assert cloud.find_problems() == []


@pytest.mark.long
def test_daemon_without_a_pin_calls_the_new_method_of_a_former_conductor(start: Start) -> None:
    """Without the pin the proof above would fail."""
    cloud = start("mysql", (HOST,), pin=None)
    assert cloud.run_dbsync("upgrade")[0] == 0
    cloud.upgrade(API, cloud.names[API][0])
    cloud.balancer.drain(cloud.endpoint_of(cloud.names[API][1]))
    with cloud.balancer.choose() as endpoint:
        url = f"{endpoint}/v2/accelerator_requests"
        answer = requests.post(url, json={"device_profile_name": PROFILE}, timeout=60)
    assert answer.status_code == 503, answer.text
    assert any("service_note" in line for line in cloud.find_problems())


def test_contracts_of_both_releases_are_compatible(releases: tuple[Release, Release]) -> None:
    former, following = (release.describe()["contracts"] for release in releases)
    assert compatibility.find_rpc_breaks(former, following) == []
    assert is_newer(following[CONDUCTOR]["version"], former[CONDUCTOR]["version"])
    assert compatibility.find_rpc_breaks(following, former) != []


@pytest.mark.parametrize("kind", sample(["mysql", "postgresql"], "mysql", mark=pytest.mark.long))
def test_only_the_contract_migration_removes_what_the_former_release_uses(
    kind: str, releases: tuple[Release, Release], tmp_path: Path
) -> None:
    with fresh_database(kind, tmp_path) as database, engine_of(database) as engine:
        config = tmp_path / "cyborg.conf"
        config.write_text(f"[database]\nconnection = {database}\n")
        tables = []
        former, following = releases
        for release, verb in ((former, "upgrade"), (following, "upgrade"), (following, "contract")):
            done = release.run("cyborg-dbsync", "--config-file", config, verb)
            assert done.returncode == 0, done.stderr
            tables.append(compatibility.reflect(engine))
    first, expanded, contracted = tables
    assert compatibility.find_schema_breaks(first, expanded) == []
    breaks = ["column services.endpoint is removed"]
    assert compatibility.find_schema_breaks(expanded, contracted) == breaks
