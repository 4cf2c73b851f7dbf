# SPDX-License-Identifier: Apache-2.0
"""Random operations on SQLite; ``tests/functional`` runs the same on the database servers."""

import pytest
import sqlalchemy as sa

from cyborg.tests.fixtures.databases.engine_machine import run_machine
from cyborg.tests.fixtures.machine import tiers


@pytest.mark.slow
def test_engine_keeps_invariants(sqlite_engine: sa.Engine) -> None:
    states = run_machine(sqlite_engine, examples=tiers.scale(100))
    assert states >= {"Initial", "BindStarted", "Bound", "BindFailed", "Unbound"}
