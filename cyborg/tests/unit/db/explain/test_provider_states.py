# SPDX-License-Identifier: Apache-2.0
"""The states of providers, counted by the database."""

from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core.binding.profile import AttachTarget
from cyborg.core.explain.explanation import GroupDemand, HandleCounts, Holder, ProviderState
from cyborg.core.explain.predicates import Predicate, device_failures
from cyborg.core.inventory.device import Layout
from cyborg.core.jobs.job import JobState
from cyborg.db import schema
from cyborg.db.explain import provider_counts, provider_states
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements

INSTANCE = "11111111-2222-3333-4444-555555555555"


def find(engine: sa.Engine, **filters: Any) -> list[ProviderState]:
    with engine.connect() as connection:
        return provider_states.find(connection, **filters)


def update_handles(engine: sa.Engine, card: rows.Card, *values: dict[str, Any]) -> None:
    """Update the first handles of a card."""
    found = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)
    for handle, change in zip(found, values, strict=False):
        rows.update(engine, schema.attach_handles, handle["id"], **change)


def own(engine: sa.Engine, number: int, project: str = "project-1", **values: Any) -> int:
    """Insert a bound ARQ and return its row id."""
    found = rows.read(engine, schema.device_profiles)
    profile = found[0]["id"] if found else rows.insert_profile(engine)
    bound = {"state": "Bound", "project_id": project, "instance_uuid": INSTANCE}
    uuid = rows.insert_arq(engine, profile, **bound, instance_slot=number, **values)
    return int(rows.read(engine, schema.arqs, uuid=uuid)[0]["id"])


def test_handles_are_counted_once_each(engine: sa.Engine) -> None:
    card = rows.insert_card(engine, handles=6)
    update_handles(
        engine,
        card,
        {"arq_id": own(engine, 0), "needs_cleaning": True},
        {"arq_id": own(engine, 1), "draining": True},
        {"needs_cleaning": True},
        {"draining": True},
        {"info": {"physical_network": "physnet1"}},
    )
    empty = rows.insert_card(engine, address="0000:02:00.0", handles=0)
    first, second = find(engine)
    assert (first.uuid, second.uuid) == (card.provider, empty.provider)
    assert first.handles == HandleCounts(total=6, draining=2, taken=1, cleaning=1)
    assert first.handles.free == 2
    assert second.handles == HandleCounts()
    (first, _) = find(engine, attach_targets={AttachTarget.PORT, None})
    assert first.handles == HandleCounts(total=6, draining=2, taken=1, cleaning=1, without_info=1)
    assert first.handles.fitting(AttachTarget.PORT) == 1


def test_facts_and_remarks_of_device_are_read(engine: sa.Engine) -> None:
    card = rows.insert_card(
        engine,
        health="unhealthy",
        health_reason="too hot",
        cordoned=True,
        deliverable=False,
        undeliverable_reason="no IOMMU",
        status="maintaining",
        setup_required=True,
        reboot_required=True,
        failing=True,
        draining=True,
    )
    job = {"kind": "program", "host": "compute-1", "subject": "s", "arguments": {}}
    rows.update(
        engine,
        schema.deployables,
        card.deployable_id,
        job_id=rows.insert(engine, schema.jobs, **job),
        set_size=2,
        offer="withheld",
        offer_reason="in use",
    )
    agent = rows.insert_agent(engine)
    rows.update(engine, schema.services, agent, down_since=timeutils.utcnow())
    (provider,) = rows.read(engine, schema.providers)
    rows.update(
        engine, schema.providers, provider["id"], published_revision=0, error="no compute node"
    )
    restore = {**job, "kind": "restore", "state": JobState.OPEN, "error": "no power"}
    own(engine, 0, device_rp_uuid=card.provider, job_id=rows.insert(engine, schema.jobs, **restore))
    (state,) = find(engine)
    conditions = {p for p in Predicate if Predicate.HOST_DOWN.position <= p.position}
    conditions -= {p for p in Predicate if p.position >= Predicate.UNPUBLISHED.position}
    assert set(device_failures(state.facts)) == conditions
    assert not state.published
    assert state.remarks == {
        Predicate.UNHEALTHY: "too hot",
        Predicate.UNDELIVERABLE: "no IOMMU",
        Predicate.UNPUBLISHED: "no compute node",
        Predicate.WITHHELD: "in use",
    }


def test_ready_device_has_no_failure(engine: sa.Engine) -> None:
    rows.insert_agent(engine)
    rows.insert_card(engine)
    (state,) = find(engine)
    assert device_failures(state.facts) == ()
    assert state.published
    assert state.remarks == {}
    assert (state.host, state.device, state.resource_class) == ("compute-1", "0000:01:00.0", "FPGA")
    assert state.traits == {rows.TRAIT}


def test_filters_select_classes_and_layouts(engine: sa.Engine) -> None:
    layouts = [{"name": "whole", "offers": {"PGPU": 1}}, {"name": "two", "offers": {"VGPU": 2}}]
    layouts = [{**layout, "traits": []} for layout in layouts]
    fpga = rows.insert_card(engine)
    gpu = rows.insert_card(
        engine,
        address="0000:02:00.0",
        resource_class="PGPU",
        layout="whole",
        layouts=layouts,
    )
    other = rows.insert_card(engine, host="compute-0")

    def uuids(**filters: Any) -> list[str]:
        return [state.uuid for state in find(engine, **filters)]

    assert uuids() == [other.provider, fpga.provider, gpu.provider]
    assert uuids(host="compute-1") == [fpga.provider, gpu.provider]
    assert uuids(resource_classes={"FPGA"}) == [other.provider, fpga.provider]
    assert uuids(resource_classes={"VGPU"}) == [gpu.provider]
    # An underscore is no wildcard.
    assert uuids(resource_classes={"_GPU"}) == []
    assert uuids(resource_classes=set()) == []
    (state,) = find(engine, resource_classes={"VGPU"})
    assert state.other_layouts("VGPU") == [Layout("two", {"VGPU": 2})]
    assert state.handles.total == 16


def test_filter_selects_the_providers_of_an_owner(engine: sa.Engine) -> None:
    profile = rows.insert_profile(engine)
    card = rows.insert_card(engine)
    rows.insert_card(engine, address="0000:02:00.0")
    rows.insert_arq(engine, profile, device_rp_uuid=card.provider, project_id="project-1")
    assert [state.uuid for state in find(engine, owner="project-1")] == [card.provider]
    assert find(engine, owner="nobody") == []


def test_holders_are_limited_and_of_one_project(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_states, "MAX_HOLDERS", 2)
    first = rows.insert_card(engine, handles=5)
    second = rows.insert_card(engine, address="0000:02:00.0", handles=1)
    ids = [
        own(engine, n, f"project-{2 - n % 2}", device_rp_uuid=(first if n < 5 else second).provider)
        for n in range(6)
    ]
    update_handles(engine, first, *({"arq_id": number} for number in ids[:5]))
    update_handles(engine, second, {"arq_id": ids[5]})
    uuids = {row["id"]: row["uuid"] for row in rows.read(engine, schema.arqs)}
    with engine.connect() as connection:
        found = provider_states.find_holders(connection, [first.provider, second.provider])
        mine = provider_states.find_own_holders(connection, "project-1", {"FPGA"})
        none = provider_states.find_own_holders(connection, "project-1", {"VGPU"})
    assert {uuid: len(holders) for uuid, holders in found.items()} == {
        first.provider: 2,
        second.provider: 1,
    }
    assert found[second.provider] == [Holder(uuids[ids[5]], INSTANCE, "project-1")]
    assert {uuid: [holder.arq for holder in held.first] for uuid, held in mine.items()} == {
        first.provider: [uuids[ids[n]] for n in (1, 3)],
        second.provider: [uuids[ids[5]]],
    }
    assert none == {}


def test_own_holders_are_counted_as_taken_handles(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_states, "MAX_HOLDERS", 1)
    card = rows.insert_card(engine, handles=4)
    ids = [
        own(engine, n, "project-2" if n == 3 else "project-1", device_rp_uuid=card.provider)
        for n in range(4)
    ]
    draining = {"arq_id": ids[0], "draining": True}
    update_handles(engine, card, draining, *({"arq_id": number} for number in ids[1:]))
    with engine.connect() as connection:
        found = provider_states.find_own_holders(connection, "project-1", {"FPGA"})
    (state,) = find(engine)
    assert state.handles.taken == 3
    assert found[card.provider].total == 2
    assert len(found[card.provider].first) == 1


def test_statements_are_constant(engine: sa.Engine) -> None:
    counts = []
    for start, end in ((0, 2), (2, 12)):
        for n in range(start, end):
            rows.insert_card(engine, f"host-{n}", handles=2)
        with count_statements(engine) as statements:
            assert len(find(engine, resource_classes={"FPGA"})) == end
        counts.append(len(statements))
    assert counts == [5, 5]


def test_other_providers_are_those_that_no_count_has(engine: sa.Engine) -> None:
    cards = [
        rows.insert_card(engine, f"compute-{n}", resource_class=name, handles=1)
        for n, name in enumerate(("CUSTOM_NIC", "FPGA", "PGPU"))
    ]
    changeable = rows.insert_card(
        engine,
        "compute-3",
        resource_class="VGPU",
        handles=1,
        layouts=[Layout("whole", {"FPGA": 1}).to_dict()],
    )
    demands = [GroupDemand(0, {"FPGA": 1})]
    with engine.connect() as connection:
        counts = provider_counts.find(connection, demands)
        others = provider_states.find_other_uuids(connection, {"FPGA"}, 10)
        first = provider_states.find_other_uuids(connection, {"FPGA"}, 1)
    assert counts.hosts.keys() == {"compute-1", "compute-3"}
    assert others == [cards[0].provider, cards[2].provider]
    assert first == others[:1]
    found = find(engine, hosts=["compute-3", "compute-1"], resource_classes={"FPGA"})
    assert [state.uuid for state in found] == [cards[1].provider, changeable.provider]
