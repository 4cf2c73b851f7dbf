# SPDX-License-Identifier: Apache-2.0
"""Delivery order and leases with several conductors."""

import threading
from collections.abc import Sequence

from cyborg.conductor.notifications.notifications import NOVA_EVENT
from cyborg.conductor.notifications.outbox import BATCH, Channel, OutboxWorker
from cyborg.db.outbox import write as store
from cyborg.tests.fixtures.databases.outbox import Env, env, sqlite_env

__all__ = ["env", "sqlite_env"]


def test_two_conductors_deliver_once(env: Env) -> None:
    env.add_events("a")
    env.add_events("b", server="server-2")
    assert env.lease("other", limit=1) == ["a"]
    assert env.outbox.run_once() == 1
    assert env.nova.tags == ["b"]


def test_lease_of_killed_conductor_expires(env: Env) -> None:
    env.add_events("a")
    assert env.lease("killed") == ["a"]
    env.clock.seconds = 59
    assert env.new_outbox().run_once() == 0
    env.clock.seconds = 61
    assert env.new_outbox().run_once() == 1


def test_events_of_an_instance_share_a_post(env: Env) -> None:
    """Leases and POSTs do not split the events of an instance."""
    for n in range(BATCH // 3 + 1):
        env.add_events(*(f"{n}.{k}" for k in range(3)), server=f"server-{n:02}")
    assert env.outbox.run_once() == 3 * (BATCH // 3 + 1)
    assert max(map(len, env.batches())) <= BATCH
    for n in range(BATCH // 3 + 1):
        own_tags = [f"{n}.{k}" for k in range(3)]
        assert [
            b for b in env.batches() if set(own_tags) & set(b) and not set(own_tags) <= set(b)
        ] == []
        assert [tag for tag in env.nova.tags if tag in own_tags] == own_tags


def test_later_events_wait_for_failed_batch_of_same_instance(env: Env) -> None:
    env.nova.refused_servers = {"server-1"}
    tags = [f"{n:03}" for n in range(BATCH + 5)]
    env.add_events(*tags)
    env.add_events("z", server="server-2")
    assert env.outbox.run_once() == 1
    assert env.batches() == [tags[:BATCH], ["z"]]
    assert {row["attempts"] for row in env.rows()} == {1}
    env.nova.refused_servers = set()
    env.clock.seconds = 2
    assert env.outbox.run_once() == BATCH + 5
    assert env.nova.tags[BATCH + 1 :] == tags


def test_new_event_is_sent_with_older_one_of_same_instance(env: Env) -> None:
    env.nova.codes = {"a": 500}
    env.add_events("a")
    env.add_events("x", server="server-2")
    assert env.outbox.run_once() == 1
    (before,) = env.rows()
    env.nova.calls.clear()
    env.add_events("b")
    assert env.outbox.run_once() == 1
    assert env.batches() == [["a", "b"]]
    (after,) = env.rows()
    # It was sent early, which does not count as an attempt.
    assert (after["attempts"], after["next_try_at"]) == (1, before["next_try_at"])
    assert (after["owner"], after["lease_until"]) == (None, None)


def test_event_does_not_overtake_one_leased_by_another_conductor(env: Env) -> None:
    env.add_events("a")
    assert env.lease("other") == ["a"]
    env.add_events("b")
    env.add_events("c", server="server-2")
    assert env.outbox.run_once() == 1
    assert env.nova.tags == ["c"]
    first = env.rows()[0]["id"]
    assert env.uow.run(lambda tx: store.delete_delivered(tx, "other", [first])) == 1
    assert env.outbox.run_once() == 1
    assert env.nova.tags == ["c", "b"]


def test_concurrent_conductors_deliver_once_and_in_order(env: Env) -> None:
    servers = [f"server-{n}" for n in range(40)]
    for k in range(4):
        for server in servers:
            env.add_events(f"{server}/{k}", server=server)
    workers = [env.new_outbox() for _ in range(4)]
    threads = [threading.Thread(target=worker.run_once) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    env.outbox.run_once()
    assert env.rows() == []
    assert len(env.nova.tags) == 160
    for server in servers:
        own_tags = [tag for tag in env.nova.tags if tag.startswith(f"{server}/")]
        assert own_tags == [f"{server}/{k}" for k in range(4)]


def test_stop_ends_after_current_request_and_releases_the_rest(sqlite_env: Env) -> None:
    for n in range(BATCH + 5):
        sqlite_env.add_events(f"{n:03}", server=f"server-{n:03}")
    batch_sizes: list[int] = []

    def send(payloads: Sequence[object]) -> list[None]:
        batch_sizes.append(len(payloads))
        worker.stop()
        return [None] * len(payloads)

    channel = Channel(NOVA_EVENT, "a destination", send, 5.0, 30.0)
    worker = OutboxWorker(sqlite_env.conf, sqlite_env.uow, channel, now=sqlite_env.clock.now)
    assert worker.run_once() == BATCH
    assert batch_sizes == [BATCH]
    remaining = sqlite_env.rows()
    assert (len(remaining), {row["owner"] for row in remaining}) == (5, {None})
    assert sqlite_env.new_outbox().run_once() == 5
