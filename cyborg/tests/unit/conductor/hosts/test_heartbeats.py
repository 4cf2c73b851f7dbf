# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.core.drivers.registry import Setting, Source
from cyborg.core.errors import Conflict, Invalid, Stale
from cyborg.core.inventory.device import DeviceType
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.hosts import READY, Host, card, make_hosts
from cyborg.tests.fixtures.machine.options import make_conf


def test_heartbeat_of_a_new_host_requests_a_report_once(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host(devices=[card()])
    assert host.hello(hosts) == {"interval": 10.0, "report": True, "desired_generation": 0}
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


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 256])
def test_unchanged_heartbeat_runs_one_statement_at_any_size(
    engine: sa.Engine, devices: int
) -> None:
    woken: list[None] = []
    hosts, host = make_hosts(engine, woken), Host()
    host.send(hosts, *[card(n, 16) for n in range(devices)])
    woken.clear()
    with count_statements(engine) as count:
        assert host.hello(hosts)["report"] is False
    assert len(count) == 1
    assert not woken


def test_heartbeat_updates_last_seen(engine: sa.Engine) -> None:
    now = timeutils.utcnow()
    hosts = build(Hosts, make_conf(), UnitOfWork(engine), now=lambda: now)
    host = Host()
    host.send(hosts, card())
    now += timedelta(seconds=7)
    host.hello(hosts)
    (service,) = rows.read(engine, schema.services)
    assert service["last_seen_at"] == now
    assert service["started_at"] == now - timedelta(seconds=7)


def test_heartbeat_after_restart_with_same_digest_requests_no_report(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card())
    host.epoch, host.generation = str(uuid4()), 0
    assert host.hello(hosts)["report"] is False
    host.devices = [card(count=3)]
    assert host.hello(hosts)["report"] is True
    host.report(hosts)
    assert len(rows.read(engine, schema.attach_handles)) == 3


def test_heartbeat_after_restart_runs_seven_statements(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card())
    host.epoch, host.generation = str(uuid4()), 0
    with count_statements(engine) as count:
        host.hello(hosts)
    assert len(count) == 7


def test_discovery_after_the_first_heartbeat_of_a_restart_shows_the_backends_ready(
    engine: sa.Engine,
) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card())
    host.epoch, host.generation = str(uuid4()), 0
    discovering = [replace(READY, status=BackendStatus.DISCOVERING).without_details().to_dict()]
    versions = {"rpc": "1"}
    hosts.heartbeat(host.name, host.epoch, None, "READY", discovering, None, versions)
    (backend,) = rows.read(engine, schema.backends)
    assert backend["status"] == "DISCOVERING"
    assert host.hello(hosts)["report"] is False
    (backend,) = rows.read(engine, schema.backends)
    assert backend["status"] == "READY"
    with count_statements(engine) as count:
        host.hello(hosts)
    assert len(count) == 1


def test_option_for_reference_traits_requests_reports_anew(sqlite_engine: sa.Engine) -> None:
    host, uow = Host(), UnitOfWork(sqlite_engine)
    device = replace(
        card(), type=DeviceType.GPU, std_board_info={"vendor_id": "10de", "product_id": "1eb8"}
    )
    for release, is_known in (("none", False), ("12", True), ("17", True), ("none", False)):
        hosts = build(Hosts, make_conf(conductor={"reference_traits": release}), uow)
        host.devices = [device]
        assert host.hello(hosts)["report"] is True
        host.report(hosts)
        assert host.hello(hosts)["report"] is False
        (row,) = rows.read(sqlite_engine, schema.deployables)
        assert ("CUSTOM_NVIDIA_1EB8" in row["traits"]) is is_known


def test_report_of_a_previous_epoch_is_refused(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card())
    old = replace(host)
    host.epoch, host.generation = str(uuid4()), 0
    host.hello(hosts)
    old.devices = []
    with pytest.raises(Stale):
        old.report(hosts)
    assert len(rows.read(engine, schema.devices)) == 1


def test_report_with_an_old_generation_is_refused(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card())
    old_report = host.message()
    host.send(hosts, card(), card(1))
    with pytest.raises(Stale):
        hosts.report(old_report)
    assert len(rows.read(engine, schema.devices)) == 2


def test_report_of_an_unknown_host_is_refused(engine: sa.Engine) -> None:
    with pytest.raises(Stale):
        Host(devices=[card()]).report(make_hosts(engine))
    assert not rows.read(engine, schema.devices)


def test_heartbeat_updates_backends_and_errors(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card())
    unhealthy = BackendState("gen0", "generic", BackendStatus.ERROR, "OSError: no bus")
    host.backends = [READY, unhealthy]
    host.hello(hosts)
    backends = {b["name"]: (b["status"], b["error"]) for b in rows.read(engine, schema.backends)}
    assert backends == {"fake": ("READY", None), "gen0": ("ERROR", "OSError: no bus")}
    host.backends = [replace(unhealthy, status=BackendStatus.READY, error=None)]
    host.send(hosts)
    backends = {b["name"]: (b["status"], b["error"]) for b in rows.read(engine, schema.backends)}
    assert backends == {"gen0": ("READY", None)}


def test_service_heartbeat_of_other_daemons_is_recorded(engine: sa.Engine) -> None:
    hosts, epoch = make_hosts(engine), str(uuid4())
    for _ in range(2):
        answer = hosts.service_heartbeat("cyborg-api", "c1", epoch, {})
        assert answer["interval"] == 10.0
        answered_at = datetime.fromisoformat(answer["now"])
        # The clock of the database is estimated to about one round trip.
        assert abs(timeutils.utcnow() - answered_at) < timedelta(seconds=5)
    hosts.service_heartbeat("cyborg-api", "c1", str(uuid4()), None)
    hosts.service_heartbeat("cyborg-api", "c2", epoch, None)
    assert [s["host"] for s in rows.read(engine, schema.services)] == ["c1", "c2"]
    with pytest.raises(Invalid):
        hosts.service_heartbeat("cyborg-agent", "c1", epoch, {})


@pytest.mark.parametrize(
    "changes",
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
def test_malformed_heartbeat_is_refused(sqlite_engine: sa.Engine, changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "host": "h",
        "epoch": str(uuid4()),
        "endpoint": None,
        "status": "READY",
        "drivers": [],
        "digest": "d",
        "versions": {},
    }
    with pytest.raises(Invalid):
        make_hosts(sqlite_engine).heartbeat(**arguments | changes)
    assert not rows.read(sqlite_engine, schema.services)


def test_malformed_report_is_refused(sqlite_engine: sa.Engine) -> None:
    hosts, host = make_hosts(sqlite_engine), Host(devices=[card()])
    host.hello(hosts)
    long_name = Host(name="h" * 190)
    long_name.hello(hosts)
    long_name.devices = [card()]
    with pytest.raises(Invalid, match="provider name"):
        long_name.report(hosts)
    bodies: tuple[Any, ...] = ({}, [], None, "x", {**host.message(), "format": 99, "devices": []})
    for body in bodies:
        with pytest.raises(Invalid):
            hosts.report(body)


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "b" * 256},
        {"backend": "a\x00b"},
        {"numa_node": 2**31},
        {"numa_node": -1},
        {"std_board_info": {str(n): "x" for n in range(257)}},
        {"model": "\ud800"},
    ],
    ids=lambda changes: ascii(changes)[:40],
)
def test_report_with_values_that_no_table_can_store_is_refused(
    engine: sa.Engine, changes: dict[str, Any]
) -> None:
    hosts, host = make_hosts(engine), Host(devices=[card()])
    host.hello(hosts)
    body = host.message()
    body["devices"][0] |= changes
    with pytest.raises(Invalid):
        hosts.report(body)
    host.generation = 2**63
    host.devices = [card()]
    with pytest.raises(Invalid):
        host.report(hosts)
    assert not rows.read(engine, schema.devices)


@pytest.mark.parametrize(
    "special", ["\t", "\r\n", "\x1b[31m", "\x00", "\u00a0", "\ud800"], ids=ascii
)
def test_report_with_special_characters_is_recorded(engine: sa.Engine, special: str) -> None:
    """Errors of drivers and labels of cards may contain any text; the report is recorded."""
    hosts = make_hosts(engine)
    unhealthy = BackendState("sick", "fake", BackendStatus.ERROR, f"lspci printed:{special}what?")
    labelled_card = card(
        serial=f"S{special}1", std_board_info={"name": f"a{special}b", f"k{special}": "v"}
    )
    host = Host(devices=[labelled_card], backends=(READY, unhealthy))
    assert host.hello(hosts)["report"]
    host.report(hosts)
    assert not host.hello(hosts)["report"]
    (device,) = rows.read(engine, schema.devices)
    assert device["serial"].startswith("S")
    assert device["serial"].isprintable() or "\n" in special
    assert len(rows.read(engine, schema.backends)) == 2


def test_heartbeat_of_a_second_agent_is_logged(
    sqlite_engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    hosts, first, second = make_hosts(sqlite_engine), Host(), Host()
    first.hello(hosts)
    assert "replaces the agent" not in caplog.text
    second.hello(hosts)
    assert "two agents use the same host name" in caplog.text


def test_first_heartbeat_after_restart_schedules_verification_once(engine: sa.Engine) -> None:
    hosts, first, second = make_hosts(engine), Host(), Host()
    first.send(hosts, card(0), card(1))
    drivers = [backend.without_details().to_dict() for backend in second.backends]
    for stale in (2, 0, 0):
        with engine.begin() as tx:
            tx.execute(sa.update(schema.providers).values(stale_since=None))
        # Its backends have no devices yet.
        hosts.heartbeat(second.name, second.epoch, "there", "READY", drivers, None, None)
        provider_rows = rows.read(engine, schema.providers)
        assert sum(row["stale_since"] is not None for row in provider_rows) == stale


def test_report_with_the_provider_name_of_another_host_is_refused(engine: sa.Engine) -> None:
    hosts = make_hosts(engine)
    part = replace(card().deployables[0], address="b_c")
    Host("a").send(hosts, card(deployables=(part,)))
    with pytest.raises(Conflict):
        Host("a_b").send(hosts, card(deployables=(replace(part, address="c"),)))


def test_sweep_requests_reports_of_hosts_with_drained_handles(engine: sa.Engine) -> None:
    hosts, host, other = make_hosts(engine), Host(), Host("compute-2")
    other.send(hosts, card())
    host.send(hosts, card())
    assert hosts.sweep() == 0
    (handle, _) = rows.read(engine, schema.attach_handles)[2:]
    rows.update(engine, schema.attach_handles, handle["id"], draining=True)
    assert hosts.sweep() == 1
    assert hosts.sweep() == 0
    assert host.hello(hosts)["report"] is True
    assert other.hello(hosts)["report"] is False


def test_heartbeat_keeps_settings_and_remarks_of_the_report(
    sqlite_engine: sa.Engine,
) -> None:
    hosts = build(Hosts, make_conf(), UnitOfWork(sqlite_engine))
    setting = Setting("count", 2, Source.API)
    state = BackendState("fake", "fake", BackendStatus.READY, None, ("a remark",), (setting,))
    host = Host(backends=(state,))
    host.send(hosts)

    def stored() -> tuple[str, list[str], list[dict[str, Any]]]:
        (row,) = rows.read(sqlite_engine, schema.backends)
        return row["status"], row["remarks"], row["settings"]

    settings = [{"name": "count", "value": 2, "source": "api"}]
    assert stored() == ("READY", ["a remark"], settings)
    host.backends = (replace(state, status=BackendStatus.ERROR, error="broken"),)
    host.hello(hosts)
    assert stored() == ("ERROR", ["a remark"], settings)
    host.backends = (replace(state, remarks=(), settings=()),)
    host.send(hosts)
    assert stored() == ("READY", [], [])


def test_report_with_too_large_settings_is_refused(sqlite_engine: sa.Engine) -> None:
    hosts = build(Hosts, make_conf(), UnitOfWork(sqlite_engine))
    many = tuple(Setting(f"o{n}", 1, Source.API) for n in range(257))
    for state in (
        BackendState("f", "f", BackendStatus.READY, None, (), many),
        BackendState("f", "f", BackendStatus.READY, None, ("x",) * 65, ()),
        BackendState("f", "f", BackendStatus.READY, None, (), (Setting("n" * 256, 1, Source.API),)),
    ):
        host = Host(backends=(state,))
        with pytest.raises(Invalid):
            host.send(hosts)
