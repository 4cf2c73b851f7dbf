# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.hosts import Hosts
from cyborg.core import wire
from cyborg.core.errors import Conflict, Invalid, Stale
from cyborg.core.report import BackendState, BackendStatus
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.hosts import READY, Host, card, rooms
from cyborg.fixtures.options import make_conf


def test_a_new_host_is_asked_for_its_report_once(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host(devices=[card()])
    assert host.hello(hosts) == {"interval": 10.0, "report": True, "wanted": 0}
    assert host.hello(hosts)["report"] is True
    host.report(hosts)
    assert host.hello(hosts)["report"] is False
    (service,) = rows.read(engine, schema.services)
    assert (service["binary"], service["host"], service["status"]) == (
        "cyborg-agent",
        "compute-1",
        "READY",
    )
    (backend,) = rows.read(engine, schema.backends)
    assert (backend["name"], backend["status"], backend["error"]) == ("fake", "READY", None)


@pytest.mark.parametrize("devices", [1, 256])
def test_an_unchanged_hello_costs_one_statement_at_any_size(
    engine: sa.Engine, devices: int
) -> None:
    woken: list[None] = []
    hosts, host = rooms(engine, woken), Host()
    host.tell(hosts, *[card(n, 16) for n in range(devices)])
    woken.clear()
    with counting(engine) as count:
        assert host.hello(hosts)["report"] is False
    assert len(count) == 1
    assert not woken


def test_a_hello_moves_the_last_seen(engine: sa.Engine) -> None:
    now = timeutils.utcnow()
    hosts = Hosts(make_conf(), UnitOfWork(engine), now=lambda: now)
    host = Host()
    host.tell(hosts, card())
    now += timedelta(seconds=7)
    host.hello(hosts)
    (service,) = rows.read(engine, schema.services)
    assert service["last_seen_at"] == now
    assert service["started_at"] == now - timedelta(seconds=7)


def test_a_restarted_agent_with_the_same_host_need_not_report(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    host.tell(hosts, card())
    host.epoch, host.generation = str(uuid4()), 0
    assert host.hello(hosts)["report"] is False
    host.devices = [card(count=3)]
    assert host.hello(hosts)["report"] is True
    host.report(hosts)
    assert len(rows.read(engine, schema.attach_handles)) == 3


def test_a_report_of_another_life_is_refused(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    host.tell(hosts, card())
    old = replace(host)
    host.epoch, host.generation = str(uuid4()), 0
    host.hello(hosts)
    old.devices = []
    with pytest.raises(Stale):
        old.report(hosts)
    assert len(rows.read(engine, schema.devices)) == 1


def test_a_report_that_has_been_overtaken_is_refused(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    host.tell(hosts, card())
    late = host.message()
    host.tell(hosts, card(), card(1))
    with pytest.raises(Stale):
        hosts.report(late)
    assert len(rows.read(engine, schema.devices)) == 2


def test_a_report_of_an_unknown_host_is_refused(engine: sa.Engine) -> None:
    with pytest.raises(Stale):
        Host(devices=[card()]).report(rooms(engine))
    assert not rows.read(engine, schema.devices)


def test_backends_follow_and_their_errors_show(engine: sa.Engine) -> None:
    hosts, host = rooms(engine), Host()
    host.tell(hosts, card())
    sick = BackendState("gen0", "generic", BackendStatus.ERROR, "OSError: no bus")
    host.backends = [READY, sick]
    host.hello(hosts)
    shown = {b["name"]: (b["status"], b["error"]) for b in rows.read(engine, schema.backends)}
    assert shown == {"fake": ("READY", None), "gen0": ("ERROR", "OSError: no bus")}
    host.backends = [replace(sick, status=BackendStatus.READY, error=None)]
    host.tell(hosts)
    shown = {b["name"]: (b["status"], b["error"]) for b in rows.read(engine, schema.backends)}
    assert shown == {"gen0": ("READY", None)}


def test_other_daemons_say_hello_too(engine: sa.Engine) -> None:
    hosts, epoch = rooms(engine), str(uuid4())
    for _ in range(2):
        answer = hosts.service_hello("cyborg-api", "c1", epoch, {})
        assert answer["interval"] == 10.0
        told = datetime.fromisoformat(answer["now"])
        assert timedelta(0) <= timeutils.utcnow() - told < timedelta(seconds=5)
    hosts.service_hello("cyborg-api", "c1", str(uuid4()), None)
    hosts.service_hello("cyborg-api", "c2", epoch, None)
    assert [s["host"] for s in rows.read(engine, schema.services)] == ["c1", "c2"]
    with pytest.raises(Invalid):
        hosts.service_hello("cyborg-agent", "c1", epoch, {})


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": ""},
        {"host": "h" * 256},
        {"host": 5},
        {"epoch": "yesterday"},
        {"endpoint": "x" * 256},
        {"status": "s" * 33},
        {"digest": "d" * 65},
        {"drivers": None},
        {"drivers": [{"name": "fake"}]},
        {"drivers": ["fake"]},
        {"drivers": [{"name": "f" * 256, "driver": "fake", "status": "READY"}]},
        {"drivers": [{"name": "a", "driver": "fake", "status": "READY"}] * 2},
        {"versions": []},
    ],
    ids=str,
)
def test_a_malformed_hello_is_refused(sqlite_engine: sa.Engine, wrong: dict[str, Any]) -> None:
    said = {
        "host": "h",
        "epoch": str(uuid4()),
        "endpoint": None,
        "status": "READY",
        "drivers": [],
        "digest": "d",
        "versions": {},
    }
    with pytest.raises(Invalid):
        rooms(sqlite_engine).hello(**said | wrong)  # type: ignore[arg-type]
    assert not rows.read(sqlite_engine, schema.services)


def test_a_malformed_report_is_refused(sqlite_engine: sa.Engine) -> None:
    hosts, host = rooms(sqlite_engine), Host(devices=[card()])
    host.hello(hosts)
    long = Host(name="h" * 190)
    long.hello(hosts)
    long.devices = [card()]
    with pytest.raises(Invalid, match="provider name"):
        long.report(hosts)
    for body in ({}, [], None, "x", {**host.message(), "format": 99, "devices": []}):
        with pytest.raises(Invalid):
            hosts.report(body)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend": "b" * 256},
        {"backend": "a\x00b"},
        {"numa_node": 2**31},
        {"numa_node": -1},
        {"std_board_info": {str(n): "x" for n in range(257)}},
        {"model": "\ud800"},
    ],
    ids=lambda wrong: ascii(wrong)[:40],
)
def test_what_a_table_cannot_hold_is_refused(engine: sa.Engine, wrong: dict[str, Any]) -> None:
    hosts, host = rooms(engine), Host(devices=[card()])
    host.hello(hosts)
    body = host.message()
    body["devices"][0] |= wrong
    with pytest.raises(Invalid):
        hosts.report(body)
    host.generation = 2**63
    host.devices = [card()]
    with pytest.raises(Invalid):
        host.report(hosts)
    assert not rows.read(engine, schema.devices)


@pytest.mark.parametrize("odd", ["\t", "\r\n", "\x1b[31m", "\x00", "\u00a0", "\ud800"], ids=ascii)
def test_odd_text_costs_a_host_nothing(engine: sa.Engine, odd: str) -> None:
    """What a driver says, or a card's label, may hold anything: the rest must be recorded."""
    hosts = rooms(engine)
    sick = BackendState("sick", "fake", BackendStatus.ERROR, f"lspci said:{odd}what?")
    labelled = card(serial=f"S{odd}1", std_board_info={"name": f"a{odd}b", f"k{odd}": "v"})
    host = Host(devices=[labelled], backends=(READY, sick))
    assert host.hello(hosts)["report"]
    host.report(hosts)
    assert not host.hello(hosts)["report"]
    (device,) = rows.read(engine, schema.devices)
    assert device["serial"].startswith("S")
    assert device["serial"].isprintable() or "\n" in odd
    assert len(rows.read(engine, schema.backends)) == 2


def test_an_agent_that_takes_over_is_told(
    sqlite_engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    hosts, first, second = rooms(sqlite_engine), Host(), Host()
    first.hello(hosts)
    assert "takes over" not in caplog.text
    second.hello(hosts)
    assert "two agents say that they are this host" in caplog.text


def test_what_was_published_long_ago_is_looked_at_again(engine: sa.Engine) -> None:
    clock = [timeutils.utcnow()]
    hosts = Hosts(make_conf(), UnitOfWork(engine), now=lambda: clock[0])
    host = Host(devices=[card(n) for n in range(3)])
    host.hello(hosts)
    host.report(hosts)
    with engine.begin() as tx:
        tx.execute(
            sa.update(schema.providers).values(
                published=schema.providers.c.revision, stale_since=None, updated_at=clock[0]
            )
        )
    assert hosts.sweep() == 0
    clock[0] += timedelta(seconds=make_conf().conductor.audit_interval + 1)
    assert hosts.sweep() == 3
    assert all(row["stale_since"] for row in rows.read(engine, schema.providers))
    assert hosts.sweep() == 0


def test_a_new_life_has_its_host_compared_once(engine: sa.Engine) -> None:
    hosts, first, second = rooms(engine), Host(), Host()
    first.tell(hosts, card(0), card(1))
    drivers = [wire.dump_backend(backend) for backend in second.backends]
    for stale in (2, 0, 0):
        with engine.begin() as tx:
            tx.execute(sa.update(schema.providers).values(stale_since=None))
        # Its drivers have seen nothing yet.
        hosts.hello(second.name, second.epoch, "there", "READY", drivers, None, None)
        found = rows.read(engine, schema.providers)
        assert sum(row["stale_since"] is not None for row in found) == stale


def test_two_hosts_cannot_have_one_provider(engine: sa.Engine) -> None:
    hosts = rooms(engine)
    part = replace(card().deployables[0], address="b_c")
    Host("a").tell(hosts, card(deployables=(part,)))
    with pytest.raises(Conflict):
        Host("a_b").tell(hosts, card(deployables=(replace(part, address="c"),)))


def test_hosts_with_left_overs_are_asked_again(engine: sa.Engine) -> None:
    hosts, host, other = rooms(engine), Host(), Host("compute-2")
    other.tell(hosts, card())
    host.tell(hosts, card())
    assert hosts.sweep() == 0
    (left, _) = rows.read(engine, schema.attach_handles)[2:]
    rows.change(engine, schema.attach_handles, left["id"], draining=True)
    assert hosts.sweep() == 1
    assert hosts.sweep() == 0
    assert host.hello(hosts)["report"] is True
    assert other.hello(hosts)["report"] is False
