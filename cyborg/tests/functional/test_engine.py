# SPDX-License-Identifier: Apache-2.0
"""The random state machine of the engine on database servers; unit tests run it on SQLite."""

from pathlib import Path

import pytest

from cyborg.db import schema
from cyborg.tests.fixtures.databases.databases import SERVERS, engine_of, fresh_database
from cyborg.tests.fixtures.databases.engine_machine import run_machine
from cyborg.tests.fixtures.machine import tiers


@pytest.mark.matrix
@pytest.mark.services
@pytest.mark.parametrize("kind", SERVERS)
def test_binding_engine_keeps_its_invariants(kind: str, tmp_path: Path) -> None:
    with fresh_database(kind, tmp_path) as url, engine_of(url) as bind:
        schema.metadata.create_all(bind)
        states = run_machine(bind, examples=tiers.scale(40))
    assert states >= {"Initial", "BindStarted", "Bound"}
