# SPDX-License-Identifier: Apache-2.0
"""A Galera cluster and a RabbitMQ cluster lose nodes during binds and releases.

Three MariaDB servers behind HAProxy and three RabbitMQ nodes with the settings of the page about
high availability, two conductors, an API with two workers, an agent, and a real Placement.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.tests.fixtures.clouds.cloud import Cloud, run_cloud
from cyborg.tests.fixtures.clusters.galera import GaleraCluster, run_galera
from cyborg.tests.fixtures.clusters.haproxy import run_haproxy
from cyborg.tests.fixtures.clusters.load import Load
from cyborg.tests.fixtures.clusters.rabbitmq import RabbitCluster, run_rabbitmq
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.custody import check_chain
from cyborg.tests.fixtures.databases.databases import engine_of
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.pages.page_cloud import DOC, read_configuration
from cyborg.tests.functional.test_chaos import audit

pytestmark = [
    pytest.mark.long,
    pytest.mark.services,
    pytest.mark.requires("galera", "rabbitmq_server"),
]

HOST = "compute-1"
CLIENTS = 4
COUNT = 10  # of binds and releases of each client, in each phase
PAGE = (DOC / "admin/high_availability.rst").read_text()


class ClusterCloud(Cloud):
    """A cloud whose conductors may have a database URL each, in ``databases``."""

    databases: Mapping[str, str] = {}

    def config(self, name: str, **default: Any) -> Path:
        """Write the configuration file of one daemon and return its path."""
        path = super().config(name, **default)
        if name in self.databases:
            text = path.read_text()
            common = str(self._common["database"]["connection"])
            assert common in text
            path.write_text(text.replace(common, self.databases[name]))
        return path


@pytest.fixture(scope="module")
def galera() -> Iterator[GaleraCluster]:
    with run_galera() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[RabbitCluster]:
    with run_rabbitmq() as cluster:
        yield cluster


def make_database(galera: GaleraCluster) -> Callable[[int], str]:
    """Create a database; return a function that returns its URL at a port."""
    name = f"cyborg_{uuid4().hex[:12]}"
    galera.execute(f"CREATE DATABASE {name}")

    def url(port: int) -> str:
        return f"mysql+pymysql://root@127.0.0.1:{port}/{name}?ssl_disabled=true"

    return url


def page_options() -> dict[str, dict[str, Any]]:
    """Return the options of the page, and those that only shorten the test."""
    found = read_configuration(PAGE)
    database = {k: v for k, v in found["database"].items() if k != "connection"}
    return {
        "database": database,
        "oslo_messaging_rabbit": {**found["oslo_messaging_rabbit"], "amqp_auto_delete": "false"},
        "conductor": {
            "hello_interval": 0.5,
            "publish_interval": 1,
            "custody_seal_interval": 1,
        },
    }


def connected_nodes(galera: GaleraCluster, database: str) -> set[str]:
    """Return the names of the nodes that have clients of the database."""
    query = f"SELECT COUNT(*) FROM information_schema.processlist WHERE db = '{database}'"
    names = set()
    for node in galera.nodes:
        with sa.create_engine(node.url, poolclass=sa.NullPool).connect() as connection:
            if connection.exec_driver_sql(query).scalar_one():
                names.add(node.name)
    return names


def check_end(cloud: Cloud, load: Load, urls: list[str]) -> Counter[str]:
    """Check that all sources agree with the servers; return the number of custody records."""
    load.delete_strays()
    wait_until("the audit finds nothing", lambda: audit(cloud) == (0, []), 60)
    with engine_of(urls[0]) as engine:
        wait_until(
            "the custody log is sealed",
            lambda: not rows.read(engine, schema.custody_records, sequence=None),
            60,
        )
    cloud.stop()
    tables = []
    for url in urls:
        with engine_of(url) as engine:
            tables.append({t.name: rows.read(engine, t) for t in schema.metadata.sorted_tables})
    assert all(found == tables[0] for found in tables), "the nodes have different rows"
    arqs = {row["id"]: row for row in tables[0]["arqs"]}
    owners = {
        row["uuid"]: arqs[row["arq_id"]]["uuid"]
        for row in tables[0]["attach_handles"]
        if row["arq_id"] is not None
    }
    assert {row["state"] for row in arqs.values()} <= {"Bound"}
    instances = {row["uuid"]: row["instance_uuid"] for row in arqs.values()}
    assert instances == {server.arq: server.uuid for server in load.servers.values()}
    assert sorted(owners.values()) == sorted(instances)
    (device,) = tables[0]["devices"]
    with engine_of(urls[0]) as engine:
        return check_chain(engine, device["uuid"], owners)


@pytest.mark.requires("haproxy")
def test_binds_and_releases_go_on_after_the_loss_of_nodes(
    galera: GaleraCluster,
    rabbitmq: RabbitCluster,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    url = make_database(galera)
    with run_haproxy(PAGE, galera) as port:
        database = url(port)
        name = str(sa.make_url(database).database)
        cloud = ClusterCloud(
            tmp_path, database, rabbitmq.url, (HOST,), 4 * CLIENTS, options=page_options()
        )
        with run_cloud(cloud):
            with Load(cloud, HOST, CLIENTS) as load:
                waits = {"without faults": load.wait(COUNT)}
                assert connected_nodes(galera, name) == {"db-1"}
                writer = galera.nodes[0]
                writer.kill()
                waits["the writer is lost"] = load.wait(COUNT)
                begin = time.monotonic()
                writer.start_again()
                wait_until("db-1 is synced", writer.is_synced, 120)
                returns = [time.monotonic() - begin]
                waits["it is back"] = load.wait(COUNT)
                assert connected_nodes(galera, name) == {"db-2"}
                leader = rabbitmq.leader(f"{cloud.topic}.conductor")
                leader.kill()
                waits["the leader of the queue is lost"] = load.wait(COUNT)
                begin = time.monotonic()
                leader.start()
                wait_until(f"{leader.name} accepts clients", leader.accepts, 120)
                returns.append(time.monotonic() - begin)
                waits["that is back"] = load.wait(COUNT)
            events = check_end(cloud, load, [url(node.port) for node in galera.nodes])
    assert events["claimed"] - events["released"] == len(load.servers)
    longest = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in waits.items())
    record_property(
        "summary",
        f"{sum(events.values())} binds and releases; the longest took, in s: {longest}; the "
        f"database node returned in {returns[0]:.0f} s, the broker node in {returns[1]:.0f} s; "
        f"answers {dict(load.statuses)}",
    )


@pytest.mark.requires("haproxy")
def test_writer_without_quorum_is_unavailable_until_a_node_returns(
    galera: GaleraCluster,
    rabbitmq: RabbitCluster,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    url = make_database(galera)
    with run_haproxy(PAGE, galera) as port:
        options = page_options()
        cloud = ClusterCloud(
            tmp_path, url(port), rabbitmq.url, (HOST,), 4 * CLIENTS, options=options
        )
        with run_cloud(cloud):
            with Load(cloud, HOST, CLIENTS) as load:
                load.wait(2)
                _, *others = galera.nodes
                for node in others:
                    node.kill()
                refused = wait_until("reads are refused", lambda: find_refusal(load), 60)
                assert "unavailable" in refused
                begin = time.monotonic()
                for node in others:
                    node.start_again()
                for node in galera.nodes:
                    wait_until(f"{node.name} is synced", node.is_synced, 120)
                returned = time.monotonic() - begin
                longest = load.wait(COUNT)
            events = check_end(cloud, load, [url(node.port) for node in galera.nodes])
    assert events["claimed"] - events["released"] == len(load.servers)
    record_property(
        "summary",
        f"two of three database nodes returned in {returned:.0f} s; the longest bind or release "
        f"after that took {longest:.1f} s; answers {dict(load.statuses)}",
    )


def find_refusal(load: Load) -> str | None:
    """Return the text of the answer 503 to a read, None for another answer."""
    answer = load.read()
    return answer.text if answer.status_code == 503 else None


def test_two_conductors_on_two_nodes_claim_each_handle_once(
    galera: GaleraCluster,
    rabbitmq: RabbitCluster,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Not the setup of the page: here certification alone protects the handles."""
    url = make_database(galera)
    urls = [url(node.port) for node in galera.nodes]
    cloud = ClusterCloud(tmp_path, urls[2], rabbitmq.url, (HOST,), 4, options=page_options())
    cloud.databases = dict(zip(cloud.conductors, urls, strict=False))
    before = count_conflicts(galera)
    with run_cloud(cloud):
        with Load(cloud, HOST, 3 * CLIENTS, allocating=False) as load:
            wait_until("there are conflicts", lambda: count_conflicts(galera) >= before + 20)
            load.wait(COUNT)
        conflicts = count_conflicts(galera) - before
        events = check_end(cloud, load, urls)
    assert events["claimed"] - events["released"] == len(load.servers)
    # A conflict is repeated and not shown to a client.
    assert load.statuses.keys() <= {200, 201, 202, 204, 404, 409}, load.statuses
    record_property(
        "summary",
        f"{sum(events.values())} binds and releases, {conflicts} conflicts of the two nodes; "
        f"answers {dict(load.statuses)}",
    )


def count_conflicts(galera: GaleraCluster) -> int:
    """Return how many transactions of the nodes were rolled back for one of another node."""
    names = ("wsrep_local_cert_failures", "wsrep_local_bf_aborts")
    return sum(int(node.status(name)) for node in galera.nodes for name in names)
