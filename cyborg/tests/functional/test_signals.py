# SPDX-License-Identifier: Apache-2.0
"""SIGHUP and SIGTERM of every daemon while servers are booted and deleted: no boot fails.

Real processes, MariaDB, RabbitMQ and Placement.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa

from cyborg.core import naming
from cyborg.db import schema
from cyborg.tests.fixtures.clouds.cloud import Cloud, make_and_run_cloud
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.upgrade.boots import PROFILE, Boots

HOST = "compute-1"
AGENT = f"agent-{HOST}"
CARD = naming.provider_uuid(HOST, "0000:0c:00.0")
CLIENTS, WORKERS = 3, 2

pytestmark = [pytest.mark.services, pytest.mark.matrix]


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[Cloud]:
    folder: Path = tmp_path_factory.mktemp("signals")
    options = {
        "fake": {"prepare_seconds": 0.1, "num_handles": 8},
        "conductor": {"workers": WORKERS},
    }
    with (
        fresh_database("mysql", folder) as database,
        engine_of(database) as engine,
        make_and_run_cloud(folder, database, rabbit_url, (HOST,), 8, options=options) as running,
    ):
        wait_until("the card is published", lambda: _is_published(engine))
        body: Any = [{"name": PROFILE, "groups": [{"resources:FPGA": "1"}]}]
        answer = requests.post(f"{running.endpoint}/v2/device_profiles", json=body, timeout=60)
        assert answer.ok, answer.text
        yield running
        wait_until("no work is left", lambda: not _work(engine), 60)


def _is_published(engine: sa.Engine) -> bool:
    found = rows.read(engine, schema.providers)
    return bool(found) and all(row["published_revision"] == row["revision"] for row in found)


def _work(engine: sa.Engine) -> list[Any]:
    """Return the ARQs, the handles that are not free, and the open jobs."""
    handles = rows.read(engine, schema.attach_handles)
    return [
        *rows.read(engine, schema.arqs),
        *(row for row in handles if row["arq_id"] is not None or row["needs_cleaning"]),
        *rows.read(engine, schema.jobs, state="pending"),
    ]


def _count_ready(cloud: Cloud, name: str) -> int:
    """Return how many workers of a conductor have become ready; 0 for another daemon."""
    return cloud.daemons[name].log.read_text().count("Conductor is ready")


def _wait_ready(cloud: Cloud, name: str, count: int) -> None:
    wait_until("the workers are ready", lambda: _count_ready(cloud, name) == count)


def test_no_boot_fails_while_daemons_are_reloaded_and_restarted(cloud: Cloud) -> None:
    boots = Boots(lambda: contextlib.nullcontext(cloud.endpoint), HOST, CARD, CLIENTS)
    try:
        boots.wait()
        for name in (*cloud.conductors, "api", AGENT):
            workers = _count_ready(cloud, name)
            os.kill(cloud.daemons[name].pid, signal.SIGHUP)
            boots.wait()
            # One after another: while all conductors are replaced, nobody answers the API.
            _wait_ready(cloud, name, 2 * workers)
            boots.wait()
            assert cloud.daemons[name].alive(), name
        for name in cloud.conductors:
            assert cloud.daemons[name].stop() == 0, name
            boots.wait()
            workers = _count_ready(cloud, name)
            cloud.conductor(name)
            _wait_ready(cloud, name, workers + WORKERS)
            boots.wait()
        # Its running jobs end, or are repeated by its successor.
        assert cloud.daemons[AGENT].stop() == 0
        cloud.agent(HOST)
        boots.wait()
    finally:
        boots.stop()
    assert boots.errors == []
