# SPDX-License-Identifier: Apache-2.0
"""Who delivers what, in which order, when several conductors do."""

import threading
from collections.abc import Sequence

from cyborg.conductor.delivery import BATCH, Delivery, Route
from cyborg.conductor.events import EVENT
from cyborg.db.store import outbox as store
from cyborg.fixtures.outbox import Bed, bed, light

__all__ = ["bed", "light"]


def test_two_conductors_deliver_once(bed: Bed) -> None:
    bed.promise("a")
    bed.promise("b", server="server-2")
    assert bed.lease("other", limit=1) == ["a"]
    assert bed.outbox.run_once() == 1
    assert bed.nova.tags == ["b"]


def test_what_a_killed_conductor_leased_is_delivered_when_the_lease_ends(bed: Bed) -> None:
    bed.promise("a")
    assert bed.lease("killed") == ["a"]
    bed.clock.seconds = 59
    assert bed.another().run_once() == 0
    bed.clock.seconds = 61
    assert bed.another().run_once() == 1


def test_the_events_of_an_instance_share_a_post(bed: Bed) -> None:
    """The limit of a lease and that of a POST fall between instances, not into one."""
    for n in range(BATCH // 3 + 1):
        bed.promise(*(f"{n}.{k}" for k in range(3)), server=f"server-{n:02}")
    assert bed.outbox.run_once() == 3 * (BATCH // 3 + 1)
    assert max(map(len, bed.batches())) <= BATCH
    for n in range(BATCH // 3 + 1):
        mine = [f"{n}.{k}" for k in range(3)]
        assert [b for b in bed.batches() if set(mine) & set(b) and not set(mine) <= set(b)] == []
        assert [tag for tag in bed.nova.tags if tag in mine] == mine


def test_what_follows_a_batch_of_its_instance_that_failed_waits_for_it(bed: Bed) -> None:
    bed.nova.refused_servers = {"server-1"}
    tags = [f"{n:03}" for n in range(BATCH + 5)]
    bed.promise(*tags)
    bed.promise("z", server="server-2")
    assert bed.outbox.run_once() == 1
    assert bed.batches() == [tags[:BATCH], ["z"]]
    assert {row["attempts"] for row in bed.rows()} == {1}
    bed.nova.refused_servers = set()
    bed.clock.seconds = 2
    assert bed.outbox.run_once() == BATCH + 5
    assert bed.nova.tags[BATCH + 1 :] == tags


def test_a_new_event_brings_an_older_one_of_its_instance_along(bed: Bed) -> None:
    bed.nova.codes = {"a": 500}
    bed.promise("a")
    bed.promise("x", server="server-2")
    assert bed.outbox.run_once() == 1
    (before,) = bed.rows()
    bed.nova.calls.clear()
    bed.promise("b")
    assert bed.outbox.run_once() == 1
    assert bed.batches() == [["a", "b"]]
    (after,) = bed.rows()
    # It came along before its time, which costs it nothing.
    assert (after["attempts"], after["next_try_at"]) == (1, before["next_try_at"])
    assert (after["owner"], after["lease_until"]) == (None, None)


def test_an_event_does_not_overtake_one_that_another_conductor_delivers(bed: Bed) -> None:
    bed.promise("a")
    assert bed.lease("other") == ["a"]
    bed.promise("b")
    bed.promise("c", server="server-2")
    assert bed.outbox.run_once() == 1
    assert bed.nova.tags == ["c"]
    first = bed.rows()[0]["id"]
    assert bed.uow.run(lambda tx: store.done(tx, "other", [first])) == 1
    assert bed.outbox.run_once() == 1
    assert bed.nova.tags == ["c", "b"]


def test_many_conductors_at_once_deliver_each_once_and_in_order(bed: Bed) -> None:
    servers = [f"server-{n}" for n in range(40)]
    for k in range(4):
        for server in servers:
            bed.promise(f"{server}/{k}", server=server)
    several = [bed.another() for _ in range(4)]
    threads = [threading.Thread(target=one.run_once) for one in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bed.outbox.run_once()
    assert bed.rows() == []
    assert len(bed.nova.tags) == 160
    for server in servers:
        mine = [tag for tag in bed.nova.tags if tag.startswith(f"{server}/")]
        assert mine == [f"{server}/{k}" for k in range(4)]


def test_who_stops_ends_with_the_request_under_way_and_gives_the_rest_back(light: Bed) -> None:
    for n in range(BATCH + 5):
        light.promise(f"{n:03}", server=f"server-{n:03}")
    sent: list[int] = []

    def send(payloads: Sequence[object]) -> list[None]:
        sent.append(len(payloads))
        stopping.stop()
        return [None] * len(payloads)

    route = Route(EVENT, "a neighbour", send, 5.0, 30.0)
    stopping = Delivery(light.conf, light.uow, route, now=light.clock.now)
    assert stopping.run_once() == BATCH
    assert sent == [BATCH]
    left = light.rows()
    assert (len(left), {row["owner"] for row in left}) == (5, {None})
    assert light.another().run_once() == 5
