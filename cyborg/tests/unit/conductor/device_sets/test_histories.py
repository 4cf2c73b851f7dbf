# SPDX-License-Identifier: Apache-2.0
"""Any history of servers, faults and publishers: the offers follow it without the sweep of groups.

Things happen between the runs of a publisher, and before any of its transactions and of its
requests to Placement. After each history, and at some steps of it, the publisher runs until nothing
is stale: then a plan of any host changes nothing.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from oslo_utils import timeutils

from cyborg.conductor.placement.offers import plan_host
from cyborg.core.errors import CyborgError
from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_set import UNRESERVED, OfferState
from cyborg.db import schema
from cyborg.db.providers.write import mark_stale_of_hosts
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import make_allocation, placement_adapter
from cyborg.tests.fixtures.device_sets.group import FAMILY, FREE, Group
from cyborg.tests.fixtures.device_sets.host import GPU, SetHost, make_gpu
from cyborg.tests.fixtures.hosts.hosts import make_hosts
from cyborg.tests.fixtures.machine.tiers import scale

__all__ = ["placement_adapter"]


class Killed(BaseException):
    """Raised where a publisher is killed."""


class ServerPhase(IntEnum):
    """Phases of a server, in their order."""

    ALLOCATED = 0
    PREPARING = 1
    BOUND = 2
    RELEASED = 3  # its devices are being cleaned
    CLEAN = 4  # only its allocation is left


@dataclass
class Server:
    """A server with a set, with an allocation or without one."""

    host: SetHost
    name: str
    uuid: str
    phase: ServerPhase = ServerPhase.ALLOCATED
    is_allocated: bool = True


Action = tuple[str, int]
ACTIONS = st.tuples(
    st.sampled_from(
        [*["go_on"] * 6, *["allocate"] * 2, "deallocate", "fail", "fault", "down", "publish"]
    ),
    st.integers(0, 11),
)


class Offers(RuleBasedStateMachine):
    """Servers, faults and two publishers on a group of hosts, without the sweep of groups."""

    group: Group
    saved: Mapping[sa.Table, list[dict[str, Any]]]
    free: list[tuple[SetHost, str, int]]
    consumers: set[str]

    def __init__(self) -> None:
        super().__init__()
        group = self.group
        with group.engine.begin() as tx:
            for table in reversed(schema.TABLES):
                tx.execute(sa.delete(table))
            for table, found in self.saved.items():
                tx.execute(sa.insert(table), found)
        for host in group.hosts:
            host.gpus = {unit: make_gpu(unit) for unit in host.gpus}
            host.host.generation, host.host.devices = 1, (*host.gpus.values(), host.source)
        self.servers: list[Server] = []
        self.number = 0
        for consumer in sorted(self.consumers):
            self._deallocate_consumer(consumer)
        self._end_points()
        if group.free_sets() != self.free:
            # The last example failed.
            with group.engine.begin() as tx:
                mark_stale_of_hosts(tx, [host.node.name for host in group.hosts], group.clock())
            group.publish()
            assert group.free_sets() == self.free

    @rule(
        first=ACTIONS,
        transactions=st.dictionaries(st.integers(0, 5), ACTIONS, max_size=2),
        requests=st.dictionaries(st.integers(0, 9), ACTIONS, max_size=1),
        killed_at=st.sampled_from([None, None, None, *range(6)]),
        is_checked=st.booleans(),
    )
    def act(
        self,
        first: Action,
        transactions: dict[int, Action],
        requests: dict[int, Action],
        killed_at: int | None,
        *,
        is_checked: bool,
    ) -> None:
        """Change something; run a publisher, with changes at its points; maybe it is killed."""
        group = self.group
        self._do(first)
        actions = self._prepare(transactions)
        if killed_at is not None:
            actions[killed_at] = self._kill
        group.transactions.start(actions)
        group.requests.start(self._prepare(requests))
        with suppress(Killed):
            group.publisher.run_once()
        self._end_points()
        if is_checked:
            self._check()

    def _prepare(self, actions: Mapping[int, Action]) -> dict[int, Callable[[], object]]:
        return {point: partial(self._do, action) for point, action in actions.items()}

    def _end_points(self) -> None:
        self.group.transactions.start({})
        self.group.requests.start({})

    def teardown(self) -> None:
        """Delete all servers, end all faults, and check that everything is offered."""
        for server in list(self.servers):
            while server in self.servers:
                self._advance(server)
        for host in self.group.hosts:
            host.gpus = {unit: make_gpu(unit) for unit in host.gpus}
            self._report(host)
            self._set_down(host, is_down=False)
        self._check()
        assert self.group.sizes() == FREE

    def _check(self) -> None:
        """Check that Placement has the offers, and that a plan of any host changes nothing."""
        group = self.group
        group.publish()
        d, down = schema.deployables.c, schema.services.c.down_since
        query = sa.select(d.rp_uuid).join(schema.services, schema.services.c.host == d.host)
        query = query.where(d.offer == OfferState.OFFERED, down.is_(None))
        with group.engine.connect() as tx:
            offered = set(tx.scalars(query))
        # Others are allocated, and not bound yet or any more, or being cleaned.
        used = {s.host.provider(s.name) for s in self.servers}
        found = {host.provider(name) for host, name, _ in group.free_sets()}
        assert found - used == offered - used
        for host in group.hosts:
            with group.engine.connect() as tx:
                before = self._offers(tx)
                plan_host(tx, host.node.name, group.clock())
                assert self._offers(tx) == before
                tx.rollback()

    def _offers(self, tx: sa.Connection) -> list[tuple[Any, ...]]:
        d = schema.deployables.c
        query = sa.select(d.name, d.offer, d.offer_reason).where(d.set_size.is_not(None))
        return [tuple(row) for row in tx.execute(query.order_by(d.id))]

    def _do(self, action: Action) -> None:
        name, number = action
        getattr(self, f"_{name}")(number)

    def _select(self, number: int) -> Server | None:
        return self.servers[-1 - number % len(self.servers)] if self.servers else None

    def _allocate(self, number: int) -> None:
        """Allocate a set that the database offers, if Placement does too."""
        host = self.group.hosts[number % 2]
        names = [name for name, offer in host.offers().items() if offer in UNRESERVED]
        if not names:
            return
        name = names[number // 2 % len(names)]
        self.number += 1
        uuid = f"00000000-0000-4000-8000-{self.number:012}"
        body = make_allocation(host.provider(name), GPU, len(FAMILY[name]))
        answer = host.node.client.put(f"/allocations/{uuid}", json=body)
        if answer.status_code == 204:
            self.consumers.add(uuid)
            self.servers.append(Server(host, name, uuid))

    def _go_on(self, number: int) -> None:
        if (server := self._select(number)) is not None:
            self._advance(server)

    def _advance(self, server: Server) -> None:
        """Bring a server to its next phase."""
        match server.phase:
            case ServerPhase.ALLOCATED:
                if server.is_allocated:
                    with suppress(CyborgError):
                        server.host.bind(server.name, instance=server.uuid)
            case ServerPhase.PREPARING | ServerPhase.RELEASED:
                for job in self._jobs(server):
                    self.group.jobs.complete(job["uuid"], job["host"], "done", None)
            case ServerPhase.BOUND:
                server.host.delete(server.uuid)
            case ServerPhase.CLEAN:
                if server.is_allocated:
                    self._deallocate_consumer(server.uuid)
                self.servers.remove(server)
                return
        server.phase = ServerPhase(server.phase + 1)

    def _jobs(self, server: Server) -> list[dict[str, Any]]:
        """Return the open jobs of the set of a server."""
        end = f":{server.name}"
        return [
            job
            for job in self.group.open_jobs()
            if job["host"] == server.host.node.name
            and any(item["deployable"].endswith(end) for item in job["arguments"]["items"])
        ]

    def _deallocate(self, number: int) -> None:
        """Delete the allocation of a server, maybe before its ARQs."""
        if (server := self._select(number)) is not None and server.is_allocated:
            self._deallocate_consumer(server.uuid)
            server.is_allocated = False

    def _deallocate_consumer(self, uuid: str) -> None:
        self.group.hosts[0].node.deallocate(uuid)
        self.consumers.discard(uuid)

    def _fail(self, number: int) -> None:
        """Report that a job failed."""
        if jobs := self.group.open_jobs():
            job = jobs[number % len(jobs)]
            self.group.jobs.complete(job["uuid"], job["host"], "failed", None)

    def _fault(self, number: int) -> None:
        """Report that a GPU has a fault, or has it no longer."""
        host = self.group.hosts[number % 2]
        unit = sorted(host.gpus)[number // 2 % 4]
        is_healthy = host.gpus[unit].health is not Health.UNHEALTHY
        facts: dict[str, Any] = {"health": Health.UNHEALTHY, "health_reason": "Xid 79"}
        host.gpus[unit] = make_gpu(unit, **(facts if is_healthy else {}))
        self._report(host)

    def _report(self, host: SetHost) -> None:
        host.host.send(make_hosts(self.group.engine), *host.gpus.values(), host.source)

    def _down(self, number: int) -> None:
        """Mark an agent down, or up again."""
        host = self.group.hosts[number % 2]
        (agent,) = rows.read(self.group.engine, schema.services, host=host.node.name)
        self._set_down(host, is_down=agent["down_since"] is None)

    def _set_down(self, host: SetHost, *, is_down: bool) -> None:
        engine, now = self.group.engine, timeutils.utcnow()
        (agent,) = rows.read(engine, schema.services, host=host.node.name)
        rows.update(engine, schema.services, agent["id"], down_since=now if is_down else None)
        with engine.begin() as tx:
            mark_stale_of_hosts(tx, [host.node.name], now)

    def _publish(self, number: int) -> None:
        """Run the publisher of another conductor."""
        self.group.other.run_once()

    def _kill(self) -> None:
        raise Killed


@pytest.mark.matrix
@pytest.mark.timeout(300)  # it has taken 80 s on a machine with ten processes a processor
def test_offers_follow_any_history(sqlite_engine: sa.Engine, placement_adapter: Any) -> None:
    group = Group(sqlite_engine, placement_adapter)
    found = {table: rows.read(sqlite_engine, table) for table in schema.TABLES}

    class Machine(Offers):
        saved = {table: values for table, values in found.items() if values}
        consumers: set[str] = set()

    Machine.group, Machine.free = group, group.free_sets()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=scale(48),
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            # Without the search for a shorter history, which takes minutes.
            phases=[Phase.generate],
        ),
    )
