# SPDX-License-Identifier: Apache-2.0
"""From a host's report to the tables: read all that is known, plan, write what differs.

The caller holds the row of the host's agent, so that no other report of the host is being recorded
at the same time.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import sqlalchemy as sa

from cyborg.conductor import healths, host_rows, losses
from cyborg.conductor.host_rows import DEPLOYABLE, DEVICE, HANDLE, Known
from cyborg.conductor.notices import Notices
from cyborg.core import inventory, names
from cyborg.core.device import Device
from cyborg.core.inventory import Add, Change, Key, Remove, Step, Stored
from cyborg.core.report import BackendStatus, Report
from cyborg.db.store import attach_handles, providers, wanted


@dataclass(frozen=True, slots=True)
class Outcome:
    """What recording a report came to: how many providers are stale now, and what to log.

    ``let_go`` is how many handles went that nobody has cleaned.
    """

    providers: int
    summary: str
    remarks: Sequence[str] = ()
    let_go: int = 0


MAX_NAMED = 8  # handles that one line of the log names


def record(
    tx: sa.Connection,
    report: Report,
    now: datetime,
    notices: Notices,
    *,
    remember: bool,
    marks: bool = False,
) -> Outcome:
    """Bring the tables to the report, mark the providers that change, tell whom it hits.

    ``remember`` tells whether devices that go are remembered for their return, ``marks`` whether
    operators have ever said anything of the host's backends.
    """
    known = host_rows.read(tx, report.host)
    relevant = _without_silent(known.stored, report, known.programming)
    # A device that is being programmed may leave the bus, or show any part of itself, and what
    # comes back before the end must not be open: it is left as it is, and asked for at the end.
    told = [device for device in report.devices if device.address not in known.programming]
    return _bring(
        tx, report.host, known, told, relevant, now, notices, remember=remember, marks=marks
    )


def _bring(
    tx: sa.Connection,
    host: str,
    known: Known,
    told: Sequence[Device],
    relevant: Mapping[Key, Stored],
    now: datetime,
    notices: Notices,
    *,
    remember: bool,
    marks: bool = False,
) -> Outcome:
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
    host_rows.Writer(tx, host, known, now, remember=remember).write(steps, after)
    if marks and any(_new_owner(known, step) for step in steps):
        wanted.withdraw(tx, [host])
    remarks += losses.tell(tx, known, steps, notices)
    remarks += healths.tell(tx, host, known, steps, notices)
    stale = _stale(steps, {*known.stored, *after})
    changed = {
        names.provider_uuid(host, part): names.provider_name(host, part) for part in sorted(stale)
    }
    providers.mark(tx, host, changed, now)
    return Outcome(len(changed), _summary(steps), remarks)


def forget(
    tx: sa.Connection,
    host: str,
    backend: str,
    now: datetime,
    notices: Notices,
    *,
    remember: bool,
) -> Outcome:
    """Give up what a backend of a host had, as if the host did not report it any longer.

    What nobody has cleaned goes too, unless something of the same part is held, and is remembered:
    should it return, it is cleaned first. The caller holds the row of the host's agent.
    """
    known = host_rows.read(tx, host)
    mine = {
        key[1]
        for key, stored in known.stored.items()
        if isinstance(stored.value, Device) and stored.value.backend == backend
    }
    relevant = {key: stored for key, stored in known.stored.items() if key[1] in mine}
    steps = inventory.plan((), relevant, known.bound - known.dirty)
    gone = {step.key[1:] for step in steps if isinstance(step, Remove)}
    known.let_go = {key for key in known.dirty if key[1:3] in gone}
    attach_handles.let_go(tx, [known.ids[key] for key in known.let_go])
    known.bound -= known.let_go
    outcome = _bring(tx, host, known, (), relevant, now, notices, remember=remember)
    if not known.let_go:
        return outcome
    dirty = ", ".join(f"{key[3]} of {key[2]}" for key in sorted(known.let_go)[:MAX_NAMED])
    told = f"{len(known.let_go)} handles are given up that nobody has cleaned: {dirty}"
    return replace(outcome, let_go=len(known.let_go), remarks=(*outcome.remarks, told))


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


def _new_owner(known: Known, step: Step) -> bool:
    """Tell whether a device comes, or passes to another backend, which may be a closed one."""
    if not isinstance(step, Add | Change) or not isinstance(step.value, Device):
        return False
    before = known.stored.get(step.key)
    return not (
        before and isinstance(before.value, Device) and before.value.backend == step.value.backend
    )


def _stale(steps: Sequence[Step], keys: Collection[Key]) -> set[str]:
    """Return the addresses of the deployables whose provider may look different now."""
    of_device = {step.key[1] for step in steps if step.key[0] == DEVICE}
    direct = {step.key[2] for step in steps if step.key[0] != DEVICE}
    return direct | {k[2] for k in keys if k[0] == DEPLOYABLE and k[1] in of_device}


def _summary(steps: Sequence[Step]) -> str:
    counts = Counter((step.key[0], type(step).__name__.lower()) for step in steps)
    return ", ".join(f"{kind} {sort} {n}" for (kind, sort), n in sorted(counts.items()))
