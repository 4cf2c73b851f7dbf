# SPDX-License-Identifier: Apache-2.0
"""Other ARQs of the same project, inserted directly, to simulate a large cloud."""

from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core import naming
from cyborg.db import schema
from cyborg.tests.fixtures.databases.rows import DEVICE_VALUES, GROUPS, TRAIT

BATCH = 2000
# ARQs and handles of a card: all ARQs are Bound except the last, which is Initial.
CARD = 16

HOST_CARDS = 4


def insert(engine: sa.Engine, profile: str, project: str, begin: int, end: int) -> None:
    """Insert the ARQs from number ``begin`` to ``end``, with their devices and handles."""
    with engine.begin() as tx:
        table = schema.device_profiles
        profile_id = tx.execute(sa.select(table.c.id).where(table.c.name == profile)).scalar_one()
        arq_id, device, deployable = (
            (tx.scalar(sa.select(sa.func.max(table.c.id))) or 0) + 1
            for table in (schema.arqs, schema.devices, schema.deployables)
        )
        rows: dict[sa.Table, list[dict[str, Any]]] = {
            schema.devices: [],
            schema.deployables: [],
            schema.providers: [],
            schema.arqs: [],
            schema.attach_handles: [],
        }
        common = {"profile_id": profile_id, "device_profile_name": profile, "project_id": project}
        for n in range(begin, end):
            rows[schema.arqs].append({"id": arq_id + n - begin, **_make_arq(n), **common})
        for i, card in enumerate(range(-(-begin // CARD), -(-end // CARD))):
            ids = {"id": deployable + i, "device_id": device + i}
            rows[schema.devices].append({"id": device + i, **_make_device(card)})
            rows[schema.deployables].append({**ids, **_make_deployable(card)})
            rows[schema.providers].append(_make_provider(card))
            for n in range(card * CARD, (card + 1) * CARD):
                owner = arq_id + n - begin if begin <= n < end and _is_bound(n) else None
                handle = {"deployable_id": deployable + i, "arq_id": owner}
                rows[schema.attach_handles].append(_make_handle(n) | handle)
        for table, values in rows.items():
            for first in range(0, len(values), BATCH):
                tx.execute(sa.insert(table), values[first : first + BATCH])
    if engine.dialect.name == "mysql":
        # The server does this itself seconds later; a measurement must not start before it.
        with engine.connect() as connection:
            names = ", ".join(f"`{table.name}`" for table in schema.TABLES)
            connection.exec_driver_sql(f"ANALYZE TABLE {names}").all()


def _is_bound(number: int) -> bool:
    return number % CARD != CARD - 1


def _place(card: int) -> tuple[str, str]:
    """Return the host and the address of a card."""
    return f"other-{card // HOST_CARDS}", f"0000:{card % HOST_CARDS + 1:02x}:00.0"


def _make_device(card: int) -> dict[str, Any]:
    host, address = _place(card)
    return {"uuid": str(uuid4()), "host": host, "address": address, **DEVICE_VALUES}


def _make_deployable(card: int) -> dict[str, Any]:
    host, address = _place(card)
    return {
        "uuid": str(uuid4()),
        "host": host,
        "address": address,
        "name": naming.provider_name(*_place(card)),
        "rp_uuid": naming.provider_uuid(*_place(card)),
        "resource_class": "FPGA",
        "traits": [TRAIT],
        "attributes": {},
        "num_accelerators": CARD,
    }


def _make_provider(card: int) -> dict[str, Any]:
    # Published and just verified, so the conductor does not process it.
    state = {"host": _place(card)[0], "published_revision": 1, "updated_at": timeutils.utcnow()}
    name, uuid = naming.provider_name(*_place(card)), naming.provider_uuid(*_place(card))
    return {"uuid": uuid, "name": name, **state}


def _make_handle(number: int) -> dict[str, Any]:
    function = f"{number % CARD:x}"
    return {
        "uuid": str(uuid4()),
        "address": f"{number % CARD:04}",
        "type": "TEST_PCI",
        "info": {"domain": "0000", "bus": "01", "device": "00", "function": function},
    }


def _make_arq(number: int) -> dict[str, Any]:
    host, address = _place(number // CARD)
    bound = _is_bound(number)
    return {
        "uuid": str(uuid4()),
        "state": "Bound" if bound else "Initial",
        "device_profile_group_id": 0,
        "resource_class": "FPGA",
        "group": dict(GROUPS[0]),
        "hostname": host if bound else None,
        "device_rp_uuid": naming.provider_uuid(host, address) if bound else None,
        "instance_uuid": str(uuid4()) if bound else None,
        "instance_slot": 0 if bound else None,
    }
