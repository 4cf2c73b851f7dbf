# SPDX-License-Identifier: Apache-2.0
"""cyborg-conductor as a process: start errors, waiting, working and stopping."""

import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of
from cyborg.tests.fixtures.machine.processes import Daemon, ini, wait_until
from cyborg.tests.fixtures.machine.tiers import sample


class Installation:
    """A configuration file and the daemons started with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = f"sqlite:///{folder}/cyborg.db"
        self.daemons: list[Daemon] = []

    def conductor(self, *, forked: bool = True, **sections: Any) -> Daemon:
        plain: dict[str, dict[str, Any]] = {
            "DEFAULT": {"host": "controller-1", "transport_url": "kombu+memory:////"},
            "database": {"connection": self.database},
            "placement": {"endpoint_override": "http://127.0.0.1:1"},
            "nova": {"send_events": "false"},
            "conductor": {"hello_interval": 0.2, "workers": 2},
        }
        file = self.folder / "cyborg.conf"
        file.write_text(ini(plain | sections))
        command = [sys.executable, "-m", "cyborg.cmd.conductor", "--config-file", str(file)]
        daemon = Daemon("conductor", command, self.folder, {}, forked=forked)
        self.daemons.append(daemon)
        daemon.start()
        return daemon


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    environment = Installation(tmp_path)
    yield environment
    for daemon in environment.daemons:
        daemon.kill()


@pytest.mark.parametrize("forked", sample([True, False], True))
def test_conductor_without_tables_waits_then_works_and_stops(
    installation: Installation, forked: bool
) -> None:
    """A forked process ends without the finalization of the interpreter; the script has it."""
    conductor = installation.conductor(forked=forked)
    wait_until("it waits", lambda: "Waiting for the database" in conductor.tail())
    with engine_of(installation.database) as engine:
        schema.metadata.create_all(engine)
        wait_until("it says hello", lambda: rows.read(engine, schema.services))
        wait_until(
            "both workers are ready", lambda: conductor.tail(1000).count("is ready") == 2, 20
        )
        (service,) = rows.read(engine, schema.services)
    assert (service["binary"], service["host"]) == ("cyborg-conductor", "controller-1")
    assert conductor.stop() == 0
    assert "Traceback" not in conductor.tail(1000)


def test_conductor_waiting_for_database_stops_on_sigterm(installation: Installation) -> None:
    conductor = installation.conductor()
    wait_until("it waits", lambda: "Waiting for the database" in conductor.tail())
    assert conductor.stop() == 0


def test_conductor_without_broker_works_and_stops(installation: Installation) -> None:
    options = {"host": "controller-1", "transport_url": "rabbit://u:secret@127.0.0.1:1/"}
    with engine_of(installation.database) as engine:
        schema.metadata.create_all(engine)
        conductor = installation.conductor(DEFAULT=options)
        rows.insert_card(engine)
        (provider,) = rows.read(engine, schema.providers)
        rows.update(engine, schema.providers, provider["id"], verified_at=datetime(2020, 1, 1))

        def is_verified() -> bool:
            (row,) = rows.read(engine, schema.providers)
            # Leased, also while Placement does not answer; or found missing in Placement.
            return row["owner"] is not None or row["stale_since"] is not None

        wait_until("it verifies what is old", is_verified)
        assert not rows.read(engine, schema.services), "nobody hears it"
    wait_until("it waits", lambda: "Waiting for the message broker" in conductor.tail(1000))
    assert conductor.stop() == 0
    assert "secret" not in conductor.tail(1000)


def test_conductor_with_invalid_section_exits_with_error(installation: Installation) -> None:
    conductor = installation.conductor(placement={})
    wait_until("it ends", lambda: not conductor.alive())
    assert conductor.stop() == 1
    assert "[placement] auth_type is not set" in conductor.tail()
    assert "Traceback" not in conductor.tail(1000)
