# SPDX-License-Identifier: Apache-2.0
"""The life of devices, and what Placement has of them, as the API shows it from 2.4 on."""

from datetime import timedelta
from typing import Any

import pytest
from oslo_utils import timeutils

from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.fixtures import rows
from cyborg.fixtures.api import ApiBed, fault

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
}


def only(api: ApiBed, collection: str) -> dict[str, Any]:
    (found,) = api.get(f"/v2/{collection}")[collection]
    assert api.get(f"/v2/{collection}/{found['uuid']}") == found
    return dict(found)


def test_each_version_shows_what_it_always_did(api: ApiBed) -> None:
    rows.card(api.engine)
    for version, keys in (("2.0", BASE), ("2.2", BASE), ("2.3", BASE | {"status"})):
        (found,) = api.get("/v2/devices", version)["devices"]
        assert set(found) == keys
    assert set(only(api, "devices")) == BASE | {"status"} | NEW


def test_a_sick_device_says_why_and_since_when(api: ApiBed) -> None:
    since = timeutils.utcnow() - timedelta(hours=1)
    facts = {"health_reason": "link down", "health_since": since, "numa_node": 1, "serial": "S1"}
    rows.card(api.engine, health="unhealthy", status="maintaining", **facts)
    found = only(api, "devices")
    assert (found["state"], found["state_reasons"]) == ("unhealthy", ["unhealthy", "maintaining"])
    assert found["health_since"] == f"{since.isoformat()}+00:00"
    shown = {key: found[key] for key in ("health_reason", "numa_node", "serial", "address")}
    assert shown == {
        "health_reason": "link down",
        "numa_node": 1,
        "serial": "S1",
        "address": "0000:01:00.0",
    }


def test_a_host_that_is_down_shows_at_its_devices(api: ApiBed) -> None:
    rows.card(api.engine)
    rows.card(api.engine, "compute-2", address="0000:02:00.0")
    agent = rows.agent(api.engine)
    rows.change(api.engine, schema.services, agent, down_since=timeutils.utcnow())
    found = api.get("/v2/devices")["devices"]
    assert [device["state"] for device in found] == ["host_down", "ready"]


def test_one_part_that_is_programmed_shows_at_its_device(api: ApiBed) -> None:
    card = rows.card(api.engine)
    job: dict[str, Any] = {"kind": "program", "host": "h", "subject": "s", "arguments": {}}
    id_ = rows.insert(api.engine, schema.jobs, **job)
    rows.change(api.engine, schema.deployables, card.deployable_id, job_id=id_)
    assert only(api, "devices")["state"] == "programming"


def test_the_new_filters(api: ApiBed) -> None:
    rows.card(api.engine, address="a", health="unhealthy")
    rows.card(api.engine, address="b", status="maintaining")
    rows.card(api.engine, "compute-2", address="b")

    def found(query: str) -> list[str]:
        devices = api.get(f"/v2/devices?{query}")["devices"]
        return [f"{device['hostname']}/{device['address']}" for device in devices]

    assert found("health=unhealthy") == ["compute-1/a"]
    assert found("status=maintaining") == ["compute-1/b"]
    assert found("address=b&hostname=compute-2") == ["compute-2/b"]
    assert found("address=b&health=unhealthy") == []
    for query in ("health=", "status=broken"):
        newest = {"OpenStack-API-Version": "accelerator 2.4"}
        assert api.call("GET", f"/v2/devices?{query}", headers=newest).status_int == 400
    refused = api.call("GET", "/v2/devices?address=b")
    assert refused.status_int == 400
    assert "address: unknown parameter; known are filters.field, filters.value, hostname," in fault(
        refused
    )


@pytest.mark.parametrize(
    ("values", "status", "since"),
    [
        ({"published": 1, "revision": 1}, "in_sync", False),
        ({"published": 1, "revision": 2}, "stale", True),
        ({"published": 0, "revision": 1, "error": "refused: rename it"}, "error", True),
        # It is only compared: nothing is known to be wrong.
        ({"published": 1, "revision": 1, "audited": True}, "in_sync", False),
    ],
)
def test_what_placement_has(api: ApiBed, values: dict[str, Any], status: str, since: bool) -> None:
    rows.card(api.engine)
    (provider,) = rows.read(api.engine, schema.providers)
    then = timeutils.utcnow()
    stale = None if values == {"published": 1, "revision": 1} else then
    rows.change(api.engine, schema.providers, provider["id"], stale_since=stale, **values)
    told = only(api, "deployables")["placement"]
    assert told == {
        "status": status,
        "stale_since": f"{then.isoformat()}+00:00" if since else None,
        "error": values.get("error"),
    }
    (before,) = api.get("/v2/deployables", "2.3")["deployables"]
    assert not {"placement", "draining"} & set(before)


def test_a_deployable_drains_with_its_device(api: ApiBed) -> None:
    card = rows.card(api.engine)
    assert only(api, "deployables")["draining"] is False
    rows.change(api.engine, schema.devices, card.device_id, draining=True)
    assert only(api, "deployables")["draining"] is True
    assert only(api, "devices")["state"] == "draining"


def test_the_cost_does_not_grow(api: ApiBed) -> None:
    costs = []
    for n in range(1, 20):
        rows.card(api.engine, address=f"{n}", handles=1)
        if n in (1, 19):
            with counting(api.engine) as count:
                api.get("/v2/devices")
                api.get("/v2/deployables")
            costs.append(len(count))
    assert costs[0] == costs[1]
