# SPDX-License-Identifier: Apache-2.0
"""Backends with what they offer: functions, counted from the handles of their devices."""

from datetime import datetime
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core import capability
from cyborg.core.accelerator import State
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.read import accelerators, backends, services
from cyborg.db.read.paging import Page
from cyborg.fixtures import rows

TREE = {"num": 2, "ipsec": {"aes": {"3des": 50, "num": 1}}}
BOARD = capability.facts(TREE)


def agent(engine: sa.Engine, host: str, *names: str) -> int:
    service = rows.agent(engine, host)
    for name in names:
        rows.insert(
            engine, schema.backends, service_id=service, name=name, driver="any", status="READY"
        )
    return service


def crypto(engine: sa.Engine, host: str = "one", *, backend: str = "qat", **more: Any) -> rows.Card:
    facts = {"resource_class": "CUSTOM_CRYPTO", "type": "CRYPTO", "vendor_board_info": BOARD}
    return rows.card(engine, host, backend=backend, **{"handles": 2, **facts, **more})


def hold(engine: sa.Engine, card: rows.Card, **handle: Any) -> None:
    """Change the first handle of a card: by default a request holds it."""
    if not handle:
        arq = rows.request(engine, rows.profile(engine), state="Bound")
        handle = {"request_id": rows.read(engine, schema.requests, uuid=arq)[0]["id"]}
    first = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)[0]
    rows.change(engine, schema.attach_handles, first["id"], **handle)


def found(engine: sa.Engine, **filters: Any) -> dict[str, dict[str, tuple[int, int, int]]]:
    """Return the functions of backends; those of the services must be the same."""
    with engine.connect() as connection:
        alone = backends.find(connection, **filters)
        held = services.find(connection, functions=True, **filters)
    told = {b["uuid"]: b["functions"] for row in held for b in row["backends"]}
    assert told == {row["uuid"]: row["backends"][0]["functions"] for row in alone}
    assert all(row["backends"] or "function" not in filters for row in held)
    return {
        f"{row['host']}/{row['name']}": {
            f["function"]: (f["total"], f["used"], f["free"])
            for f in row["backends"][0]["functions"]
        }
        for row in alone
    }


def test_what_each_backend_offers(engine: sa.Engine) -> None:
    agent(engine, "one", "qat", "nvme", "idle")
    agent(engine, "two", "qat")
    crypto(engine)
    crypto(engine, address="0000:02:00.0")
    # The same name on another host is another backend, and a third has no agent.
    crypto(engine, "two", handles=1)
    crypto(engine, "three")
    rows.card(
        engine, "one", "0000:03:00.0", handles=1, backend="nvme", resource_class="CUSTOM_NVME"
    )
    rows.card(engine, "one", "0000:04:00.0", handles=0, backend="nvme", resource_class="PGPU")
    assert found(engine) == {
        "one/qat": {
            "crypto": (4, 0, 4),
            "crypto.ipsec": (4, 0, 4),
            "crypto.ipsec.aes": (2, 0, 2),
            "crypto.ipsec.aes.3des": (2, 0, 2),
        },
        "one/nvme": {"gpu": (0, 0, 0), "nvme": (1, 0, 1)},
        "one/idle": {},
        "two/qat": {
            "crypto": (1, 0, 1),
            "crypto.ipsec": (1, 0, 1),
            "crypto.ipsec.aes": (1, 0, 1),
            "crypto.ipsec.aes.3des": (1, 0, 1),
        },
    }
    with engine.connect() as connection:
        row = backends.find(connection)[0]
    assert "id" not in row
    assert row["backends"][0]["name"] == row["name"]


def test_use(engine: sa.Engine) -> None:
    agent(engine, "one", "qat")
    card = crypto(engine, handles=3)
    rows.card(
        engine, "one", "0000:02:00.0", handles=1, backend="qat", resource_class="CUSTOM_CRYPTO"
    )
    hold(engine, card)
    offered = found(engine)["one/qat"]
    # `num` of the first is 2, of which one is held.
    assert offered["crypto"] == (3, 1, 2)
    assert offered["crypto.ipsec.aes"] == (1, 1, 0)


@pytest.mark.parametrize(
    ("handle", "counts"),
    [
        ({"prepared": True}, (2, 1, 1)),
        ({"draining": True}, (2, 0, 1)),
        ({"prepared": True, "draining": True}, (2, 1, 1)),
    ],
)
def test_a_handle_that_is_not_free(
    engine: sa.Engine, handle: dict[str, Any], counts: tuple[int, int, int]
) -> None:
    agent(engine, "one", "qat")
    hold(engine, crypto(engine), **handle)
    assert found(engine)["one/qat"]["crypto.ipsec"] == counts


@pytest.mark.parametrize(
    ("table", "change"),
    [
        (schema.devices, {"status": "maintaining"}),
        (schema.devices, {"status": "of a newer release"}),
        (schema.devices, {"health": "unhealthy"}),
        (schema.devices, {"setup_required": True}),
        (schema.devices, {"reboot_required": True}),
        (schema.devices, {"withdrawn": True}),
        (schema.devices, {"draining": True}),
        (schema.deployables, {"draining": True}),
        (schema.deployables, {"job_id": ...}),
        (schema.services, {"down_since": datetime(2026, 1, 1)}),
    ],
    ids=str,
)
def test_what_is_closed_has_nothing_free(
    sqlite_engine: sa.Engine, table: sa.Table, change: dict[str, Any]
) -> None:
    engine = sqlite_engine
    agent(engine, "one", "qat")
    card = crypto(engine)
    hold(engine, card)
    assert found(engine)["one/qat"]["crypto"] == (2, 1, 1)
    if "job_id" in change:
        job = {"kind": "program", "host": "one", "subject": "s", "arguments": {}, "state": "open"}
        change = {"job_id": rows.insert(engine, schema.jobs, **job)}
    (row,) = rows.read(engine, table)
    rows.change(engine, table, row["id"], **change)
    assert found(engine)["one/qat"]["crypto"] == (2, 1, 0)


def test_a_part_that_is_programmed_closes_itself_alone(engine: sa.Engine) -> None:
    agent(engine, "one", "qat")
    card = crypto(engine)
    other = rows.insert(
        engine,
        schema.deployables,
        device_id=card.device_id,
        address="other",
        name="one_other",
        rp_uuid="other",
        resource_class="CUSTOM_CRYPTO",
        traits=[],
        attributes={},
    )
    for number in range(3):
        rows.insert(
            engine,
            schema.attach_handles,
            deployable_id=other,
            address=str(number),
            type="PCI",
            info={},
        )
    job = rows.insert(
        engine, schema.jobs, kind="program", host="one", subject="s", arguments={}, state="open"
    )
    board = {"vendor_board_info": capability.facts({"ipsec": 1})}
    rows.change(engine, schema.devices, card.device_id, **board)
    rows.change(engine, schema.deployables, other, job_id=job)
    assert found(engine)["one/qat"] == {"crypto": (5, 0, 2), "crypto.ipsec": (5, 0, 2)}


def test_free_is_what_the_listing_of_accelerators_calls_free(sqlite_engine: sa.Engine) -> None:
    engine = sqlite_engine
    agent(engine, "one", "qat")
    board: dict[str, Any] = {"vendor_board_info": {}}
    for number, device in enumerate(({}, {"health": "unhealthy"}, {"health": "unknown"})):
        card = crypto(engine, address=f"0000:0{number}:00.0", handles=3, **board, **device)
        hold(engine, card, prepared=bool(number % 2), draining=not number % 2)
    with engine.connect() as connection:
        free = accelerators.find(connection, state=State.FREE)
        every = accelerators.find(connection)
    assert found(engine)["one/qat"] == {"crypto": (len(every), 1, len(free))}
    assert len(free) == 4


def test_the_filter_of_functions(engine: sa.Engine) -> None:
    agent(engine, "one", "qat", "nvme")
    agent(engine, "two", "qat")
    agent(engine, "three", "gpu")
    crypto(engine)
    crypto(engine, "two", vendor_board_info=capability.facts({"ipsec2": 1, "ssl": {"aes": 1}}))
    rows.card(engine, "one", "n", handles=1, backend="nvme", resource_class="CUSTOM_NVME")
    rows.card(engine, "three", handles=1, backend="gpu", resource_class="PGPU")

    def offering(function: str, **more: Any) -> dict[str, list[str]]:
        return {name: list(held) for name, held in found(engine, function=function, **more).items()}

    assert offering("crypto.ipsec.aes") == {
        "one/qat": ["crypto.ipsec.aes", "crypto.ipsec.aes.3des"]
    }
    assert offering("crypto.ipsec")["one/qat"][0] == "crypto.ipsec"
    assert list(offering("crypto")) == ["one/qat", "two/qat"]
    assert list(offering("crypto", host="two")) == ["two/qat"]
    assert offering("crypto", host="three") == offering("crypto.ips") == {}
    assert offering("gpu") == {"three/gpu": ["gpu"]}
    assert offering("pgpu") == offering("aes") == offering("nothing.at.all") == {}
    with engine.connect() as connection:
        rest = Page(limit=1, marker=backends.find(connection, function="crypto")[0]["uuid"])
        (last,) = backends.find(connection, page=rest, function="crypto")
        (whole,) = services.find(connection, function="nvme")
        (second,) = services.find(
            connection, function="crypto", page=Page(limit=1, sort_dir="desc")
        )
    assert last["host"] == second["host"] == "two"
    assert [b["name"] for b in whole["backends"]] == ["nvme"]
    assert "functions" not in whole["backends"][0]


def test_more_ids_than_a_statement_can_bind(engine: sa.Engine) -> None:
    agent(engine, "one", "qat")
    condition = backends.among(schema.backends.c.id, range(70_000))
    with engine.connect() as connection:
        assert connection.scalar(sa.select(schema.backends.c.name).where(condition)) == "qat"


def test_the_number_of_statements_does_not_grow(sqlite_engine: sa.Engine) -> None:
    engine = sqlite_engine
    for number in (1, 20):
        for n in range(number):
            agent(engine, f"{number}-{n}", "qat", "gpu")
            for address in ("a", "b"):
                crypto(engine, f"{number}-{n}", address=address)
        for cost, function in ((3, None), (4, "crypto")):
            with engine.connect() as connection, counting(engine) as count:
                assert len(backends.find(connection, function=function)) >= number
            assert len(count) == cost, count.statements
        for cost, more in ((4, {}), (5, {"function": "crypto"})):
            with engine.connect() as connection, counting(engine) as count:
                assert len(services.find(connection, functions=True, **more)) >= number
            assert len(count) == cost, count.statements
