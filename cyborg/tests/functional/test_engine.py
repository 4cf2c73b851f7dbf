# SPDX-License-Identifier: Apache-2.0
"""The engine driven at random on the servers; ``tests/unit`` has the same on SQLite, for longer."""

from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from cyborg.db import schema
from cyborg.fixtures.databases import SERVERS, engine_of, fresh_database
from cyborg.fixtures.engine_machine import EngineMachine


@pytest.mark.services
@pytest.mark.parametrize("kind", SERVERS)
def test_the_engine_keeps_its_promises(kind: str, tmp_path: Path) -> None:
    with fresh_database(kind, tmp_path) as url, engine_of(url) as made:
        schema.metadata.create_all(made)
        seen = _drive(made)
    assert seen >= {"Initial", "BindStarted", "Bound"}


def _drive(made: sa.Engine) -> set[str]:
    class Machine(EngineMachine):
        engine = made
        seen: set[str] = set()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Machine.seen
