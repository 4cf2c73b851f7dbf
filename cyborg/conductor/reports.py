# SPDX-License-Identifier: Apache-2.0
"""From a host's report to the tables: read all that is known, plan, write what differs.

Tables are read and written as a whole, never row by row: the number of statements depends on what
kinds of change there are, not on how many things change. The caller holds the row of the host's
agent, so that no other report of the host is being recorded at the same time.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

import sqlalchemy as sa

from cyborg.core import inventory, names
from cyborg.core.device import AttachHandle, Deployable, Device
from cyborg.core.errors import Conflict
from cyborg.core.inventory import Add, Change, Drain, Key, Record, Remove, Step, Stored
from cyborg.core.report import BackendStatus, Report
from cyborg.db.store import attach_handles, deployables, devices, providers

DEVICE, DEPLOYABLE, HANDLE = "device", "deployable", "handle"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What recording a report came to: how many providers are stale now, and what to log."""

    providers: int
    summary: str
    remarks: Sequence[str] = ()


@dataclass(slots=True)
class _Known:
    """What the database knows of a host."""

    stored: dict[Key, Stored] = field(default_factory=dict)
    ids: dict[Key, int] = field(default_factory=dict)
    counts: dict[Key, int] = field(default_factory=dict)
    bound: set[Key] = field(default_factory=set)
    programming: set[str] = field(default_factory=set)  # addresses of devices


def record(tx: sa.Connection, report: Report, now: datetime) -> Outcome:
    """Bring the tables to the report and mark the providers that change."""
    known = _read(tx, report.host)
    relevant = _without_silent(known.stored, report, known.programming)
    # A device that is being programmed may leave the bus, or show any part of itself, and what
    # comes back before the end must not be open: it is left as it is, and asked for at the end.
    told = [device for device in report.devices if device.address not in known.programming]
    steps: Sequence[Step] = inventory.plan(told, relevant, known.bound)
    going = {known.ids[s.key] for s in steps if isinstance(s, Remove) and s.key[0] == HANDLE}
    if owned := attach_handles.lock(tx, going):
        # Claimed since they were read. They cannot be claimed any longer now, so this plan holds.
        taken = {key for key, id_ in known.ids.items() if key[0] == HANDLE and id_ in owned}
        steps = inventory.plan(told, relevant, known.bound | taken)
    steps, remarks = _without_ghosts(known.stored, steps)
    if not steps:
        return Outcome(0, "nothing new", remarks)
    after = inventory.apply(known.stored, steps)
    _Writer(tx, report.host, known).write(steps, after)
    stale = _stale(steps, {*known.stored, *after})
    changed = {
        names.provider_uuid(report.host, part): names.provider_name(report.host, part)
        for part in sorted(stale)
    }
    providers.mark(tx, report.host, changed, now)
    return Outcome(len(changed), _summary(steps), remarks)


def _read(tx: sa.Connection, host: str) -> _Known:
    known = _Known()
    for row in devices.of_host(tx, host):
        key: Key = (DEVICE, row["address"])
        known.stored[key] = Stored(devices.value(row), row["draining"])
        known.ids[key] = row["id"]
    for row in deployables.of_host(tx, host):
        key = (DEPLOYABLE, row["device"], row["address"])
        known.stored[key] = Stored(deployables.value(row), row["draining"])
        known.ids[key] = row["id"]
        known.counts[key] = row["num_accelerators"]
        if row["job_id"] is not None:
            known.programming.add(row["device"])
    for row in attach_handles.of_host(tx, host):
        key = (HANDLE, row["device"], row["deployable"], row["address"])
        known.stored[key] = Stored(attach_handles.value(row), row["draining"])
        known.ids[key] = row["id"]
        if row["request_id"] is not None or row["prepared"]:
            known.bound.add(key)
    return known


def _without_silent(
    stored: Mapping[Key, Stored], report: Report, programming: Collection[str]
) -> dict[Key, Stored]:
    """Leave out what belongs to backends that cannot see at present, unless it is reported.

    And devices that are being programmed, reported or not.

    An agent sends what a sick backend saw last; one that has just started has nothing to send, and
    that its driver fails does not mean that the devices are gone.
    """
    silent = {b.name for b in report.backends if b.status is not BackendStatus.READY}
    reported = {device.address for device in report.devices}
    kept = set(programming) | {
        key[1]
        for key, known in stored.items()
        if isinstance(known.value, Device)
        and known.value.backend in silent
        and key[1] not in reported
    }
    return {key: known for key, known in stored.items() if key[1] not in kept}


def _without_ghosts(
    stored: Mapping[Key, Stored], steps: Sequence[Step]
) -> tuple[Sequence[Step], list[str]]:
    """Put off new parts whose address is still held by a part of another device that stays.

    A provider has one name. The holder is drained and bound, or of a backend that cannot see; when
    it goes, the host reports again.
    """
    new = {step.key for step in steps if isinstance(step, Add)}
    held = {
        key[2]: key[1]
        for key in inventory.apply(stored, steps)
        if key[0] == DEPLOYABLE and key not in new
    }

    def put_off(step: Step) -> bool:
        return step.key[0] != DEVICE and held.get(step.key[2], step.key[1]) != step.key[1]

    remarks = [
        f"{step.key[2]} is reported as a part of {step.key[1]} but is still held by "
        f"{held[step.key[2]]}: it is taken in when that is gone"
        for step in steps
        if step.key[0] == DEPLOYABLE and step.key in new and put_off(step)
    ]
    if not remarks:
        return steps, remarks
    return [step for step in steps if step.key not in new or not put_off(step)], remarks


class _Writer:
    """Applies the steps of a plan, kind by kind.

    What goes, goes before what comes: a part that moves to another device keeps its unique name.
    """

    def __init__(self, tx: sa.Connection, host: str, known: _Known) -> None:
        self._tx = tx
        self._host = host
        self._known = known
        self._ids = dict(known.ids)

    def write(self, steps: Sequence[Step], after: Mapping[Key, Stored]) -> None:
        """Write all steps; ``after`` is what they lead to."""
        for kind, drain in (
            (HANDLE, attach_handles.drain),
            (DEPLOYABLE, deployables.drain),
            (DEVICE, devices.drain),
        ):
            if ids := self._of(steps, Drain, kind):
                drain(self._tx, ids)
        counts = Counter((DEPLOYABLE, *key[1:3]) for key in after if key[0] == HANDLE)
        self._remove(steps)
        self._change(steps)
        self._add(steps, counts)
        self._place(steps, after)
        self._count(after, counts)

    def _of(self, steps: Sequence[Step], sort: type[Step], kind: str) -> list[int]:
        return [self._known.ids[s.key] for s in steps if isinstance(s, sort) and s.key[0] == kind]

    def _remove(self, steps: Sequence[Step]) -> None:
        if handles := self._of(steps, Remove, HANDLE):
            gone = attach_handles.remove(self._tx, handles)
            if gone != len(handles):
                raise Conflict(f"{len(handles) - gone} handles were claimed while they went")
        if parts := self._of(steps, Remove, DEPLOYABLE):
            deployables.remove(self._tx, parts)
        if whole := self._of(steps, Remove, DEVICE):
            devices.remove(self._tx, whole)

    def _change(self, steps: Sequence[Step]) -> None:
        new = _values(steps, Change)
        devices.change(self._tx, {self._ids[k]: v for k, v in new.items() if isinstance(v, Device)})
        deployables.change(
            self._tx, {self._ids[k]: v for k, v in new.items() if isinstance(v, Deployable)}
        )
        attach_handles.change(
            self._tx, {self._ids[k]: v for k, v in new.items() if isinstance(v, AttachHandle)}
        )

    def _add(self, steps: Sequence[Step], counts: Counter[Key]) -> None:
        new = _values(steps, Add)
        if whole := [v for v in new.values() if isinstance(v, Device)]:
            devices.add(self._tx, self._host, whole)
            for address, id_ in devices.ids(self._tx, self._host).items():
                self._ids[DEVICE, address] = id_
        if parts := [
            (self._ids[DEVICE, k[1]], v, counts[k])
            for k, v in new.items()
            if isinstance(v, Deployable)
        ]:
            deployables.add(self._tx, self._host, parts)
            for (device, address), id_ in deployables.ids(self._tx, self._host).items():
                self._ids[DEPLOYABLE, device, address] = id_
        attach_handles.add(
            self._tx,
            [
                (self._ids[DEPLOYABLE, k[1], k[2]], v)
                for k, v in new.items()
                if isinstance(v, AttachHandle)
            ],
        )

    def _place(self, steps: Sequence[Step], after: Mapping[Key, Stored]) -> None:
        """Write parent and root of the parts of every device one part of which is new or moved."""
        moved = {s.key[1] for s in steps if isinstance(s, Add | Change) and s.key[0] == DEPLOYABLE}
        places: dict[int, tuple[int | None, int]] = {}
        for key, known in after.items():
            if key[0] == DEPLOYABLE and key[1] in moved and not known.draining:
                chain = _chain(key, after)
                parent = self._ids[chain[1]] if len(chain) > 1 else None
                places[self._ids[key]] = (parent, self._ids[chain[-1]])
        deployables.place(self._tx, places)

    def _count(self, after: Mapping[Key, Stored], counts: Counter[Key]) -> None:
        """Write how many handles parts have that were there before and have others now."""
        before = self._known.counts
        deployables.count(
            self._tx,
            {
                self._ids[key]: counts[key]
                for key in after
                if key in before and before[key] != counts[key]
            },
        )


def _values(steps: Sequence[Step], sort: type[Add] | type[Change]) -> dict[Key, Record]:
    return {s.key: cast(Any, s).value for s in steps if isinstance(s, sort)}


def _chain(key: Key, after: Mapping[Key, Stored]) -> list[Key]:
    """Return the keys from a deployable outwards, itself first; parents in a ring end the chain."""
    chain = [key]
    while True:
        value = after[chain[-1]].value
        parent = value.parent if isinstance(value, Deployable) else None
        above: Key = (DEPLOYABLE, key[1], parent or "")
        if parent is None or above not in after or above in chain:
            return chain
        chain.append(above)


def _stale(steps: Sequence[Step], keys: Collection[Key]) -> set[str]:
    """Return the addresses of the deployables whose provider may look different now."""
    of_device = {step.key[1] for step in steps if step.key[0] == DEVICE}
    direct = {step.key[2] for step in steps if step.key[0] != DEVICE}
    return direct | {k[2] for k in keys if k[0] == DEPLOYABLE and k[1] in of_device}


def _summary(steps: Sequence[Step]) -> str:
    counts = Counter((step.key[0], type(step).__name__.lower()) for step in steps)
    return ", ".join(f"{kind} {sort} {n}" for (kind, sort), n in sorted(counts.items()))
