# SPDX-License-Identifier: Apache-2.0
"""A killed agent cordons its host until it returns. An outage of other daemons cordons nothing.

Real processes, MariaDB, Placement, and a RabbitMQ behind a relay that can be cut.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
import sqlalchemy as sa

from cyborg.core import naming
from cyborg.db import schema
from cyborg.tests.fixtures.bus.tcp_relay import Relay, relay
from cyborg.tests.fixtures.clouds.cloud import Cloud, make_and_run_cloud
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.machine.processes import wait_until

ONE, OTHER = "compute-1", "compute-2"
HANDLES = 4
LIMIT = 5.0  # seconds after which an agent is down
GRACE = 12.0
LONG = 120.0

pytestmark = pytest.mark.services


class Env:
    """A cloud with two hosts, its database and the relay to its broker."""

    def __init__(self, running: Cloud, engine: sa.Engine, wire: Relay) -> None:
        self.cloud, self.engine, self.wire = running, engine, wire

    def reserved(self, host: str) -> int | None:
        """Return the reserved amount of the host's card in Placement."""
        uuid = naming.provider_uuid(host, "0000:0c:00.0")
        answer = self.cloud.placement.get(f"/resource_providers/{uuid}/inventories")
        inventories = answer.json().get("inventories", {})
        return inventories["FPGA"]["reserved"] if "FPGA" in inventories else None

    def services(self) -> dict[str, dict[str, Any]]:
        """Return the agents of the API by host."""
        url = f"{self.cloud.endpoint}/v2/services?binary=cyborg-agent&kind=daemon"
        headers = {"OpenStack-API-Version": "accelerator latest"}
        answer = requests.get(url, headers=headers, timeout=60).json()
        return {service["host"]: service for service in answer["services"]}

    def closings(self) -> int:
        """Return how often conductors have marked agents down."""
        logs = [self.cloud.daemons[name].log.read_text() for name in self.cloud.conductors]
        return sum(log.count("agents marked down") for log in logs)

    def open(self) -> bool:
        """Return whether both hosts are schedulable."""
        return [self.reserved(host) for host in (ONE, OTHER)] == [0, 0]

    def watch(self, seconds: float) -> None:
        """Check for ``seconds`` that no host is cordoned."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.open()
            time.sleep(0.2)


@pytest.fixture
def env(rabbit_url: str, tmp_path: Path) -> Iterator[Env]:
    broker = urlsplit(rabbit_url)
    options = {
        "conductor": {"hello_interval": 1, "down_heartbeats": 4, "broker_reconnect_grace": GRACE},
        "rpc": {"timeout": 2},
    }
    with (
        relay(broker.port or 5672) as wire,
        fresh_database("mysql", tmp_path) as database,
        engine_of(database) as engine,
    ):
        wire.restore()
        login = broker.netloc.rpartition("@")[0]
        url = broker._replace(netloc=f"{login}@127.0.0.1:{wire.port}").geturl()
        with make_and_run_cloud(
            tmp_path, database, url, (ONE, OTHER), HANDLES, options=options
        ) as running:
            environment = Env(running, engine, wire)
            wait_until("both cards are open", environment.open)
            yield environment


def test_host_is_cordoned_only_when_its_agent_stops(env: Env) -> None:
    env.cloud.daemons[f"agent-{ONE}"].kill()
    began = time.monotonic()
    wait_until("the host is closed", lambda: env.reserved(ONE) == HANDLES, LONG)
    assert time.monotonic() - began >= LIMIT - 1
    assert env.reserved(OTHER) == 0
    services = env.services()
    assert services[ONE]["state"] == "down"
    assert services[ONE]["down_since"] is not None
    assert services[OTHER]["down_since"] is None
    assert env.closings() == 1

    env.cloud.agent(ONE)
    wait_until("the host is open", env.open)
    assert env.services()[ONE]["down_since"] is None

    # Stop all conductors, for longer than the limit for agents.
    pids = [env.cloud.daemons[name].pid for name in env.cloud.conductors]
    for pid in pids:
        os.killpg(pid, signal.SIGSTOP)
    time.sleep(2 * LIMIT)
    for pid in pids:
        os.killpg(pid, signal.SIGCONT)
    env.watch(2 * LIMIT)

    # Cut the broker.
    env.wire.cut()
    env.watch(2 * LIMIT)
    env.wire.restore()
    env.watch(LIMIT + GRACE)
    wait_until("the agents speak", lambda: all(s["state"] == "up" for s in env.services().values()))
    env.watch(LIMIT)
    agents = rows.read(env.engine, schema.services, binary="cyborg-agent")
    assert [row["down_since"] for row in agents] == [None, None]
    assert env.closings() == 1
