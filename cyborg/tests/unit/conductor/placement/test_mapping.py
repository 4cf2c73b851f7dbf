# SPDX-License-Identifier: Apache-2.0
"""All queries agree whether a deployable is schedulable, for all combinations of facts."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.conductor.placement import reconciler
from cyborg.core.explain.selection import Candidate, Demand, explain_rejection
from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_state import DeviceFacts, evaluate_row
from cyborg.db import schema
from cyborg.db.binding import claims as handle_claims
from cyborg.db.deployables import write as deployables
from cyborg.tests.fixtures.databases import rows

HOSTS = ("down", "late", "unknown")  # the last one has no agent
BITS = (
    *("setup_required", "reboot_required", "programming", "draining", "part_draining"),
    *("deliverable", "failing"),
)


def combinations() -> list[dict[str, Any]]:
    """Return all combinations of facts of a deployable."""
    names = ("host", "status", "health", *BITS)
    values: list[Iterable[Any]] = [HOSTS, ("enabled", "maintaining"), Health]
    values += [(False, True)] * len(BITS)
    return [dict(zip(names, facts, strict=True)) for facts in itertools.product(*values)]


def insert_all(engine: sa.Engine) -> dict[str, dict[str, Any]]:
    """Insert a deployable with one handle, and an ARQ, for each combination; by provider."""
    job = rows.insert(
        engine, schema.jobs, kind="program", host="h", subject="s", arguments={}, state="open"
    )
    profile = rows.insert_profile(engine)
    for host in HOSTS[:2]:
        rows.insert_agent(engine, host)
    (down, _) = rows.read(engine, schema.services)
    rows.update(engine, schema.services, down["id"], down_since=down["last_seen_at"])
    # The conductor on this host is down, too, which does not affect the agent.
    names = ("epoch", "status", "started_at", "last_seen_at", "late_at", "down_at")
    facts = {key: down[key] for key in names}
    other = facts | {"binary": "cyborg-conductor", "host": "late"}
    rows.insert(engine, schema.services, down_since=down["last_seen_at"], **other)
    cases = combinations()
    device, part, handle, request = [], [], [], []
    for n, facts in enumerate(cases, start=1):
        same = {"setup_required", "reboot_required", "draining", "status", "health", "host"}
        same |= {"deliverable", "failing"}
        device.append(
            {"id": n, "uuid": f"d{n}", "address": f"{n}", "backend": "b", "type": "FPGA"}
            | {"vendor": "v", "model": "m", "std_board_info": {}, "vendor_board_info": {}}
            | {name: facts[name] for name in same}
        )
        part.append(
            {"id": n, "uuid": f"p{n}", "device_id": n, "host": "h", "address": f"{n}"}
            | {"name": f"{n}", "rp_uuid": f"{n}", "resource_class": "FPGA", "traits": []}
            | {"attributes": {}, "draining": facts["part_draining"]}
            | {"job_id": job if facts["programming"] else None}
        )
        handle.append(
            {"id": n, "uuid": f"h{n}", "deployable_id": n, "address": "0", "type": "T", "info": {}}
        )
        request.append(
            {"id": n, "uuid": f"r{n}", "state": "Initial", "profile_id": profile, "group": {}}
            | {"device_profile_name": "p", "device_profile_group_id": 0, "resource_class": "FPGA"}
        )
    with engine.begin() as tx:
        for table, values in (
            (schema.devices, device),
            (schema.deployables, part),
            (schema.attach_handles, handle),
            (schema.arqs, request),
        ):
            tx.execute(sa.insert(table), values)
    return {f"{n}": facts for n, facts in enumerate(cases, start=1)}


@pytest.mark.slow
def test_all_queries_agree_on_schedulable_deployables(engine: sa.Engine) -> None:
    inserted = insert_all(engine)
    with engine.begin() as tx:
        rendered = {row["uuid"]: row for row in deployables.desired_state(tx, list(inserted))}
        claimable = {row["provider"]: row for row in handle_claims.providers(tx, list(inserted))}
        # In batches: the time of one statement grows with the square of its handles.
        claimed = sum(
            handle_claims.claim(
                tx, {number: number for number in map(int, list(inserted)[start : start + 200])}
            )
            for start in range(0, len(inserted), 200)
        )
    handles = rows.read(engine, schema.attach_handles)
    claimed_ids = {row["deployable_id"] for row in handles if row["arq_id"] is not None}
    assert claimed == len(claimed_ids) > 0
    for uuid, combination in inserted.items():
        row: Mapping[str, Any] = claimable[uuid]
        status = evaluate_row(rendered[uuid])
        facts = DeviceFacts.from_row(row, host_down=False)
        candidate = Candidate(1, "h", uuid, "FPGA", facts=facts)
        rejections = explain_rejection(Demand("r", uuid, "h", "FPGA"), candidate)
        # Nova has chosen this host: an agent that is down does not prevent a bind.
        reasons = [reason for reason in status.reasons if reason != "host_down"]
        assert len(rejections) == len(reasons), combination
        assert (int(uuid) in claimed_ids) is (not rejections), combination
        assert ("host_down" in status.reasons) is (combination["host"] == "down"), combination
        assert reconciler.is_cordoned(rendered[uuid]) is bool(status.reasons), combination
        (inventory,) = reconciler.desired_providers("root", [rendered[uuid]])[
            uuid
        ].inventories.values()
        assert inventory.reserved == (1 if status.reasons else 0), combination
