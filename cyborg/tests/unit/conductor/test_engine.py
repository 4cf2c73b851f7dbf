# SPDX-License-Identifier: Apache-2.0
"""The engine on SQLite, driven at random; ``tests/functional`` has the same on the servers."""

import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from cyborg.fixtures.engine_machine import EngineMachine


def test_the_engine_keeps_its_promises(sqlite_engine: sa.Engine) -> None:
    class Machine(EngineMachine):
        engine = sqlite_engine
        seen: set[str] = set()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=100,
            stateful_step_count=50,
            deadline=None,
            # The same runs each time: what they must come to is asserted below.
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Machine.seen >= {"Initial", "BindStarted", "Bound", "BindFailed", "Unbound"}
