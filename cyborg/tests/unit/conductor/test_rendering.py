# SPDX-License-Identifier: Apache-2.0
"""Everybody who asks whether a part is open gets the same answer, whatever holds of it."""

import itertools
from typing import Any

import sqlalchemy as sa

from cyborg.conductor import rendering
from cyborg.core.choosing import Candidate, Need, refusals
from cyborg.core.device import Health
from cyborg.db import schema
from cyborg.db.store import claims, deployables
from cyborg.fixtures import rows

HOSTS = ("down", "late", "unknown")  # of the last, no agent is known
BITS = ("setup_required", "reboot_required", "programming", "draining", "part_draining")


def worlds() -> list[dict[str, Any]]:
    """Return every combination of what there is to know of a part."""
    names = ("host", "status", "health", *BITS)
    values = (HOSTS, ("enabled", "maintaining"), Health, *([(False, True)] * len(BITS)))
    return [dict(zip(names, world, strict=True)) for world in itertools.product(*values)]


def make(engine: sa.Engine) -> dict[str, dict[str, Any]]:
    """Put a part of one handle into each world, and a request for it; by provider."""
    job = rows.insert(
        engine, schema.jobs, kind="program", host="h", subject="s", arguments={}, state="open"
    )
    profile = rows.profile(engine)
    for host in HOSTS[:2]:
        rows.agent(engine, host)
    (down, _) = rows.read(engine, schema.services)
    rows.change(engine, schema.services, down["id"], down_since=down["last_seen_at"])
    # A conductor of that host is down, too, which says nothing of the agent's.
    facts = {key: down[key] for key in ("epoch", "status", "started_at", "last_seen_at")}
    other = facts | {"binary": "cyborg-conductor", "host": "late"}
    rows.insert(engine, schema.services, down_since=down["last_seen_at"], **other)
    found = worlds()
    device, part, handle, request = [], [], [], []
    for n, world in enumerate(found, start=1):
        same = {"setup_required", "reboot_required", "draining", "status", "health", "host"}
        device.append(
            {"id": n, "uuid": f"d{n}", "address": f"{n}", "backend": "b", "type": "FPGA"}
            | {"vendor": "v", "model": "m", "std_board_info": {}, "vendor_board_info": {}}
            | {name: world[name] for name in same}
        )
        part.append(
            {"id": n, "uuid": f"p{n}", "device_id": n, "address": f"{n}", "name": f"{n}"}
            | {"rp_uuid": f"{n}", "resource_class": "FPGA", "traits": [], "attributes": {}}
            | {"draining": world["part_draining"], "job_id": job if world["programming"] else None}
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
            (schema.requests, request),
        ):
            tx.execute(sa.insert(table), values)
    return {f"{n}": world for n, world in enumerate(found, start=1)}


def test_all_agree_on_what_is_open(engine: sa.Engine) -> None:
    made = make(engine)
    with engine.begin() as tx:
        rendered = {row["uuid"]: row for row in deployables.desired(tx, list(made))}
        known = {row["provider"]: row for row in claims.providers(tx, list(made))}
        numbers = {int(uuid): int(uuid) for uuid in made}
        claimed = claims.claim(tx, numbers)
    handles = rows.read(engine, schema.attach_handles)
    given = {row["deployable_id"] for row in handles if row["request_id"] is not None}
    assert claimed == len(given) > 0
    for uuid, world in made.items():
        row, standing = known[uuid], rendering.standing(rendered[uuid])
        names = ("device_status", "health", "draining", "setup_required", "reboot_required")
        facts = {name: row[name] for name in (*names, "programming")}
        candidate = Candidate(1, "h", uuid, "h", "FPGA", **facts)
        why = refusals(Need("r", uuid, "h", "FPGA"), candidate)
        # Nova asked for this very host: that its agent is silent is no reason to refuse it.
        reasons = [reason for reason in standing.reasons if reason != "host_down"]
        assert len(why) == len(reasons), world
        assert (int(uuid) in given) is (not why), world
        assert ("host_down" in standing.reasons) is (world["host"] == "down"), world
        assert rendering.closed(rendered[uuid]) is bool(standing.reasons), world
        (inventory,) = rendering.wanted("root", [rendered[uuid]])[uuid].inventories.values()
        assert inventory.reserved == (1 if standing.reasons else 0), world
