# SPDX-License-Identifier: Apache-2.0
"""The list of hosts with their capacity, and the number of rows of a list."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cyborg.db import paging, schema
from cyborg.tests.fixtures.clouds.api import ApiEnv
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements

PATH = "/v2/hosts"
NOW = datetime.now(UTC).replace(tzinfo=None)
OLD = NOW - timedelta(hours=1)
WHOLE = {"whole_free": 0, "largest_free": 0}
USES = ("free", "owned", "dirty", "draining", "cordoned", "undeliverable")


def own(api: ApiEnv, card: rows.Card, number: int) -> None:
    """Give handles of a card to ARQs."""
    profile = rows.insert_profile(api.engine, f"p-{card.provider}")
    handles = rows.read(api.engine, schema.attach_handles, deployable_id=card.deployable_id)
    for handle in handles[:number]:
        uuid = rows.insert_arq(api.engine, profile, state="Bound")
        (arq,) = rows.read(api.engine, schema.arqs, uuid=uuid)
        rows.update(api.engine, schema.attach_handles, handle["id"], arq_id=arq["id"])


def test_hosts_show_free_and_fragmented_capacity(api: ApiEnv) -> None:
    rows.insert_agent(api.engine, "compute-1")
    lost = rows.insert_agent(api.engine, "compute-2")
    rows.update(api.engine, schema.services, lost, down_since=NOW)
    rows.insert_card(api.engine, "compute-1", "0000:01:00.0", handles=4)
    used = rows.insert_card(api.engine, "compute-1", "0000:02:00.0", handles=8)
    own(api, used, 2)
    shut: dict[str, Any] = {"deliverable": False, "undeliverable_reason": "no IOMMU"}
    rows.insert_card(api.engine, "compute-1", "0000:03:00.0", handles=1, **shut)
    rows.insert_card(api.engine, "compute-2", "0000:01:00.0", handles=5, resource_class="PGPU")
    first, second = api.get(PATH)["hosts"]
    assert (first["hostname"], first["state"], first["devices"]) == ("compute-1", "up", 3)
    none = dict.fromkeys(USES, 0)
    assert first["resource_classes"] == [
        {
            "resource_class": "FPGA",
            "total": 13,
            **none,
            **{"free": 10, "owned": 2, "cordoned": 1, "undeliverable": 1},
            **{"whole_free": 4, "largest_free": 6},
        }
    ]
    # The host is down: nothing of it is free, and nothing is undeliverable.
    assert second["resource_classes"] == [
        {"resource_class": "PGPU", "total": 5, **none, "cordoned": 5, **WHOLE}
    ]


def test_device_shows_the_use_of_its_handles(api: ApiEnv) -> None:
    card = rows.insert_card(api.engine, handles=5)
    own(api, card, 2)
    (device,) = api.get("/v2/devices")["devices"]
    none = dict.fromkeys(("dirty", "draining", "cordoned"), 0)
    assert device["use"] == {"total": 5, "free": 3, "owned": 2, **none}
    rows.update(api.engine, schema.devices, card.device_id, draining=True)
    (device,) = api.get("/v2/devices")["devices"]
    assert device["use"] == {"total": 5, "free": 0, "owned": 2, **none, "draining": 3}


@pytest.mark.parametrize(
    ("query", "number"),
    [("", 3), ("?hostname=compute-1", 1), ("?state=up", 2), ("?state=down", 1)],
)
def test_hosts_are_filtered_and_counted(api: ApiEnv, query: str, number: int) -> None:
    for n in range(3):
        agent = rows.insert_agent(api.engine, f"compute-{n}")
    rows.update(api.engine, schema.services, agent, **rows.heartbeat(OLD))
    mark = "&" if query else "?"
    found = api.get(f"{PATH}{query}{mark}limit=1&with_count=true")
    assert (found["count"], len(found["hosts"])) == (number, min(number, 1))


def test_hosts_need_a_constant_number_of_statements(api: ApiEnv) -> None:
    for n in range(30):
        rows.insert_agent(api.engine, f"compute-{n}")
        rows.insert_card(api.engine, f"compute-{n}", handles=2)
    with count_statements(api.engine) as few:
        api.get(f"{PATH}?limit=1")
    with count_statements(api.engine) as many:
        assert len(api.get(PATH)["hosts"]) == 30
    assert len(few) == len(many)


def test_devices_are_filtered_by_model_and_backend(api: ApiEnv) -> None:
    rows.insert_card(api.engine, address="0000:01:00.0", model="A 100", backend="gpus")
    rows.insert_card(api.engine, address="0000:02:00.0", model="A 100", backend="other")
    for query, number in (("model=A%20100", 2), ("model=A%20100&backend=gpus", 1), ("model=A", 0)):
        assert api.get(f"/v2/devices?{query}&with_count=true")["count"] == number
    old = {"OpenStack-API-Version": "accelerator 2.5"}
    for query in ("model=x", "backend=x", "with_count=true"):
        assert api.call("GET", f"/v2/devices?{query}", headers=old).status_int == 400


def test_arqs_are_filtered_by_state_and_counted(api: ApiEnv) -> None:
    profile = rows.insert_profile(api.engine)
    for state in ("Initial", "Bound", "Bound"):
        rows.insert_arq(api.engine, profile, state=state)
    path = "/v2/accelerator_requests"
    assert api.get(f"{path}?state=Bound&with_count=true&limit=1")["count"] == 2
    assert api.get(f"{path}?state=Initial&bind_state=resolved")["arqs"] == []


def test_count_is_limited(api: ApiEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "MAX_COUNT", 2)
    for n in range(4):
        rows.insert_card(api.engine, address=f"0000:0{n}:00.0", handles=1)
    for path in ("devices", "accelerators", "accelerators?resource_class=FPGA"):
        mark = "&" if "?" in path else "?"
        assert api.get(f"/v2/{path}{mark}with_count=true")["count"] == 2
