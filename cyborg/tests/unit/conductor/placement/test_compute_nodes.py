# SPDX-License-Identifier: Apache-2.0
"""Lookup of the compute node of a host in a real Placement."""

import logging
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.clients.placement import Placement, ProviderSummary
from cyborg.conductor.placement import compute_nodes as module
from cyborg.conductor.placement.compute_nodes import LIST_TTL, RESULT_TTL, ComputeNodeResolver
from cyborg.core.errors import NotFound, TimedOut, Unavailable
from cyborg.core.hosts import Identity
from cyborg.db import schema
from cyborg.db.services import write as services
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.placement import placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import make_publisher
from cyborg.tests.fixtures.hosts.hosts import Host, card, make_hosts

__all__ = ["placement_adapter"]


class Env:
    """ComputeNodeResolver with a database and a Placement; provider names are unique per test."""

    def __init__(self, engine: sa.Engine, client: Any) -> None:
        self.engine, self.client, self.seconds, self.created = engine, client, 0.0, [""]
        self.tag = uuid4().hex[:8]
        self.calls = CountingPlacement(client)
        self.resolver = ComputeNodeResolver(
            self.calls, UnitOfWork(engine), clock=lambda: self.seconds
        )

    def node(self, name: str, parent: str | None = None) -> str:
        """Create a provider as nova-compute does when it first starts; return the uuid."""
        uuid = str(uuid4())
        body = {"name": self.unique_name(name), "uuid": uuid, "parent_provider_uuid": parent}
        assert self.client.post("/resource_providers", json=body).status_code == 200
        self.created.append(uuid)
        return uuid

    def unique_name(self, name: str) -> str:
        """Return the name with a tag that is unique for this test."""
        first, dot, domain = name.partition(".")
        return f"{first}-{self.tag}{dot}{domain}"

    def agent(self, name: str, *names: str, **fields: Any) -> str:
        """Report an agent with this identity; return the name of its host."""
        host = Host(self.unique_name(name))
        host.identity = Identity(names=tuple(self.unique_name(alias) for alias in names), **fields)
        host.send(make_hosts(self.engine), card())
        return host.name

    def find(self, host: str) -> str:
        return self.resolver.find(host).uuid

    def not_found_message(self, host: str) -> str:
        with pytest.raises(NotFound) as caught:
            self.resolver.find(host)
        return caught.value.message

    def clean(self) -> None:
        for uuid in reversed(self.created[1:]):
            self.client.delete(f"/resource_providers/{uuid}")


class CountingPlacement(Placement):
    """Placement client that counts calls; listing all root providers raises ``list_error``."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.count = 0
        self.lists = 0
        self.list_error: Exception | None = None

    def _call(self, verb: str, path: str, *allowed: int, **keywords: Any) -> Any:
        self.count += 1
        return super()._call(verb, path, *allowed, **keywords)

    def root_providers(self) -> list[ProviderSummary]:
        self.lists += 1
        if self.list_error is not None:
            raise self.list_error
        return super().root_providers()


@pytest.fixture
def env(sqlite_engine: sa.Engine, placement_adapter: Any) -> Iterator[Env]:
    created = Env(sqlite_engine, placement_adapter)
    yield created
    created.clean()


def test_configured_provider_takes_precedence(env: Env) -> None:
    configured, other = env.node("nova-name"), env.node("h1")
    by_name = env.agent("h1", provider=env.unique_name("nova-name"), compute_id=other)
    by_uuid = env.agent("h2", provider=configured.upper())
    assert env.find(by_name) == configured
    assert env.find(by_uuid) == configured


def test_compute_id_precedes_host_name(env: Env) -> None:
    env.node("h1")
    second, third = env.node("h2"), env.node("h3")
    assert env.find(env.agent("h1", compute_id=second)) == second
    assert env.find(env.agent("h2", compute_id=str(uuid4()))) == second
    assert env.find(env.unique_name("h3")) == third, "for a host whose agent never reported"


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
def test_other_spelling_of_host_name_is_found(
    env: Env, host: str, names: tuple[str, ...], nova: str
) -> None:
    uuid = env.node(nova)
    env.node("h10")
    assert env.find(env.agent(host, *names)) == uuid


def test_ambiguous_names_raise_not_found(env: Env, caplog: pytest.LogCaptureFixture) -> None:
    env.node("h1.a")
    env.node("h1.b")
    host = env.agent("h1")
    message = env.not_found_message(host)
    for name in ("h1.a", "h1.b"):
        assert repr(env.unique_name(name)) in message
    assert "[agent] resource_provider" in message
    assert caplog.text.count("is ambiguous") == 1


def test_name_of_another_host_is_not_used(env: Env) -> None:
    uuid = env.node("h1")
    assert env.find(env.agent("h1")) == uuid
    env.not_found_message(env.agent("other", "h1"))


def test_provider_with_parent_is_no_compute_node(env: Env) -> None:
    above = env.node("above")
    below = env.node("h1", parent=above)
    assert "nova-compute creates" in env.not_found_message(env.agent("h1", compute_id=below))
    assert "is not a compute node" in env.not_found_message(env.agent("h2", provider=below))
    assert "set by [agent] resource_provider" in env.not_found_message(
        env.agent("h3", provider="no such")
    )


def test_missing_compute_node_is_logged_once_with_similar_names(
    env: Env, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    env.node("compute-01")
    host = env.agent("compute-1")
    caplog.clear()
    message = {env.not_found_message(host) for _ in range(5)}
    assert len(message) == 1
    assert env.unique_name("compute-01") in message.pop()
    assert caplog.text.count("similar names") == 1
    env.not_found_message(env.agent("compute-1", provider="no such"))
    assert "set by [agent] resource_provider" in caplog.text, "another reason is logged"
    uuid = env.node("compute-1")
    assert env.find(env.agent("compute-1")) == uuid
    assert "Found compute node" in caplog.text


def test_root_providers_are_listed_once_a_minute(env: Env) -> None:
    hosts = [env.agent(f"h{n}") for n in range(5)]
    for _ in range(3):
        for host in hosts:
            env.not_found_message(host)
    assert env.calls.lists == 1
    uuid = env.node("H0")
    env.not_found_message(hosts[0])
    env.seconds += LIST_TTL
    assert env.find(hosts[0]) == uuid
    assert env.calls.lists == 2


@pytest.mark.parametrize("list_error", [TimedOut("30 s"), Unavailable("no memory")])
def test_failed_list_of_root_providers_affects_no_other_host(
    env: Env, list_error: Exception
) -> None:
    env.calls.list_error = list_error
    assert "cannot list all root providers: " in env.not_found_message(env.agent("h1"))
    uuid = env.node("h2")
    assert env.find(env.agent("h2")) == uuid


def test_cached_result_costs_no_call_and_one_statement(env: Env) -> None:
    nodes = {env.agent(f"h{n}"): env.node(f"h{n}") for n in range(5)}
    assert {host: env.find(host) for host in nodes} == nodes
    calls = env.calls.count
    with count_statements(env.engine) as count:
        env.resolver.preload(env.resolver.uow.run(lambda tx: services.identities(tx, nodes)))
        assert {host: env.find(host) for host in nodes} == nodes
    assert (env.calls.count, len(count)) == (calls, 1)
    first = next(iter(nodes))
    env.resolver.forget(first)
    env.find(first)
    assert env.calls.count > calls
    calls = env.calls.count
    env.seconds += RESULT_TTL
    env.find(first)
    assert env.calls.count > calls


def test_cache_size_is_limited(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HOSTS", 2)
    hosts = [env.agent(f"h{n}") for n in range(5)]
    for n, host in enumerate(hosts):
        env.not_found_message(host)
        env.node(f"h{n}")
        env.find(host)
    assert (len(env.resolver._cache), len(env.resolver._last_error)) == (2, 0)
    for n in range(5):
        env.not_found_message(env.agent(f"g{n}"))
    assert len(env.resolver._last_error) == 2


def test_changed_identity_moves_providers_of_the_host(
    engine: sa.Engine, placement_adapter: Any
) -> None:
    env = Env(engine, placement_adapter)
    first, second = env.node("h1"), env.node("h2")
    host = Host(env.unique_name("h1"))
    woken: list[None] = []
    hosts = make_hosts(engine, woken)
    host.send(hosts, card(), card(1))
    publish = make_publisher(engine, Placement(placement_adapter))
    assert publish.run_once() == 2
    tree = publish.placement.tree
    assert len(tree(first)) == 3
    woken.clear()
    host.identity = Identity(compute_id=second)
    host.send(hosts, card(), card(1))
    assert len(woken) == 1
    (agent,) = rows.read(engine, schema.services)
    assert agent["identity"]["compute_id"] == second
    assert publish.run_once() == 2
    assert (len(tree(first)), len(tree(second))) == (1, 3)
    host.send(hosts, card(), card(1, serial="new"))
    assert sum(row["stale_since"] is not None for row in rows.read(engine, schema.providers)) == 1
