# SPDX-License-Identifier: Apache-2.0
"""An agent dies and returns: its host closes and opens. All others may go without closing anything.

Real processes, MariaDB, Placement, and a RabbitMQ at the end of a wire that can be cut.
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

from cyborg.core import names
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.cloud import Cloud, cloud
from cyborg.fixtures.databases import engine_of, fresh_database
from cyborg.fixtures.processes import until
from cyborg.fixtures.relay import Relay, relay

ONE, OTHER = "compute-1", "compute-2"
HANDLES = 4
LIMIT = 5.0  # seconds after which an agent is down
GRACE = 12.0
LONG = 120.0

pytestmark = pytest.mark.services


class Bed:
    """A cloud of two hosts, its database and the wire to its broker."""

    def __init__(self, running: Cloud, engine: sa.Engine, wire: Relay) -> None:
        self.cloud, self.engine, self.wire = running, engine, wire

    def reserved(self, host: str) -> int | None:
        """Return how much of the host's card Placement withholds."""
        uuid = names.provider_uuid(host, "0000:0c:00.0")
        answer = self.cloud.placement.get(f"/resource_providers/{uuid}/inventories")
        inventories = answer.json().get("inventories", {})
        return inventories["FPGA"]["reserved"] if "FPGA" in inventories else None

    def services(self) -> dict[str, dict[str, Any]]:
        """Return the agents as the API shows them, by host."""
        url = f"{self.cloud.endpoint}/v2/services?binary=cyborg-agent&kind=daemon"
        headers = {"OpenStack-API-Version": "accelerator latest"}
        answer = requests.get(url, headers=headers, timeout=30).json()
        return {service["host"]: service for service in answer["services"]}

    def closings(self) -> int:
        """Return how many agents conductors have held for down so far."""
        logs = [self.cloud.daemons[name].log.read_text() for name in self.cloud.conductors]
        return sum(log.count("agents are down") for log in logs)

    def open(self) -> bool:
        """Tell whether both hosts are open."""
        return [self.reserved(host) for host in (ONE, OTHER)] == [0, 0]

    def watch(self, seconds: float) -> None:
        """See to it that nothing closes for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.open()
            time.sleep(0.2)


@pytest.fixture
def bed(rabbit_url: str, tmp_path: Path) -> Iterator[Bed]:
    broker = urlsplit(rabbit_url)
    options = {
        "conductor": {"hello_interval": 1, "down_after": 4, "reconnect_grace": GRACE},
        "rpc": {"timeout": 2},
    }
    with (
        relay(broker.port or 5672) as wire,
        fresh_database("mysql", tmp_path) as database,
        engine_of(database) as engine,
    ):
        wire.mend()
        login = broker.netloc.rpartition("@")[0]
        url = broker._replace(netloc=f"{login}@127.0.0.1:{wire.port}").geturl()
        with cloud(tmp_path, database, url, (ONE, OTHER), HANDLES, options=options) as running:
            made = Bed(running, engine, wire)
            until("both cards are open", made.open)
            yield made


def test_only_an_agents_own_silence_closes_its_host(bed: Bed) -> None:
    bed.cloud.daemons[f"agent-{ONE}"].kill()
    began = time.monotonic()
    until("the host is closed", lambda: bed.reserved(ONE) == HANDLES, LONG)
    assert time.monotonic() - began >= LIMIT - 1
    assert bed.reserved(OTHER) == 0
    shown = bed.services()
    assert shown[ONE]["state"] == "down"
    assert shown[ONE]["down_since"] is not None
    assert shown[OTHER]["down_since"] is None
    assert bed.closings() == 1

    bed.cloud.agent(ONE)
    until("the host is open", bed.open)
    assert bed.services()[ONE]["down_since"] is None

    # All conductors stand still, for longer than an agent may.
    pids = [bed.cloud.daemons[name].pid for name in bed.cloud.conductors]
    for pid in pids:
        os.killpg(pid, signal.SIGSTOP)
    time.sleep(2 * LIMIT)
    for pid in pids:
        os.killpg(pid, signal.SIGCONT)
    bed.watch(2 * LIMIT)

    # The broker is away.
    bed.wire.cut()
    bed.watch(2 * LIMIT)
    bed.wire.mend()
    bed.watch(LIMIT + GRACE)
    until("the agents speak", lambda: all(s["state"] == "up" for s in bed.services().values()))
    bed.watch(LIMIT)
    agents = rows.read(bed.engine, schema.services, binary="cyborg-agent")
    assert [row["down_since"] for row in agents] == [None, None]
    assert bed.closings() == 1
