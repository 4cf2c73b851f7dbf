# SPDX-License-Identifier: Apache-2.0
import threading
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Stale
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.hosts import Host, card, rooms


def owned(engine: sa.Engine, n: int = 0) -> int:
    """Give the nth handle of all to a new request, and return the request's id."""
    request = rows.request(engine, rows.profile(engine, f"p{n}"), state="Bound")
    (row,) = rows.read(engine, schema.requests, uuid=request)
    handle = rows.read(engine, schema.attach_handles)[n]
    rows.change(engine, schema.attach_handles, handle["id"], request_id=row["id"])
    return int(row["id"])


def test_a_handle_claimed_after_it_was_read_is_kept(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The claim commits between the report's read and its lock: SQLite has no such moment.
    if engine.dialect.name == "sqlite":
        return
    from cyborg.conductor import reports

    hosts, host = rooms(engine), Host()
    host.tell(hosts, card(0))
    plan = reports.inventory.plan
    claimed: list[int] = []

    def claiming(*known: Any) -> Any:
        if not claimed:
            claimed.append(owned(engine))
        return plan(*known)

    monkeypatch.setattr(reports.inventory, "plan", claiming)
    host.tell(hosts)
    (handle,) = rows.read(engine, schema.attach_handles)
    assert (handle["request_id"], handle["draining"]) == (claimed[0], True)


def test_reports_at_the_same_time_leave_no_duplicates(engine: sa.Engine) -> None:
    devices = [card(n, 4) for n in range(8)]
    host = Host(devices=devices)
    host.hello(rooms(engine))
    messages = []
    for _ in range(6):
        host.generation += 1
        messages.append(host.message())
    gate = threading.Barrier(len(messages))
    came: list[object] = []

    def send(message: dict[str, Any]) -> None:
        hosts = rooms(engine)
        gate.wait()
        try:
            came.append(hosts.report(message))
        except Exception as bad:  # noqa: BLE001  looked at below
            came.append(bad)

    threads = [threading.Thread(target=send, args=(message,)) for message in messages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {type(each) for each in came} <= {dict, Stale}
    assert {"accepted": True} in came
    assert len(rows.read(engine, schema.devices)) == 8
    assert len(rows.read(engine, schema.attach_handles)) == 32
    (service,) = rows.read(engine, schema.services)
    assert service["generation"] == 6


def test_first_hellos_at_the_same_time_enter_one_service(engine: sa.Engine) -> None:
    host = Host(devices=[card()])
    gate = threading.Barrier(4)
    came: list[object] = []

    def send() -> None:
        hosts = rooms(engine)
        gate.wait()
        try:
            came.append(host.hello(hosts)["report"])
        except Exception as bad:  # noqa: BLE001  looked at below
            came.append(bad)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert came == [True] * 4
    assert len(rows.read(engine, schema.services)) == 1
    assert len(rows.read(engine, schema.backends)) == 1
