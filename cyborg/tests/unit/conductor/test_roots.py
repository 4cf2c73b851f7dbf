# SPDX-License-Identifier: Apache-2.0
"""A host's compute node in a real Placement, by whatever name Nova has for it."""

import logging
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.clients.placement import Known, Placement
from cyborg.conductor import roots as module
from cyborg.conductor.roots import FRESH, LISTED, Roots
from cyborg.core.errors import NotFound, TimedOut, Unavailable
from cyborg.core.identity import Identity
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.embedded import placement_adapter
from cyborg.fixtures.hosts import Host, card, rooms
from cyborg.fixtures.publishing import publisher

__all__ = ["placement_adapter"]


class Bed:
    """Roots between a database and a Placement, with names that no other test has."""

    def __init__(self, engine: sa.Engine, client: Any) -> None:
        self.engine, self.client, self.seconds, self.made = engine, client, 0.0, [""]
        self.tag = uuid4().hex[:8]
        self.calls = Counted(client)
        self.roots = Roots(self.calls, UnitOfWork(engine), clock=lambda: self.seconds)

    def node(self, name: str, parent: str | None = None) -> str:
        """Do what nova-compute does when it first starts; return the uuid."""
        uuid = str(uuid4())
        body = {"name": self.named(name), "uuid": uuid, "parent_provider_uuid": parent}
        assert self.client.post("/resource_providers", json=body).status_code == 200
        self.made.append(uuid)
        return uuid

    def named(self, name: str) -> str:
        """Return a name of this test's own."""
        first, dot, domain = name.partition(".")
        return f"{first}-{self.tag}{dot}{domain}"

    def agent(self, name: str, *names: str, **known: Any) -> str:
        """Have an agent report this of itself; return its host's name."""
        host = Host(self.named(name))
        host.identity = Identity(names=tuple(self.named(one) for one in names), **known)
        host.tell(rooms(self.engine), card())
        return host.name

    def find(self, host: str) -> str:
        return self.roots.find(host).uuid

    def missing(self, host: str) -> str:
        with pytest.raises(NotFound) as caught:
            self.roots.find(host)
        return caught.value.message

    def clean(self) -> None:
        for uuid in reversed(self.made[1:]):
            self.client.delete(f"/resource_providers/{uuid}")


class Counted(Placement):
    """Placement, with the calls counted; ``trouble`` is what asking for all of it raises."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.count = 0
        self.lists = 0
        self.trouble: Exception | None = None

    def _call(self, verb: str, path: str, *allowed: int, **more: Any) -> Any:
        self.count += 1
        return super()._call(verb, path, *allowed, **more)

    def roots(self) -> list[Known]:
        self.lists += 1
        if self.trouble is not None:
            raise self.trouble
        return super().roots()


@pytest.fixture
def bed(sqlite_engine: sa.Engine, placement_adapter: Any) -> Iterator[Bed]:
    made = Bed(sqlite_engine, placement_adapter)
    yield made
    made.clean()


def test_what_the_operator_configured_comes_first(bed: Bed) -> None:
    named, other = bed.node("nova-name"), bed.node("h1")
    by_name = bed.agent("h1", provider=bed.named("nova-name"), compute_id=other)
    by_uuid = bed.agent("h2", provider=named.upper())
    assert bed.find(by_name) == named
    assert bed.find(by_uuid) == named


def test_then_novas_own_file_and_then_the_name(bed: Bed) -> None:
    bed.node("h1")
    second, third = bed.node("h2"), bed.node("h3")
    assert bed.find(bed.agent("h1", compute_id=second)) == second
    assert bed.find(bed.agent("h2", compute_id=str(uuid4()))) == second
    assert bed.find(bed.named("h3")) == third, "of an agent that never spoke"


@pytest.mark.parametrize(
    ("host", "names", "nova"),
    [
        ("h1", (), "H1"),
        ("h1.example.com", (), "h1"),
        ("h1", (), "h1.example.com"),
        ("alias", ("h1", "h1.example.com"), "h1.example.com"),
        ("alias", ("H1.EXAMPLE.COM",), "h1"),
    ],
    ids=str,
)
def test_any_spelling_is_found(bed: Bed, host: str, names: tuple[str, ...], nova: str) -> None:
    uuid = bed.node(nova)
    bed.node("h10")
    assert bed.find(bed.agent(host, *names)) == uuid


def test_two_that_it_may_be_are_none(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    bed.node("h1.a")
    bed.node("h1.b")
    host = bed.agent("h1")
    told = bed.missing(host)
    for name in ("h1.a", "h1.b"):
        assert repr(bed.named(name)) in told
    assert "[agent] resource_provider" in told
    assert caplog.text.count("more than one resource provider") == 1


def test_a_name_that_is_another_hosts_is_not_taken(bed: Bed) -> None:
    uuid = bed.node("h1")
    assert bed.find(bed.agent("h1")) == uuid
    bed.missing(bed.agent("other", "h1"))


def test_only_a_provider_without_a_parent_counts(bed: Bed) -> None:
    above = bed.node("above")
    below = bed.node("h1", parent=above)
    assert "nova-compute makes it" in bed.missing(bed.agent("h1", compute_id=below))
    assert "no compute node" in bed.missing(bed.agent("h2", provider=below))
    assert "names" in bed.missing(bed.agent("h3", provider="no such"))


def test_what_is_missing_is_said_once_with_what_is_near(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bed.node("compute-01")
    host = bed.agent("compute-1")
    caplog.clear()
    told = {bed.missing(host) for _ in range(5)}
    assert len(told) == 1
    assert bed.named("compute-01") in told.pop()
    assert caplog.text.count("nearest names") == 1
    bed.missing(bed.agent("compute-1", provider="no such"))
    assert "which [agent] resource_provider" in caplog.text, "another reason is said"
    uuid = bed.node("compute-1")
    assert bed.find(bed.agent("compute-1")) == uuid
    assert "its compute node is" in caplog.text


def test_all_of_placement_is_asked_for_once_a_minute(bed: Bed) -> None:
    hosts = [bed.agent(f"h{n}") for n in range(5)]
    for _ in range(3):
        for host in hosts:
            bed.missing(host)
    assert bed.calls.lists == 1
    uuid = bed.node("H0")
    bed.missing(hosts[0])
    bed.seconds += LISTED
    assert bed.find(hosts[0]) == uuid
    assert bed.calls.lists == 2


@pytest.mark.parametrize("trouble", [TimedOut("30 s"), Unavailable("no memory")])
def test_a_list_that_is_too_large_stops_nobody(bed: Bed, trouble: Exception) -> None:
    bed.calls.trouble = trouble
    assert "could not be read: " in bed.missing(bed.agent("h1"))
    uuid = bed.node("h2")
    assert bed.find(bed.agent("h2")) == uuid


def test_what_is_known_costs_no_call_and_one_statement_for_all(bed: Bed) -> None:
    found = {bed.agent(f"h{n}"): bed.node(f"h{n}") for n in range(5)}
    assert {host: bed.find(host) for host in found} == found
    calls = bed.calls.count
    with counting(bed.engine) as count:
        bed.roots.prepare(found.keys())
        assert {host: bed.find(host) for host in found} == found
    assert (bed.calls.count, len(count)) == (calls, 1)
    first = next(iter(found))
    bed.roots.forget(first)
    bed.find(first)
    assert bed.calls.count > calls
    calls = bed.calls.count
    bed.seconds += FRESH
    bed.find(first)
    assert bed.calls.count > calls


def test_memory_is_bounded(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HOSTS", 2)
    found = [bed.agent(f"h{n}") for n in range(5)]
    for n, host in enumerate(found):
        bed.missing(host)
        bed.node(f"h{n}")
        bed.find(host)
    assert (len(bed.roots._found), len(bed.roots._said)) == (2, 0)
    for n in range(5):
        bed.missing(bed.agent(f"g{n}"))
    assert len(bed.roots._said) == 2


def test_another_identity_moves_what_the_host_has(
    engine: sa.Engine, placement_adapter: Any
) -> None:
    bed = Bed(engine, placement_adapter)
    first, second = bed.node("h1"), bed.node("h2")
    host = Host(bed.named("h1"))
    woken: list[None] = []
    hosts = rooms(engine, woken)
    host.tell(hosts, card(), card(1))
    publish = publisher(engine, Placement(placement_adapter))
    assert publish.run_once() == 2
    tree = publish._placement.tree
    assert len(tree(first)) == 3
    woken.clear()
    host.identity = Identity(compute_id=second)
    host.tell(hosts, card(), card(1))
    assert len(woken) == 1
    (agent,) = rows.read(engine, schema.services)
    assert agent["identity"]["compute_id"] == second
    assert publish.run_once() == 2
    assert (len(tree(first)), len(tree(second))) == (1, 3)
    host.tell(hosts, card(), card(1, serial="new"))
    assert sum(row["stale_since"] is not None for row in rows.read(engine, schema.providers)) == 1
