# SPDX-License-Identifier: Apache-2.0
"""Custody records of devices that are new, removed, or moved to another backend in a report."""

from collections.abc import Mapping, Sequence
from datetime import datetime

import sqlalchemy as sa

from cyborg.conductor.inventory.sync import HostState
from cyborg.core.custody.record import Entry
from cyborg.core.custody.record import Event as CustodyEvent
from cyborg.core.inventory.device import Device
from cyborg.core.inventory.plan import Add, Change, Remove, Step
from cyborg.db.custody import write as records


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
    records.add(
        tx,
        [entry for step in steps if (entry := _to_entry(host, state, step, added)) is not None],
        now,
    )


def _to_entry(host: str, state: HostState, step: Step, added: Mapping[str, str]) -> Entry | None:
    if len(step.key) != 2:  # a deployable or a handle
        return None
    address = step.key[1]
    if isinstance(step, Remove):
        return Entry(
            state.devices[address]["uuid"], host, CustodyEvent.DEVICE_REMOVED, {"address": address}
        )
    if not isinstance(step, Add | Change) or not isinstance(step.value, Device):
        return None
    device = step.value
    if isinstance(step, Add):
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
