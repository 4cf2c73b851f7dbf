# SPDX-License-Identifier: Apache-2.0
"""The queue of instances to check: coalesced, ordered, limited."""

import threading
from dataclasses import replace

from cyborg.conductor.orphans.watcher import Added, HintQueue
from cyborg.core.orphans.hints import Hint


def hint(instance: str, due: float = 1.0, checks: int = 1) -> Hint:
    return Hint(instance, due, received=0.0, checks=checks)


def test_add_instance_twice_coalesces() -> None:
    queue = HintQueue()
    assert queue.add(hint("a", 60.0)) is Added.QUEUED
    assert queue.add(hint("a", 2.0, checks=3)) is Added.COALESCED
    assert len(queue) == 1
    assert list(queue.take_due(2.0, 10)) == [replace(hint("a", 2.0, checks=3), last=60.0)]


def test_add_to_full_queue_drops_only_new_instances() -> None:
    queue = HintQueue(max_instances=2)
    assert [queue.add(hint(name)) for name in "aba"] == ["queued", "queued", "coalesced"]
    assert queue.add(hint("c")) is Added.DROPPED
    queue.take_due(1.0, 1)
    assert queue.add(hint("c")) is Added.QUEUED


def test_take_due_returns_the_longest_due_first_up_to_the_limit() -> None:
    queue = HintQueue()
    for name, due in (("late", 9.0), ("b", 2.0), ("a", 1.0), ("c", 3.0)):
        queue.add(hint(name, due))
    assert [one.instance for one in queue.take_due(5.0, 2)] == ["a", "b"]
    assert [one.instance for one in queue.take_due(5.0, 2)] == ["c"]
    assert list(queue.take_due(5.0, 2)) == []
    assert len(queue) == 1


def test_take_due_returns_the_least_failures_first() -> None:
    queue = HintQueue()
    queue.add(replace(hint("failed", 1.0), failures=1))
    queue.add(hint("new", 2.0))
    assert [one.instance for one in queue.take_due(5.0, 1)] == ["new"]


def test_concurrent_hints_are_all_queued() -> None:
    queue = HintQueue()

    def add(number: int) -> None:
        for n in range(200):
            queue.add(hint(f"{number}-{n}"))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(queue.take_due(1.0, 10_000)) == 1600
