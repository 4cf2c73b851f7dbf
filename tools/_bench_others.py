# SPDX-License-Identifier: Apache-2.0
"""Other requests of the same project, put straight into the tables: what a large cloud has."""

from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core import names
from cyborg.db import schema
from cyborg.fixtures.rows import GROUPS, TRAIT

BATCH = 2000
CARD = 16
"""Requests of a card, which has so many handles: all but the last are Bound, that one Initial."""

HOST_CARDS = 4


def add(engine: sa.Engine, profile: str, project: str, begin: int, end: int) -> None:
    """Insert the requests from number ``begin`` up to ``end``, and what they are bound to."""
    cards = range(-(-begin // CARD), -(-end // CARD))
    with engine.begin() as tx:
        table = schema.device_profiles
        made_from = tx.execute(sa.select(table.c.id).where(table.c.name == profile)).scalar_one()
        card, handle, request = (
            _next(tx, table) for table in (schema.devices, schema.attach_handles, schema.requests)
        )
        part = _next(tx, schema.deployables)
        _insert(tx, schema.devices, [_device(n, card + i) for i, n in enumerate(cards)])
        _insert(
            tx,
            schema.deployables,
            [_deployable(n, part + i, card + i) for i, n in enumerate(cards)],
        )
        _insert(tx, schema.providers, [_provider(n) for n in cards])
        requests = [
            _request(n, request + n - begin, made_from, profile, project) for n in range(begin, end)
        ]
        _insert(tx, schema.requests, requests)
        owners = {n: request + n - begin for n in range(begin, end) if _bound(n)}
        handles = [
            _handle(n * CARD + i, handle + k * CARD + i, part + k, owners.get(n * CARD + i))
            for k, n in enumerate(cards)
            for i in range(CARD)
        ]
        _insert(tx, schema.attach_handles, handles)
    if engine.dialect.name == "mysql":
        # The server does so by itself some seconds later; a cell is not to begin before it has.
        with engine.connect() as connection:
            tables = ", ".join(f"`{table.name}`" for table in schema.TABLES)
            connection.exec_driver_sql(f"ANALYZE TABLE {tables}").all()


def _next(tx: sa.Connection, table: sa.Table) -> int:
    return (tx.scalar(sa.select(sa.func.max(table.c.id))) or 0) + 1


def _insert(tx: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    for first in range(0, len(rows), BATCH):
        tx.execute(sa.insert(table), rows[first : first + BATCH])


def _bound(number: int) -> bool:
    return number % CARD != CARD - 1


def _host(card: int) -> str:
    return f"other-{card // HOST_CARDS}"


def _address(card: int) -> str:
    return f"0000:{card % HOST_CARDS + 1:02x}:00.0"


def _device(card: int, id_: int) -> dict[str, Any]:
    return {
        "id": id_,
        "uuid": str(uuid4()),
        "host": _host(card),
        "address": _address(card),
        "backend": "fake",
        "type": "FPGA",
        "vendor": "0xABCD",
        "model": "fake",
        "std_board_info": {},
        "vendor_board_info": {},
        "health": "ok",
        "setup_required": False,
        "reboot_required": False,
    }


def _deployable(card: int, id_: int, device: int) -> dict[str, Any]:
    host, address = _host(card), _address(card)
    return {
        "id": id_,
        "uuid": str(uuid4()),
        "device_id": device,
        "address": address,
        "name": names.provider_name(host, address),
        "rp_uuid": names.provider_uuid(host, address),
        "resource_class": "FPGA",
        "traits": [TRAIT],
        "attributes": {},
        "num_accelerators": CARD,
    }


def _provider(card: int) -> dict[str, Any]:
    host, address = _host(card), _address(card)
    name = names.provider_name(host, address)
    # Published and just audited: the conductor has nothing to do about it.
    return {
        "uuid": names.provider_uuid(host, address),
        "name": name,
        "host": host,
        "published": 1,
        "updated_at": timeutils.utcnow(),
    }


def _handle(number: int, id_: int, deployable: int, owner: int | None) -> dict[str, Any]:
    function = f"{number % CARD:x}"
    return {
        "id": id_,
        "uuid": str(uuid4()),
        "deployable_id": deployable,
        "address": f"{number % CARD:04}",
        "type": "TEST_PCI",
        "info": {"domain": "0000", "bus": "01", "device": "00", "function": function},
        "request_id": owner,
    }


def _request(number: int, id_: int, profile_id: int, profile: str, project: str) -> dict[str, Any]:
    card, bound = number // CARD, _bound(number)
    host = _host(card)
    return {
        "id": id_,
        "uuid": str(uuid4()),
        "state": "Bound" if bound else "Initial",
        "profile_id": profile_id,
        "device_profile_name": profile,
        "device_profile_group_id": 0,
        "resource_class": "FPGA",
        "group": dict(GROUPS[0]),
        "project_id": project,
        "hostname": host if bound else None,
        "device_rp_uuid": names.provider_uuid(host, _address(card)) if bound else None,
        "instance_uuid": str(uuid4()) if bound else None,
        "instance_slot": 0 if bound else None,
    }
