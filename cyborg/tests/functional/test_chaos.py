# SPDX-License-Identifier: Apache-2.0
"""Minutes of random faults; after the recovery all four sources agree.

Real MariaDB, RabbitMQ and Placement, real processes. ``CYBORG_TEST_CHAOS_SECONDS`` and
``CYBORG_TEST_CHAOS_SEED`` set the duration and the random seed.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.clients.placement import Placement
from cyborg.conductor.placement import reconciler
from cyborg.db import schema
from cyborg.db.deployables import write as deployables
from cyborg.tests.fixtures.bus.tcp_relay import relay_broker
from cyborg.tests.fixtures.clouds.chaos import CARDS, HANDLES, PROFILE, Chaos
from cyborg.tests.fixtures.clouds.cloud import Cloud, make_and_run_cloud
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.machine.processes import BIN, wait_until

HOSTS = ("compute-1", "compute-2", "compute-3")
SECONDS = float(os.environ.get("CYBORG_TEST_CHAOS_SECONDS", "10"))
SEED = int(os.environ.get("CYBORG_TEST_CHAOS_SEED", "0")) or random.randrange(1, 2**31)

ALL = len(HOSTS) * len(CARDS)

pytestmark = [pytest.mark.services, pytest.mark.matrix]


@pytest.fixture
def env(rabbit_url: str, tmp_path: Path) -> Iterator[tuple[Cloud, Chaos, sa.Engine]]:
    """Run a cloud whose broker can be cut off, with a profile."""
    options: dict[str, dict[str, Any]] = {
        "agent": {"discovery_interval": 1, "health_interval": 0.5, "health_recovery_time": 2},
        "conductor": {
            "down_heartbeats": 6,
            "broker_reconnect_grace": 4,
            "lease_timeout": 5,
            "placement_verify_interval": 10,
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
        relay_broker(rabbit_url) as (broker_relay, url),
        fresh_database("mysql", tmp_path) as database,
        engine_of(database) as engine,
        make_and_run_cloud(tmp_path, database, url, HOSTS, HANDLES, options=options) as running,
    ):
        chaos = Chaos(running, broker_relay, tmp_path, SEED)
        body = [{"name": PROFILE, "groups": [{"resources:FPGA": "1"}]}]
        wait_until(
            "the profile is made", lambda: chaos.call("POST", "/v2/device_profiles", json=body)
        )
        # Wait for the agents: faults before their start would have no effect.
        wait_until("every card is published", lambda: len(_published(engine)) == ALL)
        yield running, chaos, engine


def audit(running: Cloud) -> tuple[int, list[dict[str, Any]]]:
    """Run ``cyborg audit``; return its exit status and its findings."""
    process = subprocess.run(
        [
            *(BIN / "cyborg", "--os-auth-type", "none", "--os-endpoint", running.endpoint),
            *("audit", "-f", "json"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode in (0, 1), process.stderr
    report = json.loads(process.stdout)
    assert isinstance(report, list)
    return process.returncode, report


def differences(running: Cloud, engine: sa.Engine) -> list[str]:
    """Compare every provider in Placement with the desired one of the database."""
    placement = Placement(running.placement)
    lines: list[str] = []
    for host in running.hosts:
        root = placement.find(host)
        assert root is not None
        with engine.connect() as connection:
            uuids = [row["uuid"] for row in rows.read(engine, schema.providers, host=host)]
            desired = deployables.desired_state(connection, uuids)
        expected = reconciler.desired_providers(root.uuid, desired)
        tree = placement.tree(root.uuid)
        del tree[root.uuid]
        actual = {
            uuid: reconciler.actual_provider(
                expected_state, placement.inventories(uuid), placement.traits(uuid)
            )
            for uuid, expected_state in tree.items()
        }
        lines += [
            f"{host} {uuid}: wanted {expected.get(uuid)}, found {actual.get(uuid)}"
            for uuid in sorted({*expected, *actual})
            if expected.get(uuid) != actual.get(uuid)
        ]
    return lines


def test_all_sources_agree_after_faults_end(env: tuple[Cloud, Chaos, sa.Engine]) -> None:
    running, chaos, engine = env
    try:
        chaos.run(SECONDS)
        chaos.recover()
        wait_until("nothing is stale", lambda: not _stale(engine))
        wait_until(
            "Placement is what the database wants", lambda: not differences(running, engine), 60
        )
        status, findings = audit(running)
        assert (findings, status) == ([], 0)
        assert differences(running, engine) == []
        owned = [h for h in rows.read(engine, schema.attach_handles) if h["arq_id"]]
        bound = [r for r in rows.read(engine, schema.arqs) if r["state"] == "Bound"]
        assert len(owned) == len(bound)
        assert chaos.binds > 0
        assert [name for name, daemon in running.daemons.items() if not daemon.alive()] == []
    except BaseException:
        stale = map(str, _stale(engine))
        sys.stderr.write("\n".join([f"seed {SEED}", *chaos.history[-200:], *stale, ""]))
        raise


def _published(engine: sa.Engine) -> list[dict[str, Any]]:
    return [row for row in rows.read(engine, schema.providers) if row["published_revision"] > 0]


def _stale(engine: sa.Engine) -> list[dict[str, Any]]:
    found = rows.read(engine, schema.providers)
    # Without those that are only verified again, of which there are always some on a busy machine.
    return [row for row in found if row["stale_since"] is not None and not row["verify_only"]]
