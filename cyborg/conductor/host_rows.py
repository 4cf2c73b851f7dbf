# SPDX-License-Identifier: Apache-2.0
"""What the tables know of a host, and how the steps of a plan are written to them.

Tables are read and written as a whole, never row by row: the number of statements depends on what
kinds of change there are, not on how many things change.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

import sqlalchemy as sa

from cyborg.core.departed import Departed, Part, Recalled, recall
from cyborg.core.device import AttachHandle, Deployable, Device
from cyborg.core.errors import Conflict
from cyborg.core.inventory import Add, Change, Drain, Key, Record, Remove, Step, Stored
from cyborg.db.store import attach_handles, departed, deployables, devices

DEVICE, DEPLOYABLE, HANDLE = "device", "deployable", "handle"


@dataclass(slots=True)
class Known:
    """What the database knows of a host."""

    stored: dict[Key, Stored] = field(default_factory=dict)
    rows: dict[Key, sa.RowMapping] = field(default_factory=dict)  # of devices and deployables
    ids: dict[Key, int] = field(default_factory=dict)
    counts: dict[Key, int] = field(default_factory=dict)
    bound: set[Key] = field(default_factory=set)
    dirty: set[Key] = field(default_factory=set)  # of these, what nobody owns
    let_go: set[Key] = field(default_factory=set)  # of these, what goes although nobody cleaned it
    programming: set[str] = field(default_factory=set)  # addresses of devices


def read(tx: sa.Connection, host: str) -> Known:
    """Read all that is known of a host, in three statements."""
    known = Known()
    for row in devices.of_host(tx, host):
        key: Key = (DEVICE, row["address"])
        known.stored[key] = Stored(devices.value(row), row["draining"])
        known.rows[key] = row
        known.ids[key] = row["id"]
    for row in deployables.of_host(tx, host):
        key = (DEPLOYABLE, row["device"], row["address"])
        known.stored[key] = Stored(deployables.value(row), row["draining"])
        known.rows[key] = row
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
        if row["request_id"] is None and row["prepared"]:
            known.dirty.add(key)
    return known


class Writer:
    """Applies the steps of a plan, kind by kind.

    What goes, goes before what comes: a part that moves to another device keeps its unique name.
    """

    def __init__(
        self, tx: sa.Connection, host: str, known: Known, now: datetime, *, remember: bool
    ) -> None:
        """``remember`` tells whether what goes is remembered, and what comes may return."""
        self._tx = tx
        self._host = host
        self._known = known
        self._ids = dict(known.ids)
        self._now = now
        self._remember = remember
        self._recalled = Recalled({}, {}, {})

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
        self._recall(steps, after)
        self._remove(steps)
        self._change(steps)
        self._add(steps, counts)
        self._place(steps, after)
        self._count(after, counts)

    def _of(self, steps: Sequence[Step], sort: type[Step], kind: str) -> list[int]:
        return [self._known.ids[s.key] for s in steps if isinstance(s, sort) and s.key[0] == kind]

    def _recall(self, steps: Sequence[Step], after: Mapping[Key, Stored]) -> None:
        """Read and write what is remembered, if whole devices or parts of them come or go."""
        gone = [s.key for s in steps if isinstance(s, Remove) and s.key[0] != HANDLE]
        come = [s.key for s in steps if isinstance(s, Add) and s.key[0] != HANDLE]
        concerned = {key[1] for key in (*gone, *come)}
        if not concerned:
            return
        parts = [key for key in gone if key[0] == DEPLOYABLE]
        given = departed.attributes_of(self._tx, [self._ids[key] for key in parts])
        leaving = {}
        for address in sorted({key[1] for key in gone}):
            row = self._known.rows[DEVICE, address]
            left = {
                key[2]: Part(
                    self._known.rows[key]["uuid"],
                    given.get(self._ids[key], ()),
                    tuple(sorted(h[3] for h in self._known.let_go if h[1:3] == key[1:3])),
                )
                for key in parts
                if key[1] == address
            }
            leaving[address] = Departed(row["uuid"], row["status"], left)
        before = departed.of_host(self._tx, self._host, concerned) if self._remember else {}
        self._recalled = recall(
            before,
            leaving,
            [(key[1], key[2]) for key in come if key[0] == DEPLOYABLE],
            {key[1] for key in after if key[0] == DEVICE},
        )
        if self._remember:
            departed.replace(self._tx, self._host, before, self._recalled.kept, self._now)

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
        devices.change(
            self._tx,
            {self._ids[k]: v for k, v in new.items() if isinstance(v, Device)},
            self._now,
        )
        deployables.change(
            self._tx, {self._ids[k]: v for k, v in new.items() if isinstance(v, Deployable)}
        )
        attach_handles.change(
            self._tx, {self._ids[k]: v for k, v in new.items() if isinstance(v, AttachHandle)}
        )

    def _add(self, steps: Sequence[Step], counts: Counter[Key]) -> None:
        new = _values(steps, Add)
        if whole := [v for v in new.values() if isinstance(v, Device)]:
            devices.add(self._tx, self._host, whole, self._recalled.devices)
            for address, id_ in devices.ids(self._tx, self._host).items():
                self._ids[DEVICE, address] = id_
        if parts := [
            (self._ids[DEVICE, k[1]], v, counts[k])
            for k, v in new.items()
            if isinstance(v, Deployable)
        ]:
            back = self._recalled.parts
            uuids = {address: part.uuid for (_, address), part in back.items()}
            deployables.add(self._tx, self._host, parts, uuids)
            for (device, address), id_ in deployables.ids(self._tx, self._host).items():
                self._ids[DEPLOYABLE, device, address] = id_
            departed.give_attributes(
                self._tx, [(self._ids[DEPLOYABLE, *key], part) for key, part in back.items()]
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
                for key, part in self._recalled.parts.items()
                for address in part.dirty
            },
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
