# SPDX-License-Identifier: Apache-2.0
"""Read the stored state of a host, and write the steps of a plan to the tables.

Statements read and write many rows: their number depends on the kinds of changes, not on the number
of changed objects.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

import sqlalchemy as sa

from cyborg.core.errors import Conflict
from cyborg.core.inventory import capability, plan
from cyborg.core.inventory.device import AttachHandle, Deployable, Device, HandleType
from cyborg.core.inventory.plan import DeployableKey, DeviceKey, HandleKey, Key, Step, Stored
from cyborg.core.jobs.job import DRAINS, JobState
from cyborg.core.naming import handle_uuid
from cyborg.db.backends import write as backends
from cyborg.db.deployables import attributes, programming
from cyborg.db.deployables import write as deployables
from cyborg.db.device_sets import write as device_sets
from cyborg.db.devices import tombstones
from cyborg.db.devices import write as devices
from cyborg.db.handles import write as attach_handles
from cyborg.db.rows import DeviceRow


@dataclass(slots=True)
class HostState:
    """State of a host in the database."""

    stored: dict[Key, Stored] = field(default_factory=dict)
    devices: dict[str, DeviceRow] = field(default_factory=dict)  # by address
    uuids: dict[DeployableKey, str] = field(default_factory=dict)
    ids: dict[Key, int] = field(default_factory=dict)
    counts: dict[DeployableKey, int] = field(default_factory=dict)
    bound: set[HandleKey] = field(default_factory=set)
    # The sets through which members were claimed that have an owner, or are dirty: a set must stay
    # while it has one.
    bound_sets: dict[HandleKey, DeployableKey] = field(default_factory=dict)
    prepared: set[HandleKey] = field(default_factory=set)  # those of ``bound`` that need cleaning
    dirty: set[HandleKey] = field(default_factory=set)  # those of ``prepared`` without an owner
    abandoned: set[HandleKey] = field(default_factory=set)  # of ``dirty``, removed without cleaning
    programming: set[str] = field(default_factory=set)  # addresses of devices
    partitioned: set[int] = field(default_factory=set)  # row ids of deployables whose job has ended
    providers: dict[str, str] = field(default_factory=dict)  # uuids by address of the deployable

    @property
    def pins(self) -> set[HandleKey]:
        """Return the keys of bound handles, also as handles of the sets of their claims."""
        of_sets = {HandleKey(*of_set, key.handle) for key, of_set in self.bound_sets.items()}
        return self.bound | of_sets


def read_host_state(tx: sa.Connection, host: str) -> HostState:
    """Read the state of a host, in three statements, or four if a device has no deployable.

    The caller has locked the host's agent.
    """
    state = HostState()
    for device in devices.of_host(tx, host):
        device_key = DeviceKey(device["address"])
        state.stored[device_key] = Stored(devices.to_device(device), device["draining"])
        state.devices[device["address"]] = device
        state.ids[device_key] = device["id"]
    for deployable in deployables.of_host(tx, host):
        key = DeployableKey(deployable["device"], deployable["address"])
        state.stored[key] = Stored(deployables.to_deployable(deployable), deployable["draining"])
        state.uuids[key] = deployable["uuid"]
        state.providers[deployable["address"]] = deployable["rp_uuid"]
        state.ids[key] = deployable["id"]
        state.counts[key] = deployable["num_accelerators"]
        if deployable["job_state"] == JobState.OPEN:
            state.programming.add(deployable["device"])
        elif deployable["job_id"] is not None:
            state.partitioned.add(deployable["id"])
    if state.devices.keys() - {key.device for key in state.uuids}:
        # A device without deployables can be partitioned too. While a device drains, reports
        # still change it.
        state.programming.update(
            job["device"]
            for job in programming.open_partitions(tx, host)
            if DRAINS not in job["arguments"]
        )
    deployable_keys = {state.ids[key]: key for key in state.uuids}
    for handle in attach_handles.of_host(tx, host):
        handle_key = HandleKey(handle["device"], handle["deployable"], handle["address"])
        state.stored[handle_key] = Stored(attach_handles.to_handle(handle), handle["draining"])
        state.ids[handle_key] = handle["id"]
        # A dirty handle counts as bound: its device must stay until the host has cleaned it.
        if handle["arq_id"] is not None or handle["needs_cleaning"]:
            state.bound.add(handle_key)
        # A set is a deployable; None is the set of a handle that was claimed alone.
        if (set_id := handle["set_id"]) in deployable_keys:
            state.bound_sets[handle_key] = deployable_keys[set_id]
        if handle["needs_cleaning"]:
            state.prepared.add(handle_key)
            if handle["arq_id"] is None:
                state.dirty.add(handle_key)
    return state


@dataclass(eq=False)
class Writer:
    """Writer of the steps of a plan, kind by kind.

    Removals precede additions, because a deployable that moves to another device keeps its unique
    name.

    ``keep_tombstones``: write tombstones of removed objects, restore objects from them.
    """

    tx: sa.Connection
    host: str
    state: HostState
    now: datetime
    keep_tombstones: bool

    def __post_init__(self) -> None:
        self._ids = dict(self.state.ids)
        self._restore_plan = plan.RestorePlan(devices={}, deployables={}, tombstones={})
        self.added: dict[str, str] = {}  # uuids of new devices by address
        # Uuids of the providers of sets with other members, and of handles in other sets.
        self.changed_sets: set[str] = set()

    def write(self, steps: Sequence[Step], target: Mapping[Key, Stored]) -> None:
        """Write all steps; ``target`` is the state after them."""
        for kind, drain in (
            (HandleKey, attach_handles.mark_draining),
            (DeployableKey, deployables.mark_draining),
            (DeviceKey, devices.mark_draining),
        ):
            if ids := self._row_ids(steps, plan.Drain, kind):
                drain(self.tx, ids)
        counts = Counter(key.deployable_key for key in target if isinstance(key, HandleKey))
        sets, new_sets = _set_sizes(self.state.stored), _set_sizes(target)
        counts |= new_sets  # a set has no handles of its own, only its size
        # Before the removals: tombstones are made of rows that are deleted next.
        self._restore_tombstones(steps, target)
        self._remove(steps, has_sets=bool(sets))
        self._change(steps)
        self._add(steps, counts)
        self._set_parents(steps, target)
        self._set_handle_counts(target, counts)
        if sets or new_sets:
            # In any report of a host with sets: a member may be a handle that it adds or removes.
            self.changed_sets |= device_sets.sync_members(self.tx, self.host)
        # Compared first: most reports change handles only, and the functions of a backend follow
        # from its deployables.
        if _functions(self.state.stored) != _functions(target):
            backends.sync_functions(self.tx, self.host)

    def _row_ids(self, steps: Sequence[Step], action: type[Step], kind: type[Key]) -> list[int]:
        return [
            self.state.ids[step.key]
            for step in steps
            if isinstance(step, action) and isinstance(step.key, kind)
        ]

    def _restore_tombstones(self, steps: Sequence[Step], target: Mapping[Key, Stored]) -> None:
        """Read and write tombstones if devices or deployables are added or removed."""
        removed, added = _owner_keys(steps, plan.Remove), _owner_keys(steps, plan.Add)
        addresses = {key.device for key in (*removed, *added)}
        if not addresses:
            return
        stored: Mapping[str, plan.Tombstone] = {}
        if self.keep_tombstones:
            stored = tombstones.of_host(self.tx, self.host, addresses)
        # Also without tombstones: a deployable that moves to another device keeps its values.
        self._restore_plan = plan.plan_restore(
            stored,
            removed=self._make_tombstones(removed),
            added=[key for key in added if isinstance(key, DeployableKey)],
            present={key.device for key in target if isinstance(key, DeviceKey)},
        )
        if self.keep_tombstones:
            tombstones.replace(self.tx, self.host, stored, self._restore_plan.tombstones, self.now)

    def _make_tombstones(
        self, removed: Collection[DeviceKey | DeployableKey]
    ) -> dict[str, plan.Tombstone]:
        """Return the tombstones of devices, or parts of them, that are removed, by address."""
        parts = [key for key in removed if isinstance(key, DeployableKey)]
        operator_attributes = attributes.of_deployables(self.tx, [self._ids[key] for key in parts])
        deployables: dict[str, dict[str, plan.DeployableTombstone]] = {}
        for key in parts:
            dirty = sorted(h.handle for h in self.state.abandoned if h.deployable_key == key)
            deployables.setdefault(key.device, {})[key.deployable] = plan.DeployableTombstone(
                uuid=self.state.uuids[key],
                attributes=operator_attributes.get(self._ids[key], ()),
                dirty_handles=tuple(dirty),
            )
        rows = {address: self.state.devices[address] for address in {key.device for key in removed}}
        return {
            address: plan.Tombstone(row["uuid"], row["status"], deployables.get(address, {}))
            for address, row in sorted(rows.items())
        }

    def _remove(self, steps: Sequence[Step], *, has_sets: bool) -> None:
        """Delete the rows of removed records. Raise Conflict if a handle is not free any more."""
        if handles := self._row_ids(steps, plan.Remove, HandleKey):
            deleted = attach_handles.delete_clean(self.tx, handles)
            if deleted != len(handles):
                raise Conflict(
                    f"{len(handles) - deleted} handles that the report of host {self.host} "
                    "removes were claimed meanwhile"
                )
        if deployable_ids := self._row_ids(steps, plan.Remove, DeployableKey):
            if has_sets:
                # Before the rows of the members are deleted with those of their sets.
                self.changed_sets |= device_sets.providers_of_members(self.tx, deployable_ids)
            deployables.delete(self.tx, deployable_ids)
        if device_ids := self._row_ids(steps, plan.Remove, DeviceKey):
            devices.delete(self.tx, device_ids)

    def _change(self, steps: Sequence[Step]) -> None:
        """Update the rows of changed records."""
        new = _values(steps, plan.Change)
        devices.update(
            self.tx,
            {self._ids[k]: v for k, v in new.items() if isinstance(v, Device)},
            {row["id"]: row for row in self.state.devices.values()},
            self.now,
        )
        deployables.update(
            self.tx, {self._ids[k]: v for k, v in new.items() if isinstance(v, Deployable)}
        )
        attach_handles.update(
            self.tx, {self._ids[k]: v for k, v in new.items() if isinstance(v, AttachHandle)}
        )

    def _add(self, steps: Sequence[Step], counts: Counter[DeployableKey]) -> None:
        # Each kind needs the row ids of the one before.
        new = _values(steps, plan.Add)
        if new_devices := [v for v in new.values() if isinstance(v, Device)]:
            self.added = devices.add(self.tx, self.host, new_devices, self._restore_plan.devices)
            for address, id_ in devices.ids_by_address(self.tx, self.host).items():
                self._ids[DeviceKey(address)] = id_
        self._add_deployables(new, counts)
        self._add_handles(new)

    def _add_deployables(
        self, new: Mapping[Key, plan.Record], counts: Counter[DeployableKey]
    ) -> None:
        """Insert new deployables, with the uuids and the attributes that tombstones restore."""
        values = [
            deployables.NewDeployable(self._ids[DeviceKey(key.device)], value, counts[key])
            for key, value in new.items()
            if isinstance(key, DeployableKey) and isinstance(value, Deployable)
        ]
        if not values:
            return
        restored = self._restore_plan.deployables
        uuids = {key.deployable: tombstone.uuid for key, tombstone in restored.items()}
        deployables.add(self.tx, self.host, values, uuids, self.state.providers)
        for key, id_ in deployables.ids_by_key(self.tx, self.host).items():
            self._ids[key] = id_
        tombstones.restore_attributes(
            self.tx, {self._ids[key]: tombstone for key, tombstone in restored.items()}
        )

    def _add_handles(self, new: Mapping[Key, plan.Record]) -> None:
        """Insert new handles; those that a tombstone has as dirty need cleaning first."""
        dirty = {
            HandleKey(*key, address)
            for key, tombstone in self._restore_plan.deployables.items()
            for address in tombstone.dirty_handles
        }
        attach_handles.add(
            self.tx,
            [
                attach_handles.NewHandle(
                    deployable_id=self._ids[key.deployable_key],
                    value=value,
                    uuid=self._choose_uuid(key, value),
                    needs_cleaning=key in dirty,
                )
                for key, value in new.items()
                if isinstance(key, HandleKey) and isinstance(value, AttachHandle)
            ],
        )

    def _choose_uuid(self, key: HandleKey, handle: AttachHandle) -> str | None:
        """Return the uuid of a new handle if it must follow from the address, else None."""
        # Nova takes the uuid of such a handle as the uuid of the mediated device.
        if handle.type is HandleType.MDEV:
            return handle_uuid(self.host, key.deployable, key.handle)
        return None

    def _set_parents(self, steps: Sequence[Step], target: Mapping[Key, Stored]) -> None:
        """Write parent and root of the deployables of each device where one is new or has changed.

        Draining ones, which the host no longer reports, are left out.
        """
        changed_devices = {
            step.key.device
            for step in steps
            if isinstance(step, plan.Add | plan.Change) and isinstance(step.key, DeployableKey)
        }
        parents: dict[int, deployables.ParentIds] = {}
        for key, record in target.items():
            if (
                not isinstance(key, DeployableKey)
                or key.device not in changed_devices
                or record.draining
            ):
                continue
            # ``above`` is from the parent to the root; a deployable without it is a root.
            own_id, *above = (self._ids[item] for item in _chain(key, target))
            parent, root = (above[0], above[-1]) if above else (None, own_id)
            parents[own_id] = deployables.ParentIds(parent, root)
        deployables.set_parents(self.tx, parents)

    def _set_handle_counts(
        self, target: Mapping[Key, Stored], counts: Counter[DeployableKey]
    ) -> None:
        """Write the number of handles of existing deployables where it has changed."""
        stored = self.state.counts
        deployables.set_handle_counts(
            self.tx,
            {
                self._ids[key]: counts[key]
                for key in stored
                if key in target and stored[key] != counts[key]
            },
        )


def _set_sizes(records: Mapping[Key, Stored]) -> Counter[DeployableKey]:
    """Return the number of members of each device set."""
    return Counter(
        {
            key: record.value.device_set.size
            for key, record in records.items()
            if isinstance(key, DeployableKey)
            and isinstance(record.value, Deployable)
            and record.value.device_set is not None
        }
    )


def _owner_keys(
    steps: Sequence[Step], action: type[plan.Add] | type[plan.Remove]
) -> list[DeviceKey | DeployableKey]:
    """Return the keys of the devices and deployables of one kind of steps."""
    return [
        step.key
        for step in steps
        if isinstance(step, action) and not isinstance(step.key, HandleKey)
    ]


def _values(
    steps: Sequence[Step], action: type[plan.Add] | type[plan.Change]
) -> dict[Key, plan.Record]:
    """Return the new values of one kind of steps."""
    return {s.key: cast(Any, s).value for s in steps if isinstance(s, action)}


def _functions(records: Mapping[Key, Stored]) -> set[tuple[str, str, str]]:
    """Return what the functions of backends follow from: see ``backends.sync_functions``."""
    functions = set()
    for key, record in records.items():
        if isinstance(record.value, Deployable):
            device = cast(Device, records[DeviceKey(key.device)].value)
            tree = capability.encoded_text(device.vendor_board_info)
            functions.add((device.backend, record.value.resource_class, tree))
    return functions


def _chain(key: DeployableKey, target: Mapping[Key, Stored]) -> list[DeployableKey]:
    """Return the keys of a deployable and its parents, up to the root or the start of a cycle."""
    chain = [key]
    while True:
        value = target[chain[-1]].value
        parent = value.parent if isinstance(value, Deployable) else None
        above = DeployableKey(key.device, parent or "")
        if parent is None or above not in target or above in chain:
            return chain
        chain.append(above)
