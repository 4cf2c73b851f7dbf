# SPDX-License-Identifier: Apache-2.0
"""FanOut: the thread limit is per object, and all batches are served."""

import threading
from collections.abc import Iterator

import pytest

from cyborg.conductor.drivers.rollout_steps import GenerationNotifier, HostGeneration
from cyborg.core.errors import TimedOut
from cyborg.threads.calls import MAX_THREADS, FanOut

LONG = 120.0


class Agents:
    """Fake agents that answer once ``may_answer`` is set."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.lock = threading.Lock()
        self.called: list[str] = []
        self.active = self.max_active = 0
        self.started = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)

    def call(self, host: str) -> None:
        with self.lock:
            self.called.append(host)
            self.active += 1
            self.max_active = max(self.max_active, self.active)
        self.started.release()
        self.may_answer.wait(LONG)
        with self.lock:
            self.active -= 1
        self.ended.release()

    def sync_backends(self, host: str, generation: int) -> dict[str, int]:
        self.call(f"{host}={generation}")
        raise TimedOut("no answer")


def wait(semaphore: threading.Semaphore, count: int) -> None:
    for _ in range(count):
        assert semaphore.acquire(timeout=LONG)


@pytest.fixture
def agents() -> Iterator[Agents]:
    agents = Agents()
    yield agents
    agents.may_answer.set()


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_threads_of_many_batches_are_limited(agents: Agents) -> None:
    fan_out = FanOut("bounded-calls")
    for batch in range(20):
        fan_out.submit(agents.call, [f"{batch}-{n}" for n in range(10)])
    wait(agents.started, MAX_THREADS)
    running = threads("bounded-calls")
    assert len(running) == MAX_THREADS
    assert all(thread.daemon for thread in running)
    agents.may_answer.set()
    wait(agents.ended, 200)
    assert (len(set(agents.called)), agents.max_active) == (200, MAX_THREADS)
    for thread in running:
        thread.join(LONG)
    assert threads("bounded-calls") == [], "idle threads end"
    fan_out.submit(agents.call, ["again"])
    wait(agents.ended, 1)


def test_small_batch_does_not_wait_for_large_one(agents: Agents) -> None:
    fan_out = FanOut("fair-calls")
    fan_out.submit(agents.call, [f"large-{n}" for n in range(500)])
    wait(agents.started, MAX_THREADS)
    fan_out.submit(agents.call, ["small-0", "small-1"])
    agents.may_answer.set()
    wait(agents.ended, 502)
    position = agents.called.index("small-1")
    assert position <= 2 * MAX_THREADS + 4


def test_stop_starts_no_more_calls(agents: Agents) -> None:
    fan_out = FanOut("stopped-calls")
    fan_out.submit(agents.call, [str(n) for n in range(100)])
    wait(agents.started, MAX_THREADS)
    fan_out.stop()
    agents.may_answer.set()
    wait(agents.ended, MAX_THREADS)
    fan_out.submit(agents.call, ["late"])
    for thread in threads("stopped-calls"):
        thread.join(LONG)
    assert len(agents.called) == MAX_THREADS


def test_notifications_of_unresponsive_hosts_do_not_accumulate(agents: Agents) -> None:
    notifier = GenerationNotifier(agents)  # type: ignore[arg-type]
    notifier.notify([HostGeneration(f"h{n}", 0) for n in range(MAX_THREADS)])
    wait(agents.started, MAX_THREADS)
    for generation in range(1, 50):
        notifier.notify([HostGeneration(name, generation) for name in ("late", "later")])
    agents.may_answer.set()
    wait(agents.ended, MAX_THREADS + 2)
    assert sorted(agents.called[MAX_THREADS:]) == ["late=49", "later=49"]
    notifier.stop()
