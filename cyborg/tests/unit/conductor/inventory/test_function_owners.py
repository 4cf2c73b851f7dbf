# SPDX-License-Identifier: Apache-2.0
"""Owners of the PCI functions that the guests of a host have."""

from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.inventory.function_owners import FunctionOwners
from cyborg.core.errors import Invalid
from cyborg.core.inventory.functions import MAX_FUNCTIONS
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements

SERVER, OTHER = str(uuid4()), str(uuid4())


@pytest.fixture
def owners(engine: sa.Engine) -> FunctionOwners:
    """Handles of a server, free, leased, of an external driver, of mdev, elsewhere, of VFs."""
    rows.insert_card(engine, handles=5)
    rows.insert_card(engine, "compute-2", "0000:02:00.0", handles=1)
    rows.insert_card(engine, address="0000:03:00.0", handles=1)
    rows.insert_card(engine, address="0000:04:00.0", handles=1)
    profile = rows.insert_profile(engine)
    kinds = ("PCI", "PCI", "PCI", "PCI", "MDEV", "PCI", "PCI", "VFIO")
    instances = (SERVER, None, None, SERVER, SERVER, SERVER, SERVER, SERVER)
    addresses = [f"0000:01:00.{n}" for n in range(3)]
    addresses += ["port-3", "mdev", "0000:02:00.0", "0000:03:02.1", "0000:04:02.1"]
    handles = sorted(rows.read(engine, schema.attach_handles), key=lambda row: row["id"])
    for number, handle in enumerate(handles):
        values: dict[str, Any] = {"type": kinds[number], "address": addresses[number]}
        if number in (6, 7):
            bus = {6: "03", 7: "04"}[number]
            values["info"] = {"domain": "0000", "bus": bus, "device": "02", "function": "1"}
        if number != 1:
            instance = instances[number]
            rows.insert_arq(
                engine, profile, state="Bound", instance_uuid=instance, instance_slot=number
            )
            values["arq_id"] = max(row["id"] for row in rows.read(engine, schema.arqs))
        rows.update(engine, schema.attach_handles, handle["id"], **values)
    return FunctionOwners(UnitOfWork(engine))


@pytest.mark.parametrize(
    ("host", "instance", "address", "owner"),
    [
        ("compute-1", SERVER, "0000:01:00.0", "instance"),
        ("compute-1", SERVER.upper(), "01:00.0", "instance"),
        ("compute-1", OTHER, "0000:01:00.0", "other"),
        ("compute-1", SERVER, "0000:01:00.1", None),
        ("compute-1", SERVER, "0000:01:00.2", "other"),
        ("compute-1", SERVER, "0000:01:00.3", "instance"),
        ("compute-1", SERVER, "0000:01:00.4", "other"),
        ("compute-1", SERVER, "0000:03:02.1", "instance"),
        ("compute-1", SERVER, "0000:03:00.0", "other"),
        ("compute-1", SERVER, "0000:03:02.2", None),
        ("compute-1", SERVER, "0000:04:02.1", "instance"),
        ("compute-1", OTHER, "0000:04:02.1", "other"),
        ("compute-1", SERVER, "0000:04:00.0", "other"),
        ("compute-1", SERVER, "0000:02:00.0", None),
        ("compute-3", SERVER, "0000:01:00.0", None),
    ],
    ids=[
        *("same instance", "other spelling", "other instance", "free", "lease", "address in info"),
        *("parent of a mediated device", "virtual", "its physical", "its free sibling"),
        *("a vGPU", "a vGPU of another instance", "the card of a vGPU"),
        *("other host", "unknown host"),
    ],
)
def test_owner_of_a_function(
    owners: FunctionOwners, host: str, instance: str, address: str, owner: str | None
) -> None:
    functions = [{"instance": instance, "address": address}]
    assert owners.find(host, functions) == {"owners": [owner]}


def test_owners_have_the_order_of_the_functions_and_cost_one_statement(
    engine: sa.Engine, owners: FunctionOwners
) -> None:
    functions = [{"instance": SERVER, "address": f"0000:01:00.{n}"} for n in (2, 1, 0)]
    with count_statements(engine) as statements:
        assert owners.find("compute-1", functions) == {"owners": ["other", None, "instance"]}
    assert len(statements) == 1
    assert owners.find("compute-1", []) == {"owners": []}


@pytest.mark.parametrize(
    "functions",
    [
        None,
        {},
        [None],
        [{}],
        [{"instance": SERVER}],
        [{"address": "0000:01:00.0"}],
        [{"instance": "x", "address": "0000:01:00.0"}],
        [{"instance": SERVER, "address": "x"}],
        [{"instance": SERVER, "address": ["0000:01:00.0"]}],
        [{"instance": SERVER, "address": "0000:01:00.0"}] * (MAX_FUNCTIONS + 1),
    ],
)
def test_malformed_functions_are_refused(owners: FunctionOwners, functions: Any) -> None:
    with pytest.raises(Invalid):
        owners.find("compute-1", functions)
