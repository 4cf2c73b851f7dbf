# SPDX-License-Identifier: Apache-2.0
"""Checks after notifications, with a real Placement and each kind of database."""

import logging
from collections.abc import Collection
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.clients.nova import Nova
from cyborg.conductor.notifications.notifications import ArqEventRecorder, NotificationBuilder
from cyborg.conductor.orphans import watcher
from cyborg.conductor.orphans.release import OrphanReleaser
from cyborg.conductor.orphans.watcher import HintQueue, InstanceWatcher
from cyborg.core.errors import Invalid
from cyborg.core.orphans.hints import MIN_BIND_AGE
from cyborg.db import schema
from cyborg.db.attachments import write as records
from cyborg.db.orphans import write as orphan_store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.bus.nova_notifications import make_payload
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.orphan_setup import Env as OrphanEnv
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.log_lines import texts_of
from cyborg.tests.fixtures.machine.options import make_conf

__all__ = ["node", "placement_adapter"]


class Env(OrphanEnv):
    """Cards with bound ARQs, an instance watcher, and a clock in seconds."""

    def __init__(self, engine: sa.Engine, node: Node, fake: FakeNova) -> None:
        super().__init__(engine, node)
        self.fake = fake
        self.seconds = 0.0
        self.attachments_ended = 0
        conf, uow = make_conf(), UnitOfWork(engine)
        # Another clock of the same database may differ by some milliseconds.
        self.database_clock = uow.clock
        recorder = ArqEventRecorder(conf, NotificationBuilder(conf, now=uow.clock))
        self.queue = HintQueue()
        self.watcher = InstanceWatcher(
            uow,
            self.placement,
            Nova(fake.adapter(), 5.0),
            OrphanReleaser(uow, recorder, self.wake, uow.clock),
            self.end_attachments,
            queue=self.queue,
            clock=lambda: self.seconds,
        )
        # The copy with a short timeout has lists and flags of its own.
        self.placement = self.watcher._placement  # type: ignore[assignment]

    def end_attachments(self, instances: Collection[str]) -> None:
        self.attachments_ended += len(instances)

    def serve(self, arq: str, host: str | None = None, status: str = "ACTIVE") -> None:
        """Show the instance of an ARQ in Nova, by default on the host of the device."""
        self.fake.add_server(self.instance(arq), host or self.node.name, status)

    def instance(self, arq: str) -> str:
        return str(self.row(arq)["instance_uuid"])

    def notify(self, event: str, *instances: str) -> None:
        for instance in instances:
            self.watcher.receive({"event_type": event, "payload": make_payload(instance)})

    def run(self, seconds: float = 2.0) -> int:
        self.seconds += seconds
        return self.watcher.run_once()

    def owned(self) -> int:
        """Return the number of handles with an owner."""
        found = rows.read(self.engine, schema.attach_handles)
        return sum(row["arq_id"] is not None for row in found)


@pytest.fixture
def env(engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    return Env(engine, node, fake_nova)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    """An env on SQLite, for behaviour that is the same on all databases."""
    return Env(sqlite_engine, node, fake_nova)


def test_deleted_instance_is_released_without_grace_period(
    env: Env, caplog: pytest.LogCaptureFixture
) -> None:
    card = env.add_card()
    stays, orphan = env.add_bound_arq(card), env.add_bound_arq(card)
    env.serve(stays)
    instance = env.instance(orphan)
    env.deallocate(orphan)
    env.notify("instance.delete.end", instance, env.instance(stays))
    assert env.run(0.5) == 0
    assert env.run() == 1
    assert [row["uuid"] for row in rows.read(env.engine, schema.arqs)] == [stays]
    assert env.owned() == 1
    assert env.self_heal_counts() == {"orphans_released": 1}
    assert texts_of(caplog.records, logging.WARNING) == [
        f"[provider={card.provider} arq={orphan} instance={instance}] Orphaned ARQ was deleted: "
        "its instance no longer exists and has no allocation on the resource provider"
    ]


def test_offloaded_instance_is_unbound(sqlite_env: Env, caplog: pytest.LogCaptureFixture) -> None:
    env = sqlite_env
    arq = env.add_bound_arq(env.add_card())
    env.fake.add_server(env.instance(arq), None, "SHELVED_OFFLOADED")
    env.deallocate(arq)
    env.notify("instance.shelve_offload.end", env.instance(arq))
    assert env.run() == 1
    assert (env.row(arq)["state"], env.row(arq)["instance_uuid"]) == ("Unbound", None)
    (text,) = texts_of(caplog.records, logging.WARNING)
    assert text.endswith(
        "its instance is shelved and offloaded and has no allocation on the resource provider"
    )


def test_moved_instance_starts_the_grace_period(sqlite_env: Env) -> None:
    env = sqlite_env
    arq = env.add_bound_arq(env.add_card())
    env.serve(arq, "another-host")
    env.deallocate(arq)
    env.notify("instance.resize_confirm.end", env.instance(arq))
    assert env.run(20) == 0
    row = env.row(arq)
    assert row["state"] == "Bound"
    assert row["orphan_since"] is not None
    assert env.self_heal_counts() == {"orphans_suspected": 1}
    # The orphan collector does the rest; the watcher has no more work.
    assert len(env.queue) == 0
    assert env.run(3600) == 0
    assert env.row(arq)["orphan_since"] == row["orphan_since"]


@pytest.mark.parametrize("case", ["allocated", "exists", "not admin", "no provider"])
def test_instance_that_may_exist_is_not_released(sqlite_env: Env, case: str) -> None:
    env = sqlite_env
    arq = env.add_bound_arq(env.add_card(), allocated=case == "allocated")
    if case == "exists":
        env.serve(arq)
    elif case == "not admin":
        env.fake.is_admin = False
    elif case == "no provider":
        rows.update(env.engine, schema.arqs, env.row(arq)["id"], device_rp_uuid=str(uuid4()))
    env.notify("instance.delete.end", env.instance(arq))
    for _ in range(50):
        assert env.run(10) == 0
    assert env.row(arq)["state"] == "Bound"
    assert env.owned() == 1


def test_allocation_deleted_after_the_first_check_is_seen(sqlite_env: Env) -> None:
    env = sqlite_env
    arq = env.add_bound_arq(env.add_card())
    env.notify("instance.delete.end", env.instance(arq))
    assert env.run() == 0
    env.deallocate(arq)
    assert env.run(4) == 0
    assert env.run(2) == 1


@pytest.mark.parametrize("away", ["placement", "nova", "database"])
def test_instance_is_checked_again_after_an_outage(
    sqlite_env: Env, away: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = sqlite_env
    arq = env.add_bound_arq(env.add_card(), allocated=False)
    env.notify("instance.delete.end", env.instance(arq))
    with monkeypatch.context() as patch:
        if away == "placement":
            patch.setattr(env.placement, "unreachable", True)
        elif away == "nova":
            patch.setattr(env.fake, "status", 503)
        else:
            patch.setattr(watcher, "_read", _fail)
        for _ in range(4):
            if away == "database":
                with pytest.raises(RuntimeError):
                    env.run(100)
            else:
                assert env.run(100) == 0
        assert env.row(arq)["state"] == "Bound"
    assert env.run(100) == 1


def test_bind_during_the_check_is_not_released(sqlite_env: Env) -> None:
    env = sqlite_env
    arq = env.add_bound_arq(env.add_card(), allocated=False)
    (row,) = rows.read(env.engine, schema.arqs)
    other = str(uuid4())

    def rebind() -> None:
        rows.update(env.engine, schema.arqs, row["id"], instance_uuid=other)

    env.placement.before_answer = rebind
    env.notify("instance.delete.end", str(row["instance_uuid"]))
    assert env.run() == 0
    assert env.row(arq)["instance_uuid"] == other
    assert env.row(arq)["state"] == "Bound"


def test_batch_needs_one_query_of_each_kind(
    sqlite_env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = sqlite_env
    cards = [env.add_card(n) for n in range(2)]
    arqs = [env.add_bound_arq(card) for card in cards for _ in range(3)]
    for arq in arqs:
        env.serve(arq)
    monkeypatch.setattr(watcher, "BATCH", 100)
    foreign = [str(uuid4()) for _ in range(194)]
    env.notify("instance.delete.end", *foreign, *map(env.instance, arqs), *foreign)
    assert len(env.queue) == 200
    with count_statements(env.engine) as statements:
        env.run()
        env.run(0.1)
    assert len([text for text in statements.statements if "instance_uuid IN" in text]) == 4
    assert sorted(env.placement.queries) == sorted(card.provider for card in cards)
    # Nova is asked only about instances without an allocation.
    assert env.fake.requested_paths == []
    # Foreign instances are not checked again.
    assert len(env.queue) == 6


def test_burst_of_foreign_instances_costs_two_statements_for_each_batch(sqlite_env: Env) -> None:
    env = sqlite_env
    for _ in range(10_000):
        env.notify("instance.delete.end", str(uuid4()))
    env.seconds += 2
    with count_statements(env.engine) as statements:
        for _ in range(25):
            env.watcher.run_once()
    assert len(statements) == 2 * 10_000 / watcher.BATCH
    assert (env.placement.queries, env.fake.requested_paths) == ([], [])
    assert len(env.queue) == 0


def test_repeated_notification_of_a_released_instance_does_nothing(sqlite_env: Env) -> None:
    env = sqlite_env
    instance = env.instance(env.add_bound_arq(env.add_card(), allocated=False))
    env.notify("instance.delete.end", instance)
    assert env.run() == 1
    env.notify("instance.delete.end", instance, instance)
    env.notify("instance.delete.start", instance)
    assert env.run() == 0
    assert env.run(100) == 0
    assert len(env.queue) == 0


def test_outage_is_logged_once_a_minute(sqlite_env: Env, caplog: pytest.LogCaptureFixture) -> None:
    env = sqlite_env
    arq = env.add_bound_arq(env.add_card(), allocated=False)
    env.notify("instance.delete.end", env.instance(arq))
    env.fake.status = 503
    for _ in range(5):
        env.run(100)
    env.placement.unreachable = True
    for _ in range(5):
        env.run(100)
    texts = texts_of(caplog.records, logging.WARNING)
    assert [("in Nova" in text, "in Placement" in text) for text in texts] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("limit", ["MAX_PROVIDERS", "MAX_QUERIES", "MAX_SECONDS"])
def test_instances_beyond_a_limit_are_checked_later(
    sqlite_env: Env, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = sqlite_env
    arqs = [env.add_bound_arq(env.add_card(n), allocated=False) for n in range(3)]
    monkeypatch.setattr(watcher, limit, 2 if limit == "MAX_SECONDS" else 1)
    if limit == "MAX_SECONDS":

        def take_a_second() -> None:
            env.seconds += 1

        env.placement.before_answer = take_a_second
    env.notify("instance.delete.end", *map(env.instance, arqs))
    released = [env.run(10) for _ in range(5)]
    assert sum(released) == 3
    assert max(released) < 3


def test_instance_with_attachments_ends_them(
    sqlite_env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = sqlite_env
    env.notify("instance.delete.end", str(uuid4()))
    env.run()
    assert env.attachments_ended == 0
    # A server that keeps its ARQs has nothing to end.
    env.notify("instance.delete.end", env.instance(env.add_bound_arq(env.add_card())))
    env.run()
    assert env.attachments_ended == 0
    orphan = env.add_bound_arq(env.add_card(1), allocated=False)
    env.notify("instance.delete.end", env.instance(orphan))
    assert env.run() == 1
    assert env.attachments_ended == 1
    monkeypatch.setattr(records, "lost_of_instances", lambda tx, instances: [1])
    env.notify("instance.delete.end", str(uuid4()))
    env.run()
    assert env.attachments_ended == 2


def test_stopped_watcher_starts_no_query(sqlite_env: Env) -> None:
    env = sqlite_env
    arq = env.add_bound_arq(env.add_card(), allocated=False)
    env.watcher.stop()
    env.notify("instance.delete.end", env.instance(arq))
    assert env.run() == 0
    assert env.placement.queries == []
    assert env.row(arq)["state"] == "Bound"


def test_notifications_are_counted_and_logged_rate_limited(
    sqlite_env: Env, caplog: pytest.LogCaptureFixture
) -> None:
    env = sqlite_env
    env.queue = HintQueue(max_instances=1)
    env.watcher._queue = env.queue
    instance = str(uuid4())
    env.notify("instance.delete.start", instance)
    env.notify("instance.delete.end", instance, str(uuid4()), str(uuid4()))
    env.notify("instance.update", instance)
    with pytest.raises(Invalid):
        env.watcher.receive({"event_type": "instance.delete.end", "payload": 5})
    for _ in range(3):
        env.watcher.refuse("payload is int, not an object")
    assert env.watcher.counts() == {
        "queued": 1,
        "coalesced": 1,
        "dropped": 2,
        "ignored": 1,
        "malformed": 3,
    }
    first, second = texts_of(caplog.records, logging.WARNING)
    assert first.startswith("Too many instances wait for a check")
    assert second == ("Discarded a malformed notification of Nova: payload is int, not an object")


def _fail(*args: Any) -> Any:
    raise RuntimeError("database is away")


def test_requeue_of_a_dropped_instance_is_counted(
    sqlite_env: Env, caplog: pytest.LogCaptureFixture
) -> None:
    env = sqlite_env
    env.watcher._queue = HintQueue(max_instances=1)
    instance = env.instance(env.add_bound_arq(env.add_card(), allocated=False))
    env.notify("instance.delete.end", instance)
    env.fake.status = 503
    env.placement.before_answer = lambda: env.notify("instance.delete.end", str(uuid4()))
    assert env.run() == 0
    assert env.watcher.counts()["dropped"] == 1
    assert any("Too many instances" in text for text in texts_of(caplog.records, logging.WARNING))


def test_new_suspect_is_logged_and_a_recovered_one_is_cleared(
    sqlite_env: Env, caplog: pytest.LogCaptureFixture
) -> None:
    env = sqlite_env
    caplog.set_level(logging.INFO)
    arq = env.add_bound_arq(env.add_card(), allocated=False)
    env.serve(arq)
    env.notify("instance.delete.end", env.instance(arq))
    env.run()
    env.run(10)
    texts = texts_of(caplog.records, logging.INFO)
    assert len([text for text in texts if "ARQ may be an orphan" in text]) == 1
    assert env.row(arq)["orphan_since"] is not None
    env.allocate(arq)
    env.run(30)
    assert env.row(arq)["orphan_since"] is None


def test_new_bind_is_released_later(sqlite_env: Env) -> None:
    env = sqlite_env
    arq = env.add_bound_arq(env.add_card(), allocated=False, updated_at=env.database_clock())
    env.notify("instance.delete.end", env.instance(arq))
    assert env.run() == 0
    assert env.row(arq)["state"] == "Bound"
    old = env.database_clock() - MIN_BIND_AGE
    rows.update(env.engine, schema.arqs, env.row(arq)["id"], updated_at=old)
    assert env.run(10) == 1


def test_releases_are_in_batches(sqlite_env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    env = sqlite_env
    monkeypatch.setattr("cyborg.conductor.orphans.release.RELEASE_BATCH", 2)
    sizes, release = [], env.watcher._releaser.release

    def count(arqs: Any, **options: Any) -> Any:
        sizes.append(len(arqs))
        return release(arqs, **options)

    monkeypatch.setattr(env.watcher._releaser, "release", count)
    card = env.add_card()
    arqs = [env.add_bound_arq(card, allocated=False) for _ in range(3)]
    env.notify("instance.delete.end", *map(env.instance, arqs))
    assert env.run() == 3
    assert sizes == [2, 1]


@pytest.mark.parametrize("bad", ["placement", "release", "suspects"])
def test_one_bad_provider_delays_only_its_instances(
    sqlite_env: Env, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = sqlite_env
    cards = sorted((env.add_card(n) for n in range(3)), key=lambda card: card.provider)
    arqs = [env.add_bound_arq(card, allocated=False) for card in cards]
    first = cards[0].provider  # checked first, so that it could stop the others
    with monkeypatch.context() as patch:
        if bad == "placement":

            def refuse() -> None:
                if env.placement.queries[-1] == first:
                    raise Invalid("bad request")

            env.placement.before_answer = refuse
        elif bad == "release":
            release = env.watcher._releaser.release

            def fail(some: Any, **options: Any) -> Any:
                return _fail() if some[0].provider == first else release(some, **options)

            patch.setattr(env.watcher._releaser, "release", fail)
        else:
            env.serve(arqs[0])
            patch.setattr(orphan_store, "mark_suspected", _fail)
        env.notify("instance.delete.end", *map(env.instance, arqs))
        assert env.run() == 2
        assert len(env.queue) == 1
        assert env.row(arqs[0])["state"] == "Bound"
        env.run(10)
        # A new notification is checked before the failure is repeated.
        new = env.add_bound_arq(cards[1], allocated=False)
        env.notify("instance.delete.end", env.instance(new))
        env.placement.queries.clear()
        assert env.run(30) == 1
        assert env.placement.queries == [cards[1].provider, first]
    env.placement.before_answer = lambda: None
    env.fake.servers.clear()
    assert env.run(100) == 1
    assert len(env.queue) == 0


def test_one_server_that_nova_cannot_show_delays_only_itself(
    sqlite_env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = sqlite_env
    card = env.add_card(handles=8)
    arqs = [env.add_bound_arq(card, allocated=False) for _ in range(5)]
    failing = {env.instance(arq) for arq in arqs[:3]}
    show = env.fake.show

    def answer(path: str) -> tuple[int | None, Any]:
        return (500, {}) if path.rsplit("/", maxsplit=1)[-1] in failing else show(path)

    monkeypatch.setattr(env.fake, "show", answer)
    env.notify("instance.delete.end", *map(env.instance, arqs))
    assert env.run() == 0
    # The third failure ended the queries; then the servers that failed come last.
    assert env.run(10) == 2
    failing.clear()
    assert env.run(100) == 3


def test_failure_to_end_attachments_is_logged(
    sqlite_env: Env, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = sqlite_env
    monkeypatch.setattr(env.watcher, "_end_attachments", _fail)
    arqs = [env.add_bound_arq(env.add_card(), allocated=False)]
    env.notify("instance.delete.end", *map(env.instance, arqs))
    assert env.run() == 1
    assert len(env.queue) == 0
    assert [r.levelname for r in caplog.records if "Cannot end attachments" in r.getMessage()] == [
        "ERROR"
    ]
