# SPDX-License-Identifier: Apache-2.0
"""The engine on SQLite, driven at random; ``tests/functional`` has the same on the servers."""

import sqlalchemy as sa

from cyborg.fixtures.engine_machine import drive


def test_the_engine_keeps_its_promises(sqlite_engine: sa.Engine) -> None:
    seen = drive(sqlite_engine, examples=100)
    assert seen >= {"Initial", "BindStarted", "Bound", "BindFailed", "Unbound"}
