# SPDX-License-Identifier: Apache-2.0
"""Nova stops at any request of an attach, its undo or a detach, and works again later.

Each ends finished or undone, and no device that a guest may have is free meanwhile.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.testing.fake_nova import FakeNova, serve_nova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.tiers import pick_points, sample

__all__ = ["node", "placement_adapter"]

HOST_WORK = ("prepares", "sanitises")
TIMEOUT = 60.0  # seconds after which an attach is undone
SHORT, LONG = 10.0, 150.0  # seconds that Nova is away
ROUNDS = 400
REFUSED = "refused"  # the request and all following ones get 503
UNANSWERED = "unanswered"  # the request is executed, but neither it nor a following one is answered
LOST = "lost"  # as UNANSWERED, but nova-compute does not execute the recorded reboot


class OutageNova(FakeNova):
    """A double that stops at a request, given by its number, until it is started again."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.lost = 0  # reboots that were recorded and not executed
        self.is_away = False
        self.compose: Callable[[], None] = lambda: None
        self._stop_at = 0
        self._kind = REFUSED

    def prepare(self, stop_at: int, kind: str) -> None:
        """Count requests from now on, and stop at one of them; 0 means none."""
        self.requests, self.lost = 0, 0
        self._stop_at, self._kind = stop_at, kind

    def start(self) -> None:
        """Answer all requests from now on."""
        self.is_away, self._stop_at = False, 0

    def show(self, path: str) -> tuple[int | None, Any]:
        """Answer a request to read, unless Nova is away."""
        self._count()
        return self._failure() if self.is_away else super().show(path)

    def act(self, path: str, body: Any) -> tuple[int | None, Any]:
        """Reboot a server, unless Nova is away, and give its guest the accelerators."""
        is_last = self._count() and self._kind != REFUSED
        if self.is_away and not is_last:
            return self._failure()
        is_lost = is_last and self._kind == LOST
        self.result = None if is_lost else "Success"
        status, answer = super().act(path, body)
        if status == 202 and is_lost:
            self.lost += 1
        elif status == 202:
            self.compose()
        return self._failure() if is_last else (status, answer)

    def _count(self) -> bool:
        """Count a request; return whether Nova stops at it."""
        self.requests += 1
        stops = self.requests == self._stop_at
        self.is_away |= stops
        return stops

    def _failure(self) -> tuple[int | None, Any]:
        return (503 if self._kind == REFUSED else None), {"message": "Nova is away"}


class OutageEnv(Env):
    """A server whose guest has the accelerators that Nova found at its last start."""

    nova: OutageNova
    guest: frozenset[str]  # uuids of handles
    composed: int = 0  # starts of the guest

    def add_server(self, **fields: Any) -> str:
        """Add a server with a guest."""
        self.instance = super().add_server(**fields)
        self.nova.compose = self._compose
        self._compose()
        self.composed = 0
        return self.instance

    def run(self, seconds: float, *, detaches: bool) -> None:
        """Run the conductor and the host until no work is left; start Nova again after a time.

        ``detaches`` is whether an attachment is detached: it keeps its device while Nova is away.
        """
        away_until = None
        for _ in range(ROUNDS):
            self.runner.run_once()
            self.runner.sweep()
            self.finish_jobs()
            self.check_guest()
            if self.nova.is_away and detaches:
                assert (self.owned(), self.allocated()) == (2, 2)
            if self.nova.is_away and away_until is None:
                away_until = self.now + timedelta(seconds=seconds)
            if away_until is not None and self.now >= away_until:
                self.nova.start()
            if not self.nova.is_away and not self.working():
                return
            self.now += timedelta(seconds=seconds / 5 if self.nova.is_away else 10)
        raise AssertionError(f"work left: {self.working()}")

    def request(self, call: Callable[[], object]) -> bool:
        """Make a request of a user; return whether Nova stopped in it, and repeat it then."""
        before = [self._snapshot(), self.owned(), self.allocated()]
        try:
            call()
        except Unavailable:
            assert self.nova.is_away
            assert [self._snapshot(), self.owned(), self.allocated()] == before
            self.nova.start()
            call()
            return True
        return False

    def check_guest(self) -> None:
        """Assert that no device of the guest is free."""
        handles = rows.read(self.engine, schema.attach_handles)
        free = {row["uuid"] for row in handles if row["arq_id"] is None}
        assert not self.guest & free, self.rows()
        self.check_guests()

    def _compose(self) -> None:
        self.guest = frozenset(str(arq["attach_handle_uuid"]) for arq in self.listed())
        self.composed += 1

    def _snapshot(self) -> list[tuple[Any, ...]]:
        return [(row["uuid"], row["state"], row["step"]) for row in self.rows()]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A request, and how it ends.

    ``reboot`` is whether a reboot is requested, ``refused`` whether Nova refuses it.
    """

    is_detach: bool
    reboot: bool = False
    refused: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    requests: int = 1  # to Nova at least, without an outage

    def prepare(self, env: OutageEnv) -> None:
        """Attach what is detached later."""
        env.nova.reboot_status = 409 if self.refused else 202
        if self.is_detach:
            env.attach(reboot=self.reboot, **self.fields)
            env.run(0, detaches=False)
            assert env.check() == "attached"
            env.nova.reboots.clear()
            env.composed = 0

    def run(self, env: OutageEnv, seconds: float) -> bool:
        """Run the request to its end; return whether Nova was away when it was made."""

        def call() -> None:
            if self.is_detach:
                env.detach(reboot=self.reboot)
            else:
                env.attach(reboot=self.reboot, **self.fields)

        repeated = env.request(call)
        env.run(seconds, detaches=self.is_detach)
        return repeated

    def end(self, env: OutageEnv, seconds: float, *, repeated: bool) -> str:
        """Return the state that the attachment must have at the end."""
        if self.is_detach:
            return "detached"
        if self.refused:
            return "error"
        # A guest that may have the devices keeps them; without a reboot none has them.
        in_time = repeated or seconds < TIMEOUT
        return "attached" if in_time or env.nova.reboots else "error"


SCENARIOS = {
    "attach": Scenario(is_detach=False, requests=3),
    "attach with a reboot": Scenario(is_detach=False, reboot=True, requests=9),
    "attach live": Scenario(is_detach=False, fields={"mode": "live"}, requests=3),
    "undo": Scenario(is_detach=False, reboot=True, refused=True, requests=12),
    "detach": Scenario(is_detach=True, requests=4),
    "detach with a reboot": Scenario(is_detach=True, reboot=True, requests=6),
    "detach live": Scenario(is_detach=True, fields={"mode": "live"}, requests=2),
}
REBOOTS = ("attach with a reboot", "detach with a reboot")
CASES = [
    *((name, *case) for name in SCENARIOS for case in ((UNANSWERED, SHORT), (REFUSED, LONG))),
    *(
        (name, *case)
        for name in REBOOTS
        for case in ((UNANSWERED, LONG), (LOST, SHORT), (LOST, LONG))
    ),
]
# In the default tier: one that ends finished, and one whose device the guest keeps meanwhile.
CHOSEN = [
    ("attach with a reboot", UNANSWERED, SHORT),
    ("detach with a reboot", REFUSED, LONG),
]
# With --all.
MORE = [
    *((name, UNANSWERED, SHORT) for name in ("attach", "undo", "detach", *REBOOTS)),
    *((name, REFUSED, LONG) for name in REBOOTS),
    ("attach live", UNANSWERED, SHORT),
    ("detach live", REFUSED, LONG),
    *((name, LOST, LONG) for name in REBOOTS),
]


@pytest.fixture
def nova() -> Iterator[OutageNova]:
    with serve_nova(OutageNova()) as served:
        assert isinstance(served, OutageNova)
        yield served


@pytest.mark.parametrize(
    ("name", "kind", "seconds"),
    [
        *sample(MORE, *CHOSEN),
        *sample([case for case in CASES if case not in MORE], mark=pytest.mark.long),
    ],
)
def test_nova_away_from_any_request_on_ends_finished_or_undone(
    sqlite_engine: sa.Engine, node: Node, nova: OutageNova, name: str, kind: str, seconds: float
) -> None:
    scenario = SCENARIOS[name]
    env = OutageEnv(
        sqlite_engine,
        node,
        nova,
        handles=8,
        abilities=HOST_WORK,
        live="live" in name,
        attachment_timeout=TIMEOUT,
    )
    scenario.prepare(env)
    nova.prepare(0, kind)
    scenario.run(env, seconds)
    assert env.check() == scenario.end(env, 0, repeated=False)
    total = nova.requests
    assert total >= scenario.requests
    for number in (point + 1 for point in pick_points(total)):
        env.forget_server()
        env.start_conductor()
        scenario.prepare(env)
        nova.prepare(number, kind)
        repeated = scenario.run(env, seconds)
        assert nova.requests >= number
        end = env.check()
        assert end == scenario.end(env, seconds, repeated=repeated), number
        undone = not repeated and not scenario.is_detach and seconds > TIMEOUT
        check_reboots(env, scenario, end, undone=undone)


def check_reboots(env: OutageEnv, scenario: Scenario, end: str, *, undone: bool) -> None:
    """Assert that the guest was started once for a reboot, also if its outcome was unknown.

    ``undone`` is whether Nova was away too long for the attach. Then a reboot that was recorded and
    not executed is not repeated: the guest gets the devices at its next start.
    """
    lost = env.nova.lost if undone and end == "attached" else 0
    assert env.composed + lost == (scenario.reboot and end != "error")
    assert env.nova.reboots == [(env.instance, "HARD")] * (env.composed + env.nova.lost)
    if env.composed:
        assert env.guest == {arq["attach_handle_uuid"] for arq in env.listed()}
