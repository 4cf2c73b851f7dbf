# SPDX-License-Identifier: Apache-2.0
"""Read the stored state of a host, and write the steps of a plan to the tables.

Statements read and write many rows: their number depends on the kinds of changes, not on the number
of changed objects.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

import sqlalchemy as sa

from cyborg.core.errors import Conflict
from cyborg.core.inventory import capability
from cyborg.core.inventory.device import AttachHandle, Deployable, Device, HandleType
from cyborg.core.inventory.plan import (
    Add,
    Change,
    DeployableTombstone,
    Drain,
    Key,
    Record,
    Remove,
    RestorePlan,
    Step,
    Stored,
    Tombstone,
    plan_restore,
)
from cyborg.core.jobs.job import DRAINS, JobState
from cyborg.core.naming import handle_uuid
from cyborg.db.backends import write as backends
from cyborg.db.deployables import programming
from cyborg.db.deployables import write as deployables
from cyborg.db.devices import tombstones
from cyborg.db.devices import write as devices
from cyborg.db.devices.write import DeviceRow
from cyborg.db.handles import write as attach_handles

DEVICE, DEPLOYABLE, HANDLE = "device", "deployable", "handle"


@dataclass(slots=True)
class HostState:
    """State of a host in the database."""

    stored: dict[Key, Stored] = field(default_factory=dict)
    devices: dict[str, DeviceRow] = field(default_factory=dict)  # by address
    uuids: dict[Key, str] = field(default_factory=dict)  # of deployables
    ids: dict[Key, int] = field(default_factory=dict)
    counts: dict[Key, int] = field(default_factory=dict)
    bound: set[Key] = field(default_factory=set)
    prepared: set[Key] = field(default_factory=set)  # keys of ``bound`` that need cleaning
    dirty: set[Key] = field(default_factory=set)  # keys of ``prepared`` without an owner
    abandoned: set[Key] = field(default_factory=set)  # keys of ``dirty`` removed without cleaning
    programming: set[str] = field(default_factory=set)  # addresses of devices
    partitioned: set[int] = field(default_factory=set)  # row ids of deployables whose job has ended
    providers: dict[str, str] = field(default_factory=dict)  # uuids by address of the deployable


def read_host_state(tx: sa.Connection, host: str) -> HostState:
    """Read the state of a host, in three statements, or four if a device has no deployable.

    The caller has locked the host's agent.
    """
    state = HostState()
    for device in devices.of_host(tx, host):
        key: Key = (DEVICE, device["address"])
        state.stored[key] = Stored(devices.to_device(device), device["draining"])
        state.devices[device["address"]] = device
        state.ids[key] = device["id"]
    for deployable in deployables.of_host(tx, host):
        key = (DEPLOYABLE, deployable["device"], deployable["address"])
        state.stored[key] = Stored(deployables.to_deployable(deployable), deployable["draining"])
        state.uuids[key] = deployable["uuid"]
        state.providers[deployable["address"]] = deployable["rp_uuid"]
        state.ids[key] = deployable["id"]
        state.counts[key] = deployable["num_accelerators"]
        if deployable["job_state"] == JobState.OPEN:
            state.programming.add(deployable["device"])
        elif deployable["job_id"] is not None:
            state.partitioned.add(deployable["id"])
    divided = {key[1] for key in state.stored if key[0] == DEPLOYABLE}
    if state.devices.keys() - divided:
        # A device without deployables can be partitioned too.
        state.programming.update(
            job["device"]
            for job in programming.open_partitions(tx, host)
            if DRAINS not in job["arguments"]
        )
    for handle in attach_handles.of_host(tx, host):
        key = (HANDLE, handle["device"], handle["deployable"], handle["address"])
        state.stored[key] = Stored(attach_handles.to_handle(handle), handle["draining"])
        state.ids[key] = handle["id"]
        if handle["arq_id"] is not None or handle["needs_cleaning"]:
            state.bound.add(key)
        if handle["needs_cleaning"]:
            state.prepared.add(key)
            if handle["arq_id"] is None:
                state.dirty.add(key)
    return state


class Writer:
    """Writer of the steps of a plan, kind by kind.

    Removals precede additions, because a deployable that moves to another device keeps its unique
    name.
    """

    def __init__(
        self,
        tx: sa.Connection,
        host: str,
        state: HostState,
        now: datetime,
        *,
        keep_tombstones: bool,
    ) -> None:
        """``keep_tombstones``: write tombstones of removed objects, restore objects from them."""
        self._tx = tx
        self._host = host
        self._state = state
        self._ids = dict(state.ids)
        self._now = now
        self._keep_tombstones = keep_tombstones
        self._restore_plan = RestorePlan({}, {}, {})
        self.added: dict[str, str] = {}  # uuids of new devices by address

    def write(self, steps: Sequence[Step], target: Mapping[Key, Stored]) -> None:
        """Write all steps; ``target`` is the state after them."""
        for kind, drain in (
            (HANDLE, attach_handles.mark_draining),
            (DEPLOYABLE, deployables.mark_draining),
            (DEVICE, devices.mark_draining),
        ):
            if ids := self._row_ids(steps, Drain, kind):
                drain(self._tx, ids)
        counts = Counter((DEPLOYABLE, *key[1:3]) for key in target if key[0] == HANDLE)
        self._restore_tombstones(steps, target)
        self._remove(steps)
        self._change(steps)
        self._add(steps, counts)
        self._set_parents(steps, target)
        self._set_handle_counts(target, counts)
        if _functions(self._state.stored) != _functions(target):
            backends.sync_functions(self._tx, self._host)

    def _row_ids(self, steps: Sequence[Step], action: type[Step], kind: str) -> list[int]:
        return [self._state.ids[s.key] for s in steps if isinstance(s, action) and s.key[0] == kind]

    def _restore_tombstones(self, steps: Sequence[Step], target: Mapping[Key, Stored]) -> None:
        """Read and write tombstones if devices or deployables are added or removed."""
        removed = [s.key for s in steps if isinstance(s, Remove) and s.key[0] != HANDLE]
        added = [s.key for s in steps if isinstance(s, Add) and s.key[0] != HANDLE]
        addresses = {key[1] for key in (*removed, *added)}
        if not addresses:
            return
        removed_deployables = [key for key in removed if key[0] == DEPLOYABLE]
        attributes = tombstones.attributes_of(
            self._tx, [self._ids[key] for key in removed_deployables]
        )
        new_tombstones = {}
        for address in sorted({key[1] for key in removed}):
            row = self._state.devices[address]
            deployable_tombstones = {
                key[2]: DeployableTombstone(
                    self._state.uuids[key],
                    attributes.get(self._ids[key], ()),
                    tuple(sorted(h[3] for h in self._state.abandoned if h[1:3] == key[1:3])),
                )
                for key in removed_deployables
                if key[1] == address
            }
            new_tombstones[address] = Tombstone(row["uuid"], row["status"], deployable_tombstones)
        stored: Mapping[str, Tombstone] = {}
        if self._keep_tombstones:
            stored = tombstones.of_host(self._tx, self._host, addresses)
        self._restore_plan = plan_restore(
            stored,
            new_tombstones,
            [(key[1], key[2]) for key in added if key[0] == DEPLOYABLE],
            {key[1] for key in target if key[0] == DEVICE},
        )
        if self._keep_tombstones:
            tombstones.replace(
                self._tx, self._host, stored, self._restore_plan.tombstones, self._now
            )

    def _remove(self, steps: Sequence[Step]) -> None:
        if handles := self._row_ids(steps, Remove, HANDLE):
            deleted = attach_handles.delete_clean(self._tx, handles)
            if deleted != len(handles):
                raise Conflict(
                    f"{len(handles) - deleted} handles that the report of host {self._host} "
                    "removes were claimed meanwhile"
                )
        if deployable_ids := self._row_ids(steps, Remove, DEPLOYABLE):
            deployables.delete(self._tx, deployable_ids)
        if device_ids := self._row_ids(steps, Remove, DEVICE):
            devices.delete(self._tx, device_ids)

    def _change(self, steps: Sequence[Step]) -> None:
        new = _values(steps, Change)
        devices.update(
            self._tx,
            {self._ids[k]: v for k, v in new.items() if isinstance(v, Device)},
            {row["id"]: row for row in self._state.devices.values()},
            self._now,
        )
        deployables.update(
            self._tx, {self._ids[k]: v for k, v in new.items() if isinstance(v, Deployable)}
        )
        attach_handles.update(
            self._tx, {self._ids[k]: v for k, v in new.items() if isinstance(v, AttachHandle)}
        )

    def _add(self, steps: Sequence[Step], counts: Counter[Key]) -> None:
        new = _values(steps, Add)
        if new_devices := [v for v in new.values() if isinstance(v, Device)]:
            self.added = devices.add(self._tx, self._host, new_devices, self._restore_plan.devices)
            for address, id_ in devices.ids_by_address(self._tx, self._host).items():
                self._ids[DEVICE, address] = id_
        if new_deployables := [
            (self._ids[DEVICE, k[1]], v, counts[k])
            for k, v in new.items()
            if isinstance(v, Deployable)
        ]:
            restored = self._restore_plan.deployables
            uuids = {address: tombstone.uuid for (_, address), tombstone in restored.items()}
            deployables.add(self._tx, self._host, new_deployables, uuids, self._state.providers)
            for (device, address), id_ in deployables.ids_by_address(self._tx, self._host).items():
                self._ids[DEPLOYABLE, device, address] = id_
            tombstones.restore_attributes(
                self._tx,
                [(self._ids[DEPLOYABLE, *key], tombstone) for key, tombstone in restored.items()],
            )
        attach_handles.add(
            self._tx,
            [
                (self._ids[DEPLOYABLE, k[1], k[2]], v)
                for k, v in new.items()
                if isinstance(v, AttachHandle)
            ],
            {
                (self._ids[DEPLOYABLE, *key], address)
                for key, tombstone in self._restore_plan.deployables.items()
                for address in tombstone.dirty_handles
            },
            # Nova takes the uuid of such a handle as the uuid of the mediated device.
            {
                (self._ids[DEPLOYABLE, k[1], k[2]], v.address): handle_uuid(
                    self._host, k[2], v.address
                )
                for k, v in new.items()
                if isinstance(v, AttachHandle) and v.type is HandleType.MDEV
            },
        )

    def _set_parents(self, steps: Sequence[Step], target: Mapping[Key, Stored]) -> None:
        """Write parent and root of all deployables of each device that got a deployable."""
        moved = {s.key[1] for s in steps if isinstance(s, Add | Change) and s.key[0] == DEPLOYABLE}
        parents: dict[int, tuple[int | None, int]] = {}
        for key, record in target.items():
            if key[0] == DEPLOYABLE and key[1] in moved and not record.draining:
                chain = _chain(key, target)
                parent = self._ids[chain[1]] if len(chain) > 1 else None
                parents[self._ids[key]] = (parent, self._ids[chain[-1]])
        deployables.set_parents(self._tx, parents)

    def _set_handle_counts(self, target: Mapping[Key, Stored], counts: Counter[Key]) -> None:
        """Write the number of handles of existing deployables where it has changed."""
        stored = self._state.counts
        deployables.set_handle_counts(
            self._tx,
            {
                self._ids[key]: counts[key]
                for key in target
                if key in stored and stored[key] != counts[key]
            },
        )


def _values(steps: Sequence[Step], action: type[Add] | type[Change]) -> dict[Key, Record]:
    return {s.key: cast(Any, s).value for s in steps if isinstance(s, action)}


def _functions(records: Mapping[Key, Stored]) -> set[tuple[str, str, str]]:
    """Return what the functions of backends follow from: see ``backends.sync_functions``."""
    found = set()
    for key, record in records.items():
        if isinstance(record.value, Deployable):
            device = cast(Device, records[DEVICE, key[1]].value)
            tree = capability.encoded_text(device.vendor_board_info)
            found.add((device.backend, record.value.resource_class, tree))
    return found


def _chain(key: Key, target: Mapping[Key, Stored]) -> list[Key]:
    """Return the keys of a deployable and its parents, up to the root or the start of a cycle."""
    chain = [key]
    while True:
        value = target[chain[-1]].value
        parent = value.parent if isinstance(value, Deployable) else None
        above: Key = (DEPLOYABLE, key[1], parent or "")
        if parent is None or above not in target or above in chain:
            return chain
        chain.append(above)
