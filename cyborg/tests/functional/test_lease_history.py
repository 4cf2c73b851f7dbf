# SPDX-License-Identifier: Apache-2.0
"""Any history of device contexts with leases and a fake clock, against the real database layer.

Two contexts never own one handle, the expiry never frees a bound one, and the epochs fence.
"""

from collections import Counter
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cyborg.core.contexts.states import LEASED
from cyborg.core.errors import Conflict, CyborgError, NoHandle
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.context_work import ContextEnv
from cyborg.tests.fixtures.machine.tiers import scale

CONTEXTS = st.integers(0, 2)
OWNING = ("reserving", "reserved", "binding", "bound")


class LeaseHistory(RuleBasedStateMachine):
    """Three contexts of two ARQs each, and a card with four handles whose host works."""

    engine: sa.Engine

    def __init__(self) -> None:
        super().__init__()
        with self.engine.begin() as tx:
            for table in reversed(schema.metadata.sorted_tables):
                tx.execute(sa.delete(table))
        self.env = ContextEnv(self.engine, "prepares")
        self.contexts = [self.env.create() for _ in range(3)]
        self.bound: dict[str, str] = {}  # by context: the instance
        self.epochs: Counter[str] = Counter()

    def row(self, number: int) -> dict[str, Any]:
        """Return the row of a context."""
        return self.env.row(self.contexts[number])

    @rule(number=CONTEXTS, seconds=st.integers(1, 30))
    def reserve(self, number: int, seconds: int) -> None:
        """Reserve a context: all handles or none."""
        before = self.row(number)
        try:
            after = self.env.reserve(self.contexts[number], lease_seconds=seconds)
        except Conflict as exc:
            assert isinstance(exc, NoHandle) == (before["state"] in ("unbound", "cleaning"))
            assert self.row(number)["epoch"] == before["epoch"]
            return
        assert before["state"] in ("unbound", "cleaning")
        assert after["epoch"] == before["epoch"] + 1

    @rule(number=CONTEXTS, offset=st.integers(-1, 1), seconds=st.integers(1, 30))
    def renew(self, number: int, offset: int, seconds: int) -> None:
        """Renew a lease, with the epoch of the last lease or another one."""
        before = self.row(number)
        lives = before["state"] in LEASED and before["lease_expires_at"] > self.env.now()
        try:
            epoch = max(before["epoch"] + offset, 0)
            self.env.reserve(self.contexts[number], lease_seconds=seconds, epoch=epoch)
        except CyborgError:
            assert not (lives and offset == 0)
            return
        assert lives
        assert epoch == before["epoch"]

    @rule(number=CONTEXTS, offset=st.integers(-1, 1))
    def bind(self, number: int, offset: int) -> None:
        """Bind a lease, with the epoch of the last lease or another one."""
        before, instance = self.row(number), str(uuid4())
        lives = before["state"] in LEASED and before["lease_expires_at"] > self.env.now()
        epoch = max(before["epoch"] + offset, 0)
        try:
            self.env.bind_lease(self.contexts[number], instance, epoch=epoch)
        except CyborgError:
            assert not (lives and offset == 0)
            return
        assert lives
        assert epoch == before["epoch"]
        self.bound[self.contexts[number]] = instance

    @rule(number=CONTEXTS)
    def boot(self, number: int) -> None:
        """Bind a context as Nova does, with or without a lease."""
        context, instance = self.contexts[number], str(uuid4())
        try:
            self.env.bind(self.env.card, *self.env.read_arqs(context), instance=instance)
        except CyborgError:
            return
        self.bound[context] = instance

    @rule(number=CONTEXTS)
    def unbind(self, number: int) -> None:
        """Unbind a context in any state."""
        self.bound.pop(self.contexts[number], None)
        self.env.unbind_lease(self.contexts[number])

    @rule(answer=st.sampled_from(["done", "running", "failed"]))
    def work(self, answer: str) -> None:
        """Let the host work: a preparation may fail or take longer."""
        self.env.agents.answers["prepare"] = answer
        self.env.jobs.run_once()
        for context in list(self.bound):
            if self.env.state(context) == "error":
                self.bound.pop(context)

    @rule(seconds=st.integers(1, 20))
    def pass_time(self, seconds: int) -> None:
        """Advance the clock and release the leases that have ended."""
        self.env.advance(seconds)
        self.env.leases.sweep()
        now = self.env.now()
        for context in self.contexts:
            row = self.env.row(context)
            assert row["state"] not in LEASED or row["lease_expires_at"] > now

    @invariant()
    def check(self) -> None:
        """Check that exactly the contexts that are reserved or bound own their handles."""
        owners = [
            row["arq_id"]
            for row in rows.read(self.engine, schema.attach_handles)
            if row["arq_id"] is not None
        ]
        assert len(owners) == len(set(owners))
        for number, context in enumerate(self.contexts):
            row = self.row(number)
            arqs = rows.read(self.engine, schema.arqs, context_id=row["id"])
            owned = [arq for arq in arqs if arq["id"] in owners]
            assert len(owned) == (2 if row["state"] in OWNING else 0), row["state"]
            if row["state"] in LEASED:
                assert {arq["instance_uuid"] for arq in arqs} == {None}
            if context in self.bound:
                assert row["state"] in ("binding", "bound")
                assert {arq["instance_uuid"] for arq in arqs} == {self.bound[context]}
            assert row["epoch"] >= self.epochs[context]
            self.epochs[context] = row["epoch"]


@pytest.mark.parametrize("steps", [30])
def test_leases_in_any_order(engine: sa.Engine, steps: int) -> None:
    machine = type("Machine", (LeaseHistory,), {"engine": engine})
    examples = scale(64) if engine.dialect.name == "sqlite" else 4
    limits = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=limits)
