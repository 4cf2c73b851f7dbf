# SPDX-License-Identifier: Apache-2.0
"""Minutes of trouble of every kind; at rest, all four sides agree.

Real MariaDB, RabbitMQ and Placement, real processes. ``CYBORG_TEST_CHAOS_SECONDS`` and
``CYBORG_TEST_CHAOS_SEED`` make another run of it.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa

from cyborg.clients.placement import Placement
from cyborg.conductor import rendering
from cyborg.db import schema
from cyborg.db.store import deployables
from cyborg.fixtures import rows
from cyborg.fixtures.chaos import CARDS, HANDLES, PROFILE, Chaos
from cyborg.fixtures.cloud import Cloud, cloud
from cyborg.fixtures.databases import engine_of, fresh_database
from cyborg.fixtures.processes import BIN, until
from cyborg.fixtures.relay import relay

HOSTS = ("compute-1", "compute-2", "compute-3")
SECONDS = float(os.environ.get("CYBORG_TEST_CHAOS_SECONDS", "180"))
SEED = int(os.environ.get("CYBORG_TEST_CHAOS_SEED", "0")) or random.randrange(1, 2**31)

ALL = len(HOSTS) * len(CARDS)

pytestmark = pytest.mark.services


@pytest.fixture
def bed(rabbit_url: str, tmp_path: Path) -> Iterator[tuple[Cloud, Chaos, sa.Engine]]:
    """Run a cloud whose broker can be cut off, with a profile."""
    broker = urlsplit(rabbit_url)
    options: dict[str, dict[str, Any]] = {
        "agent": {"discovery_interval": 1, "health_interval": 0.5, "health_quiet": 2},
        "conductor": {
            "down_after": 6,
            "reconnect_grace": 4,
            "lease": 5,
            "audit_interval": 10,
            "publish_interval": 1,
        },
        "fake": {
            "num_devices": len(CARDS),
            "num_handles": HANDLES,
            "sick": f"{tmp_path}/${{host}}.sick",
            "absent": f"{tmp_path}/${{host}}.absent",
        },
    }
    with (
        relay(broker.port or 5672) as wire,
        fresh_database("mysql", tmp_path) as database,
        engine_of(database) as engine,
    ):
        wire.mend()
        login = broker.netloc.rpartition("@")[0]
        url = broker._replace(netloc=f"{login}@127.0.0.1:{wire.port}").geturl()
        with cloud(tmp_path, database, url, HOSTS, HANDLES, options=options) as running:
            chaos = Chaos(running, wire, tmp_path, SEED)
            body = [{"name": PROFILE, "groups": [{"resources:FPGA": "1"}]}]
            until(
                "the profile is made", lambda: chaos.call("POST", "/v2/device_profiles", json=body)
            )
            # Trouble with agents that never began would be no trouble.
            until("every card is published", lambda: len(_published(engine)) == ALL)
            yield running, chaos, engine


def audit(running: Cloud) -> tuple[int, list[dict[str, Any]]]:
    """Run ``cyborg audit``; return its exit status and what it found."""
    done = subprocess.run(
        [
            *(BIN / "cyborg", "--os-auth-type", "none", "--os-endpoint", running.endpoint),
            *("audit", "-f", "json"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return done.returncode, found


def differences(running: Cloud, engine: sa.Engine) -> list[str]:
    """Compare every provider in Placement with what the database renders."""
    placement = Placement(running.placement)
    found: list[str] = []
    for host in running.hosts:
        root = placement.find(host)
        assert root is not None
        with engine.connect() as connection:
            uuids = [row["uuid"] for row in rows.read(engine, schema.providers, host=host)]
            desired = deployables.desired(connection, uuids)
        wanted = rendering.wanted(root.uuid, desired)
        tree = placement.tree(root.uuid)
        del tree[root.uuid]
        actual = {
            uuid: rendering.actual(known, placement.inventories(uuid), placement.traits(uuid))
            for uuid, known in tree.items()
        }
        found += [
            f"{host} {uuid}: wanted {wanted.get(uuid)}, found {actual.get(uuid)}"
            for uuid in sorted({*wanted, *actual})
            if wanted.get(uuid) != actual.get(uuid)
        ]
    return found


def test_at_rest_all_sides_agree(bed: tuple[Cloud, Chaos, sa.Engine]) -> None:
    running, chaos, engine = bed
    try:
        chaos.run(SECONDS)
        chaos.rest()
        until("nothing is stale", lambda: not _stale(engine), 60)
        until("Placement is what the database wants", lambda: not differences(running, engine), 60)
        status, findings = audit(running)
        assert (findings, status) == ([], 0)
        assert differences(running, engine) == []
        owned = [h for h in rows.read(engine, schema.attach_handles) if h["request_id"]]
        bound = [r for r in rows.read(engine, schema.requests) if r["state"] == "Bound"]
        assert len(owned) == len(bound)
        assert chaos.binds > 0
        assert [name for name, daemon in running.daemons.items() if not daemon.alive()] == []
    except BaseException:
        sys.stderr.write("\n".join([f"seed {SEED}", *chaos.story[-200:], ""]))
        raise


def _published(engine: sa.Engine) -> list[dict[str, Any]]:
    return [row for row in rows.read(engine, schema.providers) if row["published"] > 0]


def _stale(engine: sa.Engine) -> list[dict[str, Any]]:
    return [row for row in rows.read(engine, schema.providers) if row["stale_since"] is not None]
