# SPDX-License-Identifier: Apache-2.0
"""The summary of the cloud in the API."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.api.v2.summary import MAX_NAMED, _count_unhealthy
from cyborg.db import schema
from cyborg.db.engine import Reader
from cyborg.db.handles.usage import USES
from cyborg.db.totals import read as totals
from cyborg.db.totals.cache import CountCache
from cyborg.tests.fixtures.clouds.api import ApiEnv
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.machine.options import make_conf

PATH = "/v2/summary"
NO_HANDLES = dict.fromkeys((*USES, "undeliverable"), 0)


@pytest.fixture
def api(sqlite_engine: sa.Engine) -> ApiEnv:
    """Return an API without authentication."""
    conf = make_conf()
    conf.set_override("auth_strategy", "noauth")
    return ApiEnv(conf, sqlite_engine)


def insert_agents(engine: sa.Engine, prefix: str, number: int, seconds: int) -> None:
    """Insert agents whose last heartbeats are ``seconds`` old and older."""
    now = datetime.now(UTC).replace(tzinfo=None)
    for n in range(number):
        agent = rows.insert_agent(engine, host=f"{prefix}-{n:02}")
        at = now - timedelta(seconds=seconds + n)
        rows.update(engine, schema.services, agent, **rows.heartbeat(at))


def test_summary_of_an_empty_cloud_has_zeros(api: ApiEnv) -> None:
    found = api.get(PATH)
    assert found["hosts"] == {"up": 0, "late": 0, "down": 0, "cordoned": 0}
    names = ("total", "disabled", "unhealthy", "undeliverable", "failing", "maintenance")
    assert found["devices"] == dict.fromkeys(names, 0)
    assert found["providers"] == {"total": 0, "stale": 0, "failing": 0}
    lists = ("services", "down_services", "resource_classes", "unhealthy_devices", "jobs", "outbox")
    assert [found[name] for name in lists] == [[]] * len(lists)
    assert found["accelerator_requests"] == found["device_contexts"] == found["attachments"] == {}
    assert found["guest_devices_missing"] == 0


def test_summary_counts_handles_by_resource_class(api: ApiEnv) -> None:
    engine = api.engine
    gpu = rows.insert_card(engine, address="0000:02:00.0", handles=3, resource_class="PGPU")
    rows.insert_card(engine, address="0000:03:00.0", handles=2, resource_class="FPGA")
    disabled: dict[str, Any] = {"handles": 4, "resource_class": "FPGA", "status": "maintaining"}
    rows.insert_card(engine, address="0000:04:00.0", **disabled)
    uuid = rows.insert_arq(engine, rows.insert_profile(engine), state="Bound")
    (arq,) = rows.read(engine, schema.arqs, uuid=uuid)
    owned, dirty, _ = rows.read(engine, schema.attach_handles, deployable_id=gpu.deployable_id)
    rows.update(engine, schema.attach_handles, owned["id"], arq_id=arq["id"])
    rows.update(engine, schema.attach_handles, dirty["id"], needs_cleaning=True)
    found = api.get(PATH)
    assert found["resource_classes"] == [
        {"resource_class": "FPGA", "total": 6, **NO_HANDLES, "free": 2, "cordoned": 4},
        {"resource_class": "PGPU", "total": 3, **NO_HANDLES, "free": 1, "owned": 1, "dirty": 1},
    ]
    assert found["accelerator_requests"] == {"Bound": 1}
    assert (found["devices"]["total"], found["count_age"]) == (3, 0)


def test_summary_counts_undeliverable_handles_and_devices_apart(api: ApiEnv) -> None:
    undeliverable: dict[str, Any] = {"deliverable": False, "undeliverable_reason": "no IOMMU"}
    rows.insert_card(api.engine, address="0000:02:00.0", handles=3, **undeliverable)
    rows.insert_card(api.engine, address="0000:03:00.0", handles=2, status="maintaining")
    # The disk of the root file system: it is not offered, and no device with a problem.
    device = {**rows.DEVICE_VALUES, **undeliverable}
    rows.insert(api.engine, schema.devices, host="compute-2", address="0000:04:00.0", **device)
    found = api.get(PATH)
    counts = {**NO_HANDLES, "cordoned": 5, "undeliverable": 3}
    assert found["resource_classes"] == [{"resource_class": "FPGA", "total": 5, **counts}]
    assert (found["devices"]["total"], found["devices"]["undeliverable"]) == (3, 1)


def test_summary_counts_the_devices_that_running_guests_lack(api: ApiEnv) -> None:
    profile, now = rows.insert_profile(api.engine), datetime.now(UTC).replace(tzinfo=None)
    facts: dict[str, Any] = {"state": "Bound", "instance_uuid": "i"}
    rows.insert_arq(api.engine, profile, **facts, instance_slot=0)
    for slot in (1, 2):
        failed = {"attach_error": "No slots", "attach_failed_at": now}
        rows.insert_arq(api.engine, profile, **facts, instance_slot=slot, **failed)
    rows.insert_arq(api.engine, profile, **facts, instance_slot=3, attached_at=now)
    assert api.get(PATH)["guest_devices_missing"] == 2


def test_summary_names_the_hosts_that_are_down_for_longest(api: ApiEnv) -> None:
    insert_agents(api.engine, "up", 2, 0)
    insert_agents(api.engine, "down", MAX_NAMED + 3, 1000)
    found = api.get(PATH)
    assert found["hosts"] == {"up": 2, "late": 0, "down": MAX_NAMED + 3, "cordoned": 0}
    hosts = [service["host"] for service in found["down_services"]]
    assert hosts == [f"down-{n:02}" for n in range(MAX_NAMED + 2, 2, -1)]


def test_summary_of_many_devices_names_few_in_as_many_statements(api: ApiEnv) -> None:
    with count_statements(api.engine) as empty:
        api.get(PATH)
    for n in range(MAX_NAMED + 5):
        rows.insert_card(api.engine, address=f"0000:{n:02x}:00.0", handles=2, health="unhealthy")
    # Another process of the API, which has no counts yet.
    other = ApiEnv(api.conf, api.engine)
    with count_statements(api.engine) as full:
        found = other.get(PATH)
    assert len(found["unhealthy_devices"]) == MAX_NAMED
    assert found["devices"]["unhealthy"] == MAX_NAMED + 5
    assert len(full) == len(empty)


def test_summary_does_not_count_devices_that_have_recovered(api: ApiEnv) -> None:
    card = rows.insert_card(api.engine, health="unhealthy")
    # The cached count is used for minutes in a large cloud.
    counts = CountCache(Reader(api.engine), clock=lambda: 0.0)
    assert counts.read()[0].devices["enabled", "unhealthy"] == 1
    rows.update(api.engine, schema.devices, card.device_id, health="ok")
    with api.engine.connect() as connection:
        found = totals.read(connection, now=datetime.now(UTC).replace(tzinfo=None))
    assert _count_unhealthy(counts.read()[0], found) == 0


def test_summary_is_absent_before_2_6(api: ApiEnv) -> None:
    answer = api.call("GET", PATH, headers={"OpenStack-API-Version": "accelerator 2.5"})
    assert answer.status_int == 404
    assert "2.6" in answer.text
