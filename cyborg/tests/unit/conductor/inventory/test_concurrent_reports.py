# SPDX-License-Identifier: Apache-2.0
import threading
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Stale
from cyborg.core.inventory import plan
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.hosts import Host, card, make_hosts


def bind_handle(engine: sa.Engine, n: int = 0) -> int:
    """Give the nth handle of all to a new request, and return the request's id."""
    request = rows.insert_arq(engine, rows.insert_profile(engine, f"p{n}"), state="Bound")
    (row,) = rows.read(engine, schema.arqs, uuid=request)
    handle = rows.read(engine, schema.attach_handles)[n]
    rows.update(engine, schema.attach_handles, handle["id"], arq_id=row["id"])
    return int(row["id"])


def test_handle_claimed_during_report_is_kept(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The claim commits between the read and the lock of the report. SQLite cannot do this.
    if engine.dialect.name == "sqlite":
        return

    hosts, host = make_hosts(engine), Host()
    host.send(hosts, card(0))
    original = plan.plan
    claimed: list[int] = []

    def claiming(*arguments: Any) -> Any:
        if not claimed:
            claimed.append(bind_handle(engine))
        return original(*arguments)

    monkeypatch.setattr(plan, "plan", claiming)
    host.send(hosts)
    (handle,) = rows.read(engine, schema.attach_handles)
    assert (handle["arq_id"], handle["draining"]) == (claimed[0], True)


def test_concurrent_reports_create_no_duplicates(engine: sa.Engine) -> None:
    devices = [card(n, 4) for n in range(8)]
    host = Host(devices=devices)
    host.hello(make_hosts(engine))
    messages = []
    for _ in range(6):
        host.generation += 1
        messages.append(host.message())
    gate = threading.Barrier(len(messages))
    results: list[object] = []

    def send(message: dict[str, Any]) -> None:
        hosts = make_hosts(engine)
        gate.wait()
        try:
            results.append(hosts.report(message))
        except Exception as exc:  # noqa: BLE001  asserted below
            results.append(exc)

    threads = [threading.Thread(target=send, args=(message,)) for message in messages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {type(result) for result in results} <= {dict, Stale}
    assert {"accepted": True} in results
    assert len(rows.read(engine, schema.devices)) == 8
    assert len(rows.read(engine, schema.attach_handles)) == 32
    (service,) = rows.read(engine, schema.services)
    assert service["generation"] == 6


def test_concurrent_first_heartbeats_create_one_service(engine: sa.Engine) -> None:
    host = Host(devices=[card()])
    gate = threading.Barrier(4)
    results: list[object] = []

    def send() -> None:
        hosts = make_hosts(engine)
        gate.wait()
        try:
            results.append(host.hello(hosts)["report"])
        except Exception as exc:  # noqa: BLE001  asserted below
            results.append(exc)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert len(rows.read(engine, schema.services)) == 1
    assert len(rows.read(engine, schema.backends)) == 1
