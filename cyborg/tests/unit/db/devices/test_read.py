# SPDX-License-Identifier: Apache-2.0
"""Tests of reading devices, deployables and attributes."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.db.deployables import attributes
from cyborg.db.deployables import read as deployables
from cyborg.db.devices import read as devices
from cyborg.db.engine import Reader
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements


def test_device_has_its_host_and_boards(engine: sa.Engine) -> None:
    rows.insert_card(engine, std_board_info={"product_id": "1"}, numa_node=1)
    (row,) = rows.read(engine, schema.devices)
    with Reader(engine).connect() as connection:
        device = devices.get(connection, row["uuid"])
    assert device is not None
    assert "host" not in device
    assert "id" not in device
    assert device["hostname"] == "compute-1"
    assert device["std_board_info"] == {"product_id": "1"}
    assert device["status"] == "enabled"
    assert device["draining"] is False
    assert device["updated_at"] is None


def test_filters_of_devices(engine: sa.Engine) -> None:
    rows.insert_card(engine, "one", "a", type="GPU", vendor="10de")
    rows.insert_card(engine, "one", "b", type="FPGA", vendor="10ee")
    rows.insert_card(engine, "two", "a", type="FPGA", vendor="8086", status="maintaining")
    with Reader(engine).connect() as connection:

        def count(**filters: Any) -> int:
            return len(devices.find(connection, **filters))

        assert count() == 3
        assert count(type="FPGA") == 2
        assert count(type="FPGA", hostname="one") == 1
        assert count(vendor="8086") == count(status="maintaining") == 1
        assert count(type="nothing") == count(hostname="") == 0


def test_deployable_has_its_parent_root_and_device(engine: sa.Engine) -> None:
    card = rows.insert_card(engine, handles=3, backend="my-fpgas")
    rows.update(engine, schema.deployables, card.deployable_id, attributes={"a": "1", "b": "2"})
    for key, value in (("b", "operator"), ("c", "3")):
        rows.insert(
            engine, schema.attributes, deployable_id=card.deployable_id, key=key, value=value
        )
    child_id = rows.insert(
        engine,
        schema.deployables,
        device_id=card.device_id,
        host="compute-1",
        parent_id=card.deployable_id,
        root_id=card.deployable_id,
        address="part",
        name="part",
        rp_uuid="part",
        resource_class="FPGA",
        traits=["CUSTOM_X"],
        attributes={},
    )
    (device,) = rows.read(engine, schema.devices)
    root_row, child_row = rows.read(engine, schema.deployables)
    assert child_row["id"] == child_id
    with Reader(engine).connect() as connection:
        root, child = deployables.find(connection)
        assert deployables.get(connection, child_row["uuid"]) == child
        assert deployables.find(connection, rp_uuid=card.provider) == [root]
        assert deployables.find(connection, device_uuid=device["uuid"]) == [root, child]
        assert deployables.find(connection, hostname="elsewhere") == []
    assert root["attributes"] == {"a": "1", "b": "operator", "c": "3"}
    assert child["attributes"] == {}
    assert (root["parent_uuid"], root["root_uuid"]) == (None, None)
    assert (child["parent_uuid"], child["root_uuid"]) == (root_row["uuid"],) * 2
    assert root["device_uuid"] == child["device_uuid"] == device["uuid"]
    assert (root["driver_name"], root["hostname"]) == ("my-fpgas", "compute-1")
    assert (root["num_accelerators"], root["traits"]) == (3, [rows.TRAIT])
    assert not {"id", "device_id", "parent_id", "root_id"} & set(root)


def test_filters_of_attributes(engine: sa.Engine) -> None:
    cards = [rows.insert_card(engine, address=address) for address in ("a", "b")]
    for card in cards:
        for key in ("site", "rack"):
            rows.insert(
                engine, schema.attributes, deployable_id=card.deployable_id, key=key, value="x"
            )
    first = rows.read(engine, schema.deployables)[0]["uuid"]
    with Reader(engine).connect() as connection:
        assert len(attributes.find(connection)) == 4
        assert len(attributes.find(connection, key="site")) == 2
        (attribute,) = attributes.find(connection, key="site", deployable_uuid=first)
        assert attributes.get(connection, attribute["uuid"]) == attribute
    keys = {"uuid", "deployable_uuid", "key", "value", "created_at", "updated_at"}
    assert set(attribute) == keys
    assert attribute["deployable_uuid"] == first


@pytest.mark.parametrize("number", [1, 30])
def test_find_needs_a_constant_number_of_statements(sqlite_engine: sa.Engine, number: int) -> None:
    for address in range(number):
        rows.insert_card(sqlite_engine, address=f"{address}", handles=1)
    with Reader(sqlite_engine).connect() as connection:
        for resource, cost in ((devices, 4), (deployables, 2), (attributes, 1)):
            with count_statements(sqlite_engine) as count:
                resource.find(connection)
            assert len(count) == cost, count.statements
