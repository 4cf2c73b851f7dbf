# SPDX-License-Identifier: Apache-2.0
"""Queries of a round of the orphan collector: several at a time, and failures of Nova."""

import logging
import threading
from datetime import timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.clients.nova import Nova
from cyborg.conductor.orphans import collector as module
from cyborg.core.errors import Unavailable
from cyborg.core.hosts import Instance
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases.orphan_setup import GRACE, INTERVAL, START, Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter

__all__ = ["node", "placement_adapter"]

SUSPECTED = START - timedelta(seconds=GRACE)
CALLS = 4
TIMEOUT = 30.0


def test_queries_of_placement_run_at_the_same_time(sqlite_engine: sa.Engine, node: Node) -> None:
    env = Env(sqlite_engine, node, max_placement_calls=CALLS)
    arqs = [env.add_bound_arq(env.add_card(n)) for n in range(2 * CALLS)]
    env.deallocate(arqs[-1])
    together = threading.Barrier(CALLS)
    running: list[None] = []
    most = 0

    def before_answer() -> None:
        nonlocal most
        running.append(None)
        most = max(most, len(running))
        together.wait(TIMEOUT)
        running.pop()

    env.placement.before_answer = before_answer
    stats = env.run_after()
    assert (stats.checked, stats.suspected, most) == (2 * CALLS, 1, CALLS)


def test_placement_that_fails_in_a_round_keeps_earlier_findings(
    sqlite_engine: sa.Engine, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE", 2)
    env = Env(sqlite_engine, node, max_placement_calls=2)
    arqs = [env.add_bound_arq(env.add_card(n), allocated=False) for n in range(6)]

    def fail_later() -> None:
        if len(env.placement.queries) > 2:
            raise Unavailable("Placement is away")

    env.placement.before_answer = fail_later
    with pytest.raises(Unavailable):
        env.run_after()
    assert sum(env.row(uuid)["orphan_since"] is not None for uuid in arqs) == 2


class UnreliableNova(Nova):
    """A Nova whose first ``failures`` queries for a server fail."""

    failures = 0

    def get_server(self, uuid: str) -> Instance | None:
        if self.failures:
            self.failures -= 1
            raise Unavailable("Nova is away")
        return super().get_server(uuid)


@pytest.mark.parametrize("failures", [1, 2])
def test_failed_query_of_nova_does_not_affect_other_instances(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova, failures: int
) -> None:
    """Their servers are on the host of the device, so their ARQs stay bound."""
    nova = UnreliableNova(fake_nova.adapter())
    env = Env(sqlite_engine, node, nova)
    card = env.add_card()
    instances = [str(uuid4()) for _ in range(4)]
    for instance in instances:
        fake_nova.add_server(instance, env.node.name)
        env.add_bound_arq(card, allocated=False, orphan_since=SUSPECTED, instance_uuid=instance)
    nova.failures = failures
    stats = env.run_after()
    assert (stats.released, stats.in_use, stats.postponed) == (failures, 4 - failures, 0)


def test_instances_that_nova_was_not_asked_about_stay_bound(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova, caplog: pytest.LogCaptureFixture
) -> None:
    nova = UnreliableNova(fake_nova.adapter())
    env = Env(sqlite_engine, node, nova)
    card = env.add_card(handles=8)
    for _ in range(8):
        env.add_bound_arq(card, allocated=False, orphan_since=SUSPECTED)
    nova.failures = 10**6
    stats = env.run_after()
    assert (stats.released, stats.postponed) == (
        module.MAX_NOVA_FAILURES,
        8 - module.MAX_NOVA_FAILURES,
    )
    assert "Nova was not queried about their instances" in caplog.text
    nova.failures = 0
    assert env.run_after().released == 8 - module.MAX_NOVA_FAILURES


def test_round_longer_than_the_interval_logs_a_warning(
    sqlite_engine: sa.Engine, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    env = Env(sqlite_engine, node)
    env.add_bound_arq(env.add_card())
    seconds = 0.0
    env.collector._clock = lambda: seconds

    def before_answer() -> None:
        nonlocal seconds
        seconds += INTERVAL + 1

    env.run_after()
    assert not caplog.records
    env.placement.before_answer = before_answer
    env.run_after()
    assert "An orphan scan took 301 s" in caplog.text
    assert "max_placement_calls (4 now)" in caplog.text
