# SPDX-License-Identifier: Apache-2.0
"""The engine driven at random on the servers; ``tests/unit`` has the same on SQLite, for longer."""

from pathlib import Path

import pytest

from cyborg.db import schema
from cyborg.fixtures.databases import SERVERS, engine_of, fresh_database
from cyborg.fixtures.engine_machine import drive


@pytest.mark.services
@pytest.mark.parametrize("kind", SERVERS)
def test_the_engine_keeps_its_promises(kind: str, tmp_path: Path) -> None:
    with fresh_database(kind, tmp_path) as url, engine_of(url) as made:
        schema.metadata.create_all(made)
        seen = drive(made, examples=40)
    assert seen >= {"Initial", "BindStarted", "Bound"}
