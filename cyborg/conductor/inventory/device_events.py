# SPDX-License-Identifier: Apache-2.0
"""Record what a report changes for others: custody records and notifications of devices.

Custody records are for devices that are new, removed, or moved to another backend; notifications
are for devices that become unhealthy or healthy, or are removed while in use.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

import sqlalchemy as sa

from cyborg.conductor.inventory.sync import HostState
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.binding.arqs import describe_user
from cyborg.core.custody import Entry
from cyborg.core.custody import Event as CustodyEvent
from cyborg.core.inventory import plan
from cyborg.core.inventory.device import Device, Health
from cyborg.core.inventory.plan import Step
from cyborg.core.log import Remark
from cyborg.core.notification import Event
from cyborg.core.text import join_limited
from cyborg.db.custody import write as records
from cyborg.db.devices import write as devices
from cyborg.db.handles import write as attach_handles
from cyborg.db.outbox import write as outbox
from cyborg.db.rows import DeviceRow

# ARQs listed in one log line.
MAX_NAMED = 8


def record_changes(
    tx: sa.Connection,
    host: str,
    state: HostState,
    steps: Sequence[Step],
    added: Mapping[str, str],
    now: datetime,
) -> None:
    """Record the devices that steps add, remove or move to another backend.

    ``added`` has the uuids of new devices by address; ``state`` is the state before the steps.
    Executes one statement, and none without such a step.
    """
    # One statement for all devices: a new host may report hundreds.
    records.add(
        tx,
        [entry for step in steps if (entry := _to_entry(host, state, step, added)) is not None],
        now,
    )


def _to_entry(host: str, state: HostState, step: Step, added: Mapping[str, str]) -> Entry | None:
    """Return the custody entry of a step; None if it adds, removes and moves no device."""
    if not isinstance(step.key, plan.DeviceKey):
        return None
    address = step.key.device
    if isinstance(step, plan.Remove):
        return Entry(
            state.devices[address]["uuid"], host, CustodyEvent.DEVICE_REMOVED, {"address": address}
        )
    if not isinstance(step, plan.Add | plan.Change) or not isinstance(step.value, Device):
        return None
    device = step.value
    if isinstance(step, plan.Add):
        details = {
            "address": address,
            "backend": device.backend,
            "type": str(device.type),
            "vendor": device.vendor,
            "model": device.model,
            "serial": device.serial,
        }
        return Entry(added[address], host, CustodyEvent.DEVICE_ADDED, details)
    row = state.devices[address]
    if row["backend"] == device.backend:
        return None
    details = {"address": address, "backend": device.backend, "previous": row["backend"]}
    return Entry(row["uuid"], host, CustodyEvent.BACKEND_CHANGED, details)


def record_health_changes(
    tx: sa.Connection,
    host: str,
    state: HostState,
    steps: Sequence[Step],
    notifications: NotificationBuilder,
) -> list[Remark]:
    """Write notifications of devices whose health changed; return a log remark for each device.

    Call this after the steps of the report are written. Only changes from or to UNHEALTHY count;
    UNKNOWN counts as healthy. Executes at most three statements, and none without a change.
    """
    # From the steps, not the rows: only a change is news, and most reports have none.
    changed = _changed_health(state, steps)
    if not changed:
        return []
    # The address of the device by the row id of each of its bound handles.
    device_of = {state.ids[key]: key.device for key in state.bound if key.device in changed}
    owners = attach_handles.owners(tx, device_of) if device_of else []
    if notifications.enabled:
        rows = devices.by_addresses(tx, host, changed)
        messages = []
        unhealthy = {
            address: device for address, device in changed.items() if _is_unhealthy(device)
        }
        healthy = {address: changed[address] for address in changed.keys() - unhealthy.keys()}
        for group, device_event, arq_event in (
            (unhealthy, Event.DEVICE_UNHEALTHY, Event.REQUEST_UNHEALTHY),
            (healthy, Event.DEVICE_HEALTHY, Event.REQUEST_HEALTHY),
        ):
            messages += notifications.build_messages(
                device_event, [{**row, "hostname": host} for row in rows if row["address"] in group]
            )
            for row in owners:
                device = group.get(device_of[row["handle"]])
                if device is not None:
                    error = _describe(device) if group is unhealthy else None
                    messages += notifications.build_messages(arq_event, [row], error=error)
        outbox.add_all(tx, messages)
    return [
        _make_remark(device, [row for row in owners if device_of[row["handle"]] == address])
        for address, device in sorted(changed.items())
    ]


def record_removed_devices(
    tx: sa.Connection,
    state: HostState,
    steps: Sequence[Step],
    notifications: NotificationBuilder,
) -> list[Remark]:
    """Write notifications of bound devices and handles that the host no longer has.

    Such a device or handle drains until its last ARQ is deleted. There is a notification for each
    device that is removed as a whole, and for each ARQ whose handle is removed. A handle without an
    ARQ waits only for its cleaning and causes no notification. Return a log remark for each device.
    Execute at most two statements, and none if nothing begins to drain.
    """
    drained = {step.key for step in steps if isinstance(step, plan.Drain)}
    if not drained:
        return []
    removed = {key.device for key in drained if isinstance(key, plan.DeviceKey)}
    # A device may be removed after its handles: its ARQs were notified then.
    handles = {key for key in state.bound if key.device in removed}
    handles |= {key for key in drained if isinstance(key, plan.HandleKey)}
    key_by_id = {state.ids[key]: key for key in handles}
    # Each ARQ that owns a handle of ``handles``, with the key of the handle.
    owners = [(key_by_id[row["handle"]], row) for row in attach_handles.owners(tx, key_by_id)]
    # Those whose handle begins to drain with this report.
    affected = [(key, row) for key, row in owners if key in drained]
    # Devices that are removed as a whole and have an owner.
    lost = sorted(removed & {key.device for key, _ in owners})
    rows = [state.devices[address] for address in lost]
    messages = notifications.build_messages(
        Event.DEVICE_LOST, [{**row, "hostname": row["host"]} for row in rows]
    )
    for key, row in affected:
        error = (
            f"device {key.device} of host {row['hostname']}: the part that the ARQ uses was removed"
        )
        messages += notifications.build_messages(Event.REQUEST_LOST, [row], error=error)
    outbox.add_all(tx, messages)
    return [
        _make_removal_remark(
            state.devices[address],
            is_lost=address in lost,
            affected=[row for key, row in affected if key.device == address],
        )
        for address in sorted({*lost, *(key.device for key, _ in affected)})
    ]


def _changed_health(state: HostState, steps: Sequence[Step]) -> dict[str, Device]:
    """Return the devices that became unhealthy or healthy, by address."""
    changed: dict[str, Device] = {}
    for step in steps:
        if not isinstance(step, plan.Add | plan.Change) or not isinstance(step.value, Device):
            continue
        stored = state.stored.get(step.key)  # None for a new device, which counts as healthy
        was_unhealthy = (
            stored is not None and isinstance(stored.value, Device) and _is_unhealthy(stored.value)
        )
        if was_unhealthy != _is_unhealthy(step.value):
            changed[step.value.address] = step.value
    return changed


def _is_unhealthy(device: Device) -> bool:
    return device.health is Health.UNHEALTHY


def _describe(device: Device) -> str:
    if not _is_unhealthy(device):
        return f"device {device.address} is healthy again"
    return f"device {device.address} is unhealthy: {device.health_reason or 'no reason reported'}"


def _make_remark(device: Device, owners: Sequence[attach_handles.OwnerRow]) -> Remark:
    users = f"; used by ARQs {_join_owners(owners)}" if owners else ""
    return Remark(
        _describe(device) + users,
        {"device": device.address, **_owner_fields(owners)},
    )


def _make_removal_remark(
    device: DeviceRow, is_lost: bool, affected: Sequence[attach_handles.OwnerRow]
) -> Remark:
    subject = f"device {device['address']}" if is_lost else f"a part of device {device['address']}"
    arqs = f" by ARQs {_join_owners(affected)}" if affected else ""
    return Remark(
        f"{subject} was removed while in use{arqs}; it is draining until it is released",
        {"device": [device["uuid"], device["address"]], **_owner_fields(affected)},
    )


def _owner_fields(owners: Sequence[attach_handles.OwnerRow]) -> dict[str, list[str]]:
    """Return the log fields of the ARQs that own handles."""
    return {
        "arq": [row["uuid"] for row in owners],
        "instance": sorted({row["instance_uuid"] for row in owners if row["instance_uuid"]}),
    }


def _join_owners(owners: Sequence[attach_handles.OwnerRow]) -> str:
    named = [f"{row['uuid']} ({describe_user(row['instance_uuid'])})" for row in owners]
    return join_limited(named, MAX_NAMED)
