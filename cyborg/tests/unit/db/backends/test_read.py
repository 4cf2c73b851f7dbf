# SPDX-License-Identifier: Apache-2.0
"""Tests of reading backends, with their functions counted from the handles of their devices."""

from datetime import datetime
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.binding.accelerator import AcceleratorState
from cyborg.core.inventory import capability
from cyborg.db import paging, schema
from cyborg.db.backends import read as backends
from cyborg.db.backends import write as write_backends
from cyborg.db.binding import accelerators
from cyborg.db.paging import Page
from cyborg.db.services import read as services
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements

TREE = {"num": 2, "ipsec": {"aes": {"3des": 50, "num": 1}}}
BOARD = capability.to_board_info(TREE)


def agent(engine: sa.Engine, host: str, *names: str) -> int:
    service = rows.insert_agent(engine, host)
    for name in names:
        rows.insert(
            engine, schema.backends, service_id=service, name=name, driver="any", status="READY"
        )
    return service


def crypto(
    engine: sa.Engine, host: str = "one", *, backend: str = "qat", **overrides: Any
) -> rows.Card:
    facts = {"resource_class": "CUSTOM_CRYPTO", "type": "CRYPTO", "vendor_board_info": BOARD}
    return rows.insert_card(engine, host, backend=backend, **{"handles": 2, **facts, **overrides})


def sync(engine: sa.Engine, *hosts: str) -> None:
    for host in hosts:
        with engine.begin() as tx:
            write_backends.sync_functions(tx, host)


def update_handle(engine: sa.Engine, card: rows.Card, **handle: Any) -> None:
    """Update the first handle of a card: by default, assign it to a new ARQ."""
    if not handle:
        arq = rows.insert_arq(engine, rows.insert_profile(engine), state="Bound")
        handle = {"arq_id": rows.read(engine, schema.arqs, uuid=arq)[0]["id"]}
    first = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)[0]
    rows.update(engine, schema.attach_handles, first["id"], **handle)


def function_counts(
    engine: sa.Engine, **filters: Any
) -> dict[str, dict[str, tuple[int, int, int]]]:
    """Return the functions of backends; check that those of the services are equal."""
    with engine.connect() as connection:
        listed = backends.find(connection, **filters)
        in_services = services.find(connection, functions=True, **filters)
    by_service = {b["uuid"]: b["functions"] for row in in_services for b in row["backends"]}
    assert by_service == {row["uuid"]: row["backends"][0]["functions"] for row in listed}
    assert all(row["backends"] or "function" not in filters for row in in_services)
    return {
        f"{row['host']}/{row['name']}": {
            f["function"]: (f["total"], f["used"], f["free"])
            for f in row["backends"][0]["functions"]
        }
        for row in listed
    }


def test_functions_of_each_backend(engine: sa.Engine) -> None:
    agent(engine, "one", "qat", "nvme", "idle")
    agent(engine, "two", "qat")
    crypto(engine)
    crypto(engine, address="0000:02:00.0")
    # The same name on another host is another backend, and a third has no agent.
    crypto(engine, "two", handles=1)
    crypto(engine, "three")
    rows.insert_card(
        engine, "one", "0000:03:00.0", handles=1, backend="nvme", resource_class="CUSTOM_NVME"
    )
    rows.insert_card(
        engine, "one", "0000:04:00.0", handles=0, backend="nvme", resource_class="PGPU"
    )
    assert function_counts(engine) == {
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


def test_functions_count_used_handles(engine: sa.Engine) -> None:
    agent(engine, "one", "qat")
    card = crypto(engine, handles=3)
    rows.insert_card(
        engine, "one", "0000:02:00.0", handles=1, backend="qat", resource_class="CUSTOM_CRYPTO"
    )
    update_handle(engine, card)
    offered = function_counts(engine)["one/qat"]
    # `num` of the first device is 2, of which one is owned.
    assert offered["crypto"] == (3, 1, 2)
    assert offered["crypto.ipsec.aes"] == (1, 1, 0)


@pytest.mark.parametrize(
    ("handle", "counts"),
    [
        ({"needs_cleaning": True}, (2, 1, 1)),
        ({"draining": True}, (2, 0, 1)),
        ({"needs_cleaning": True, "draining": True}, (2, 1, 1)),
    ],
)
def test_functions_with_a_handle_in_use_count_it(
    engine: sa.Engine, handle: dict[str, Any], counts: tuple[int, int, int]
) -> None:
    agent(engine, "one", "qat")
    update_handle(engine, crypto(engine), **handle)
    assert function_counts(engine)["one/qat"]["crypto.ipsec"] == counts


@pytest.mark.parametrize(
    ("table", "change"),
    [
        (schema.devices, {"status": "maintaining"}),
        (schema.devices, {"status": "of a newer release"}),
        (schema.devices, {"health": "unhealthy"}),
        (schema.devices, {"setup_required": True}),
        (schema.devices, {"reboot_required": True}),
        (schema.devices, {"failing": True}),
        (schema.devices, {"deliverable": False}),
        (schema.devices, {"cordoned": True}),
        (schema.devices, {"draining": True}),
        (schema.deployables, {"draining": True}),
        (schema.deployables, {"job_id": ...}),
        (schema.services, {"down_since": datetime(2026, 1, 1)}),
    ],
    ids=str,
)
def test_functions_of_a_cordoned_device_have_no_free_handle(
    sqlite_engine: sa.Engine, table: sa.Table, change: dict[str, Any]
) -> None:
    engine = sqlite_engine
    agent(engine, "one", "qat")
    card = crypto(engine)
    update_handle(engine, card)
    assert function_counts(engine)["one/qat"]["crypto"] == (2, 1, 1)
    if "job_id" in change:
        job = {"kind": "program", "host": "one", "subject": "s", "arguments": {}, "state": "open"}
        change = {"job_id": rows.insert(engine, schema.jobs, **job)}
    (row,) = rows.read(engine, table)
    rows.update(engine, table, row["id"], **change)
    assert function_counts(engine)["one/qat"]["crypto"] == (2, 1, 0)


def test_programming_blocks_only_its_deployable(engine: sa.Engine) -> None:
    agent(engine, "one", "qat")
    card = crypto(engine)
    other = rows.insert(
        engine,
        schema.deployables,
        device_id=card.device_id,
        host="one",
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
    board = {"vendor_board_info": capability.to_board_info({"ipsec": 1})}
    rows.update(engine, schema.devices, card.device_id, **board)
    rows.update(engine, schema.deployables, other, job_id=job)
    assert function_counts(engine)["one/qat"] == {"crypto": (5, 0, 2), "crypto.ipsec": (5, 0, 2)}


def test_free_handles_match_the_list_of_accelerators(sqlite_engine: sa.Engine) -> None:
    engine = sqlite_engine
    agent(engine, "one", "qat")
    board: dict[str, Any] = {"vendor_board_info": {}}
    for number, device in enumerate(({}, {"health": "unhealthy"}, {"health": "unknown"})):
        card = crypto(engine, address=f"0000:0{number}:00.0", handles=3, **board, **device)
        update_handle(engine, card, needs_cleaning=bool(number % 2), draining=not number % 2)
    with engine.connect() as connection:
        free = accelerators.find(connection, states=[AcceleratorState.FREE])
        all_accelerators = accelerators.find(connection)
    assert function_counts(engine)["one/qat"] == {"crypto": (len(all_accelerators), 1, len(free))}
    assert len(free) == 4


def test_filter_by_function(engine: sa.Engine) -> None:
    agent(engine, "one", "qat", "nvme")
    agent(engine, "two", "qat")
    agent(engine, "three", "gpu")
    crypto(engine)
    crypto(
        engine, "two", vendor_board_info=capability.to_board_info({"ipsec2": 1, "ssl": {"aes": 1}})
    )
    rows.insert_card(engine, "one", "n", handles=1, backend="nvme", resource_class="CUSTOM_NVME")
    rows.insert_card(engine, "three", handles=1, backend="gpu", resource_class="PGPU")
    sync(engine, "one", "two", "three")

    def offering(function: str, **overrides: Any) -> dict[str, list[str]]:
        return {
            name: list(functions)
            for name, functions in function_counts(engine, function=function, **overrides).items()
        }

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
        next_page = Page(limit=1, marker=backends.find(connection, function="crypto")[0]["uuid"])
        (last,) = backends.find(connection, page=next_page, function="crypto")
        (with_nvme,) = services.find(connection, function="nvme")
        (second,) = services.find(
            connection, function="crypto", page=Page(limit=1, sort_dir="desc")
        )
    assert last["host"] == second["host"] == "two"
    assert [b["name"] for b in with_nvme["backends"]] == ["nvme"]
    assert "functions" not in with_nvme["backends"][0]


def test_id_in_accepts_more_ids_than_a_statement_can_bind(engine: sa.Engine) -> None:
    agent(engine, "one", "qat")
    condition = paging.id_in(schema.backends.c.id, range(70_000))
    with engine.connect() as connection:
        assert connection.scalar(sa.select(schema.backends.c.name).where(condition)) == "qat"


def test_find_needs_a_constant_number_of_statements(sqlite_engine: sa.Engine) -> None:
    engine = sqlite_engine
    for number in (1, 20):
        for n in range(number):
            agent(engine, f"{number}-{n}", "qat", "gpu")
            for address in ("a", "b"):
                crypto(engine, f"{number}-{n}", address=address)
            sync(engine, f"{number}-{n}")
        for function in (None, "crypto"):
            with engine.connect() as connection, count_statements(engine) as count:
                assert len(backends.find(connection, function=function)) >= number
            assert len(count) == 2, count.statements
            with engine.connect() as connection, count_statements(engine) as count:
                page = services.find(connection, functions=True, function=function)
                assert len(page) >= number
            assert len(count) == 3, count.statements
