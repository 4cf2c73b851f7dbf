# SPDX-License-Identifier: Apache-2.0
"""Invalid reports, over a real bus to a real database, one by one.

Each is rejected or accepted with a clear message, and has no other effect.
"""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.common.calls import IdempotentEndpoint
from cyborg.conductor.manager import make_handlers
from cyborg.conductor.wiring import build_conductor
from cyborg.core.errors import Conflict, CyborgError, Invalid, Stale, Unavailable
from cyborg.core.inventory.device import Device
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.contract import ConductorAPI
from cyborg.tests.fixtures.bus.broker import MEMORY, open_bus
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.hosts.hosts import Host, card

# ``[conductor] max_report_bytes`` unless told otherwise.
LIMIT = 16777216


@dataclass
class ReportEnv:
    """A conductor on a bus."""

    client: ConductorAPI
    engine: sa.Engine

    def host(self, *devices: Device) -> Host:
        """Return a new host that has reported these devices."""
        host = Host(f"compute-{uuid4().hex[:8]}")
        self.tell(host, *devices)
        return host

    def tell(self, host: Host, *devices: Device) -> None:
        """Send a heartbeat and a report over the bus."""
        # The client has the same methods as the conductor's service.
        host.send(cast(Any, self._HostsClient(self.client)), *devices)

    def hello(self, host: Host) -> dict[str, Any]:
        """Send a heartbeat over the bus."""
        return host.hello(cast(Any, self._HostsClient(self.client)))

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return all rows that reports write, without timestamps and counters of agents."""
        contents = {
            table.name: rows.read(self.engine, table)
            for table in (
                *(schema.devices, schema.deployables, schema.attach_handles),
                *(schema.providers, schema.backends, schema.device_tombstones, schema.outbox),
            )
        }
        contents["services"] = [
            {key: row[key] for key in ("host", "epoch", "digest", "generation")}
            for row in rows.read(self.engine, schema.services)
        ]
        return contents

    class _HostsClient:
        def __init__(self, client: ConductorAPI) -> None:
            self.heartbeat, self.report = client.hello, client.report


@pytest.fixture(
    scope="module",
    params=[
        "sqlite",
        pytest.param("mysql", marks=[pytest.mark.services, pytest.mark.matrix]),
        pytest.param("postgresql", marks=[pytest.mark.services, pytest.mark.long]),
    ],
)
def env(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ReportEnv]:
    """Run a conductor on the bus inside the process and SQLite, then on real servers."""
    kind = request.param
    url = MEMORY if kind == "sqlite" else request.getfixturevalue("rabbit_url")
    with (
        fresh_database(kind, Path(tmp_path_factory.mktemp("odd"))) as database,
        engine_of(database) as engine,
        open_bus(url, rpc={"timeout": 60.0}, nova={"send_events": False}) as bus,
    ):
        schema.metadata.create_all(engine)
        nobody = cast(Any, None)
        uow = UnitOfWork(engine)
        conductor = build_conductor(bus.conf, uow, nobody, nobody, nobody)
        with bus.serving("conductor", IdempotentEndpoint(make_handlers(conductor), uow)):
            yield ReportEnv(bus.conductor(), engine)


def padded(bytes_: int) -> list[Device]:
    """Return devices whose report has at least ``bytes_`` bytes."""
    info = {f"key-{n:03}": "x" * 900 for n in range(256)}
    size = len(json.dumps(info))
    return [card(n, 1, vendor_board_info=info) for n in range(bytes_ // size + 1)]


def rejection_of(env: ReportEnv, message: dict[str, Any]) -> CyborgError:
    """Send a report that must be rejected without an effect; return the error."""
    before = env.tables()
    with pytest.raises(CyborgError) as raised:
        env.client.report(message)
    assert env.tables() == before
    return raised.value


def test_concurrent_reports_leave_one_consistent_state(env: ReportEnv) -> None:
    bystander = env.host(card(0))
    host = Host(f"compute-{uuid4().hex[:8]}", devices=[card(n, 4) for n in range(8)])
    env.hello(host)
    messages = []
    for _ in range(2):
        host.generation += 1
        messages.append(host.message())
    gate = threading.Barrier(2)
    results: list[object] = []

    def send(message: dict[str, Any]) -> None:
        gate.wait()
        try:
            results.append(env.client.report(message))
        except CyborgError as exc:
            results.append(exc)

    threads = [threading.Thread(target=send, args=(message,)) for message in messages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {"accepted": True} in results
    # The second is stale, or arrived while the first was being recorded; the agent retries it.
    assert {type(result) for result in results} <= {dict, Stale, Unavailable}
    assert len(rows.read(env.engine, schema.devices, host=host.name)) == 8
    assert env.hello(host)["report"] is False
    assert env.hello(bystander)["report"] is False


def test_report_of_old_epoch_is_rejected(env: ReportEnv) -> None:
    host = env.host(card(0))
    old = replace(host, devices=[], generation=host.generation + 1)
    host.epoch, host.generation = str(uuid4()), 0
    env.hello(host)
    rejection = rejection_of(env, old.message())
    assert isinstance(rejection, Stale)
    assert host.name in rejection.message
    assert "stale report" in rejection.message


def test_report_for_another_host_is_rejected(env: ReportEnv) -> None:
    victim, forger = env.host(card(0)), env.host(card(0))
    forged = replace(forger, name=victim.name, devices=[], generation=99)
    rejection = rejection_of(env, forged.message())
    assert isinstance(rejection, Stale)
    assert env.hello(victim)["report"] is False


def test_report_with_another_hosts_provider_is_rejected(env: ReportEnv) -> None:
    part = card().deployables[0]
    owner = env.host(card(0, deployables=(replace(part, address="b_c"),)))
    thief = Host(f"{owner.name}_b", devices=[card(deployables=(replace(part, address="c"),))])
    env.hello(thief)
    thief.generation = 1
    rejection = rejection_of(env, thief.message())
    assert isinstance(rejection, Conflict)
    assert thief.name in rejection.message
    assert "belongs to host" in rejection.message


@pytest.mark.matrix
def test_report_of_10_megabytes_is_accepted(env: ReportEnv) -> None:
    bystander = env.host(card(0))
    host = Host(f"compute-{uuid4().hex[:8]}", devices=padded(10_000_000))
    assert 10_000_000 < len(json.dumps(host.message())) < LIMIT
    env.tell(host, *host.devices)
    assert len(rows.read(env.engine, schema.devices, host=host.name)) == len(host.devices)
    assert env.hello(host)["report"] is False
    assert env.hello(bystander)["report"] is False


def test_report_over_the_limit_is_rejected_with_the_limit(env: ReportEnv) -> None:
    host = env.host(card(0))
    host.devices, host.generation = padded(LIMIT), host.generation + 1
    rejection = rejection_of(env, host.message())
    assert isinstance(rejection, Invalid)
    assert f"limit of {LIMIT}" in rejection.message


def test_report_of_4096_handles_is_one_transaction(env: ReportEnv) -> None:
    begun: list[None] = []
    host = Host(f"compute-{uuid4().hex[:8]}", devices=[card(n, 16) for n in range(256)])
    env.hello(host)
    host.generation = 1

    def begin(_: Any) -> None:
        begun.append(None)

    sa.event.listen(env.engine, "begin", begin)
    try:
        assert env.client.report(host.message()) == {"accepted": True}
    finally:
        sa.event.remove(env.engine, "begin", begin)
    assert len(begun) == 1
    device_ids = {row["id"] for row in rows.read(env.engine, schema.devices, host=host.name)}
    parts = {
        r["id"] for r in rows.read(env.engine, schema.deployables) if r["device_id"] in device_ids
    }
    handles = rows.read(env.engine, schema.attach_handles)
    assert sum(row["deployable_id"] in parts for row in handles) == 4096
    assert env.hello(host)["report"] is False


def test_report_with_duplicate_address_is_rejected(env: ReportEnv) -> None:
    host = env.host(card(0))
    for report, message in (
        ((card(1), card(1)), "duplicate device 0000:01:00.0"),
        ((card(1), card(2, deployables=card(1).deployables)), "duplicate deployable 0000:01:00.0"),
    ):
        body = replace(host, generation=host.generation + 1).message()
        dumped = [replace(host, devices=[device]).message()["devices"][0] for device in report]
        rejection = rejection_of(env, {**body, "devices": dumped})
        assert isinstance(rejection, Invalid)
        assert message in rejection.message
        assert host.name in rejection.message
    (device,) = replace(host, devices=[card(1, 1)]).message()["devices"]
    device["deployables"][0]["handles"] *= 2
    body = replace(host, generation=host.generation + 1).message()
    rejection = rejection_of(env, {**body, "devices": [device]})
    assert isinstance(rejection, Invalid)
    assert "duplicate handle address 0000" in rejection.message


@pytest.mark.parametrize(
    "malformed", [{}, {"format": 99}, {"devices": 5}, {"generation": -1}], ids=str
)
def test_malformed_report_is_rejected(env: ReportEnv, malformed: dict[str, Any]) -> None:
    host = env.host(card(0))
    body = (
        {**replace(host, generation=host.generation + 1).message(), **malformed}
        if malformed
        else {}
    )
    assert isinstance(rejection_of(env, body), Invalid)
