# SPDX-License-Identifier: Apache-2.0
"""State of devices and Placement status of deployables in the API, from version 2.4 on."""

from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core.text import to_iso
from cyborg.db import schema
from cyborg.tests.fixtures.clouds.api import ApiEnv, error_message
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements

BASE = {
    "uuid",
    "type",
    "vendor",
    "model",
    "std_board_info",
    "vendor_board_info",
    "hostname",
    "created_at",
    "updated_at",
    "links",
}
NEW = {
    "state",
    "state_reasons",
    "health",
    "health_reason",
    "health_since",
    "address",
    "backend",
    "numa_node",
    "serial",
    "setup_required",
    "reboot_required",
    "draining",
    "placement",
}

NEWEST = {
    "deliverable",
    "undeliverable_reason",
    "topology",
    "layout",
    "layouts",
    "desired_layout",
    "job_errors",
}


def get_single(api: ApiEnv, collection: str) -> dict[str, Any]:
    (item,) = api.get(f"/v2/{collection}")[collection]
    assert api.get(f"/v2/{collection}/{item['uuid']}") == item
    return dict(item)


def test_device_fields_by_version(api: ApiEnv) -> None:
    rows.insert_card(api.engine)
    for version, keys in (("2.0", BASE), ("2.2", BASE), ("2.3", BASE | {"status"})):
        (device,) = api.get("/v2/devices", version)["devices"]
        assert set(device) == keys
    (device,) = api.get("/v2/devices", "2.4")["devices"]
    assert set(device) == BASE | {"status"} | NEW
    (device,) = api.get("/v2/devices", "2.5")["devices"]
    assert set(device) == BASE | {"status"} | NEW | NEWEST
    device = get_single(api, "devices")
    assert set(device) == BASE | {"status", "maintenance", "use"} | NEW | NEWEST


def test_undeliverable_device_shows_reason_topology_and_layout(api: ApiEnv) -> None:
    topology = {"pci_path": "0000:00:1c.0/0000:01:00.0", "link_width": "8"}
    facts: dict[str, Any] = {"deliverable": False, "undeliverable_reason": "no IOMMU: enable it"}
    layout = {"name": "whole", "offers": {"FPGA": 16}, "traits": []}
    more: dict[str, Any] = {"topology": topology, "layout": "whole"}
    rows.insert_card(api.engine, layouts=[layout], **more, **facts)
    device = get_single(api, "devices")
    assert {key: device[key] for key in NEWEST} == facts | more | {
        "layouts": ["whole"],
        "desired_layout": None,
        "job_errors": [],
    }
    assert (device["state"], device["state_reasons"]) == ("undeliverable", ["undeliverable"])
    assert api.get("/v2/accelerators")["accelerators"][0]["state_reasons"] == ["undeliverable"]


def test_undeliverable_device_before_2_5_requires_setup(api: ApiEnv) -> None:
    """A new value of ``state`` needs a new version."""
    rows.insert_card(api.engine, deliverable=False, setup_required=True, health="unhealthy")
    (device,) = api.get("/v2/devices", "2.4")["devices"]
    assert (device["state"], device["state_reasons"]) == (
        "unhealthy",
        ["unhealthy", "setup_required"],
    )
    (accelerator, *_) = api.get("/v2/accelerators", "2.4")["accelerators"]
    assert accelerator["state_reasons"] == ["unhealthy", "setup_required"]


def test_failed_restore_is_shown_since_2_5(api: ApiEnv) -> None:
    card = rows.insert_card(api.engine, handles=2)
    job = rows.insert(
        api.engine,
        schema.jobs,
        kind="restore",
        host=card.host,
        subject="s",
        arguments={},
        error="it broke",
    )
    bind = {"state": "Bound", "device_rp_uuid": card.provider, "job_id": job}
    rows.insert_arq(api.engine, rows.insert_profile(api.engine), **bind)
    (arq,) = rows.read(api.engine, schema.arqs)
    (first, _) = rows.read(api.engine, schema.attach_handles)
    rows.update(api.engine, schema.attach_handles, first["id"], arq_id=arq["id"])
    device = get_single(api, "devices")
    assert (device["state"], device["state_reasons"]) == ("restore_failed", ["restore_failed"])
    assert len(device["job_errors"]) == 1
    (device,) = api.get("/v2/devices", "2.4")["devices"]
    assert (device["state"], device["state_reasons"]) == ("unhealthy", ["unhealthy"])


def test_failing_device_is_shown_since_2_5(api: ApiEnv) -> None:
    failure = {"kind": "prepare", "job": "j", "subject": "s", "error": "it broke"}
    failure["at"] = "2026-01-01T00:00:00.000000+00:00"
    facts: dict[str, Any] = {
        "failing": True,
        "retry_at": datetime(2026, 1, 1),
        "failed_prepares": 3,
    }
    rows.insert_card(api.engine, job_failures=[failure], **facts)
    device = get_single(api, "devices")
    assert (device["state"], device["state_reasons"]) == ("failing", ["failing"])
    assert device["job_errors"] == [
        "closed until 2026-01-01T00:00:00Z, because 3 prepare jobs failed in a row",
        "prepare of s failed at 2026-01-01T00:00:00Z, job j: it broke",
    ]
    (device,) = api.get("/v2/devices", "2.4")["devices"]
    assert (device["state"], "job_errors" in device) == ("unhealthy", False)


def test_failed_cleaning_is_shown_since_2_5(api: ApiEnv) -> None:
    card = rows.insert_card(api.engine, handles=1)
    job = rows.insert(
        api.engine,
        schema.jobs,
        kind="release",
        host=card.host,
        subject="s",
        arguments={},
        error="it broke",
    )
    (handle,) = rows.read(api.engine, schema.attach_handles)
    rows.update(api.engine, schema.attach_handles, handle["id"], needs_cleaning=True, job_id=job)
    (accelerator,) = api.get("/v2/accelerators")["accelerators"]
    assert (accelerator["state"], accelerator["error"]) == ("error", "it broke")
    (accelerator,) = api.get("/v2/accelerators", "2.4")["accelerators"]
    assert accelerator["state"] == "dirty"
    assert "error" not in accelerator


def test_find_devices_filters_by_deliverable(api: ApiEnv) -> None:
    rows.insert_card(api.engine, address="a", deliverable=False)
    rows.insert_card(api.engine, address="b")
    for value, addresses in (("true", ["b"]), ("false", ["a"])):
        devices = api.get(f"/v2/devices?deliverable={value}")["devices"]
        assert [device["address"] for device in devices] == addresses
    newest = {"OpenStack-API-Version": "accelerator 2.5"}
    assert api.call("GET", "/v2/devices?deliverable=1", headers=newest).status_int == 400


def test_unhealthy_device_has_reason_and_time(api: ApiEnv) -> None:
    since = timeutils.utcnow() - timedelta(hours=1)
    facts: dict[str, Any] = {
        "health_reason": "link down",
        "health_since": since,
        "numa_node": 1,
        "serial": "S1",
    }
    rows.insert_card(api.engine, health="unhealthy", status="maintaining", **facts)
    device = get_single(api, "devices")
    assert (device["state"], device["state_reasons"]) == ("unhealthy", ["unhealthy", "maintaining"])
    assert device["health_since"] == to_iso(since)
    fields = {key: device[key] for key in ("health_reason", "numa_node", "serial", "address")}
    assert fields == {
        "health_reason": "link down",
        "numa_node": 1,
        "serial": "S1",
        "address": "0000:01:00.0",
    }


def test_device_of_down_host_is_host_down(api: ApiEnv) -> None:
    rows.insert_card(api.engine)
    rows.insert_card(api.engine, "compute-2", address="0000:02:00.0")
    agent = rows.insert_agent(api.engine)
    rows.update(api.engine, schema.services, agent, down_since=timeutils.utcnow())
    devices = api.get("/v2/devices")["devices"]
    assert [device["state"] for device in devices] == ["host_down", "ready"]


@pytest.mark.slow
def test_device_with_programming_deployable_is_programming(api: ApiEnv) -> None:
    card = rows.insert_card(api.engine)
    job: dict[str, Any] = {"kind": "program", "host": "h", "subject": "s", "arguments": {}}
    id_ = rows.insert(api.engine, schema.jobs, **job)
    rows.update(api.engine, schema.deployables, card.deployable_id, job_id=id_)
    assert get_single(api, "devices")["state"] == "programming"


def test_find_devices_filters_since_2_4(api: ApiEnv) -> None:
    rows.insert_card(api.engine, address="a", health="unhealthy")
    rows.insert_card(api.engine, address="b", status="maintaining")
    rows.insert_card(api.engine, "compute-2", address="b")

    def find_addresses(query: str) -> list[str]:
        devices = api.get(f"/v2/devices?{query}")["devices"]
        return [f"{device['hostname']}/{device['address']}" for device in devices]

    assert find_addresses("health=unhealthy") == ["compute-1/a"]
    assert find_addresses("status=maintaining") == ["compute-1/b"]
    assert find_addresses("address=b&hostname=compute-2") == ["compute-2/b"]
    assert find_addresses("address=b&health=unhealthy") == []
    for query in ("health=", "status=broken"):
        newest = {"OpenStack-API-Version": "accelerator 2.4"}
        assert api.call("GET", f"/v2/devices?{query}", headers=newest).status_int == 400
    refused = api.call("GET", "/v2/devices?address=b")
    assert refused.status_int == 400
    assert (
        "address: unknown parameter, supported: filters.field, filters.value, hostname,"
        in error_message(refused)
    )


@pytest.mark.parametrize(
    ("values", "status", "since"),
    [
        ({"published_revision": 1, "revision": 1}, "in_sync", False),
        ({"published_revision": 1, "revision": 2}, "stale", True),
        ({"published_revision": 0, "revision": 1, "error": "refused: rename it"}, "error", True),
        # The provider is due for verification, but no drift is known.
        ({"published_revision": 1, "revision": 1, "verify_only": True}, "in_sync", False),
    ],
)
def test_deployable_placement_status(
    api: ApiEnv, values: dict[str, Any], status: str, since: bool
) -> None:
    rows.insert_card(api.engine)
    (provider,) = rows.read(api.engine, schema.providers)
    now = timeutils.utcnow()
    stale = None if values == {"published_revision": 1, "revision": 1} else now
    rows.update(api.engine, schema.providers, provider["id"], stale_since=stale, **values)
    placement = get_single(api, "deployables")["placement"]
    assert placement == {
        "status": status,
        "stale_since": to_iso(now) if since else None,
        "error": values.get("error"),
    }
    (older,) = api.get("/v2/deployables", "2.3")["deployables"]
    assert not {"placement", "draining"} & set(older)


def test_deployable_is_draining_with_device(api: ApiEnv) -> None:
    card = rows.insert_card(api.engine)
    assert get_single(api, "deployables")["draining"] is False
    rows.update(api.engine, schema.devices, card.device_id, draining=True)
    assert get_single(api, "deployables")["draining"] is True
    assert get_single(api, "devices")["state"] == "draining"


def test_find_query_count_is_constant(api: ApiEnv) -> None:
    query_counts = []
    for n in range(1, 20):
        rows.insert_card(api.engine, address=f"{n}", handles=1)
        if n in (1, 19):
            with count_statements(api.engine) as count:
                api.get("/v2/devices")
                api.get("/v2/deployables")
            query_counts.append(len(count))
    assert query_counts[0] == query_counts[1]


def test_device_placement_is_worst_of_providers(api: ApiEnv) -> None:
    card = rows.insert_card(api.engine)
    (provider,) = rows.read(api.engine, schema.providers)
    for values, placement in (
        ({}, "in_sync"),
        ({"revision": 2}, "stale"),
        ({"error": "no such parent"}, "error"),
    ):
        rows.update(api.engine, schema.providers, provider["id"], **values)
        assert get_single(api, "devices")["placement"] == placement
    with api.engine.begin() as tx:
        tx.execute(sa.delete(schema.providers))
    assert get_single(api, "devices")["placement"] == "stale"
    with api.engine.begin() as tx:
        tx.execute(sa.delete(schema.attach_handles))
        tx.execute(sa.delete(schema.deployables))
    assert get_single(api, "devices")["placement"] is None
    assert card.host == "compute-1"
