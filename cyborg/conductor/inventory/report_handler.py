# SPDX-License-Identifier: Apache-2.0
"""Record a host's report: read the stored state of the host, plan the changes and write them.

The caller has locked the row of the host's agent, so reports of a host are recorded one by one.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.custody import entries
from cyborg.conductor.inventory import device_events, sync
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core import naming
from cyborg.core.inventory import plan
from cyborg.core.inventory.device import (
    FUNCTION_TYPES,
    AttachHandle,
    Deployable,
    Device,
)
from cyborg.core.inventory.device_state import BootCheck
from cyborg.core.inventory.plan import DeployableKey, DeviceKey, HandleKey, Key, Step
from cyborg.core.inventory.report import BackendState, BackendStatus, Report
from cyborg.core.log import Remark
from cyborg.core.migration.import_plan import BACKEND as IMPORTED
from cyborg.core.text import join_limited
from cyborg.db.backends import desired as desired_backends
from cyborg.db.deployables import programming
from cyborg.db.device_sets import write as device_sets
from cyborg.db.handles import write as attach_handles
from cyborg.db.providers import write as providers

# Handles listed in one log line.
MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class ReportResult:
    """Result of recording a report.

    ``stale_providers`` is the number of providers to publish, ``summary`` and ``remarks`` are texts
    for the log, ``abandoned`` is the number of handles that were removed without cleaning.
    """

    stale_providers: int
    summary: str
    remarks: Sequence[Remark] = ()
    abandoned: int = 0


@dataclass(frozen=True)
class ReportHandler:
    """Writer of the inventory of hosts, from reports and for removals.

    Tombstones are written, and returning devices restored from them, unless [conductor]
    tombstone_ttl is 0.
    """

    conf: cfg.ConfigOpts
    notifications: NotificationBuilder

    def record_report(
        self, tx: sa.Connection, report: Report, now: datetime, *, has_overrides: bool
    ) -> ReportResult:
        """Update the tables from a report, mark changed providers stale and record notifications.

        ``has_overrides`` is whether operators have set desired backends of the host.
        """
        # Everything of the host, in a few statements: a plan for a part could not see that a
        # function moved from one deployable to another.
        state = sync.read_host_state(tx, report.host)
        kept = _kept_devices(state, report)
        # A device in programming may leave the bus or be reported incompletely, and must not become
        # schedulable before the end. It stays unchanged; its host is asked for a report at the end.
        excluded = state.programming | kept.keys()
        devices = [device for device in report.devices if device.address not in excluded]
        relevant = _exclude_failed_backends(
            state.stored, report.backends, devices, state.programming
        )
        result = self._apply_plan(
            tx, report.host, state, devices, relevant, now, has_overrides=has_overrides
        )
        result = replace(result, remarks=(*result.remarks, *kept.values()))
        # After the plan was applied: the check compares what is stored now with what was desired.
        if any(row["boot_check"] == BootCheck.AWAITING_REPORT for row in state.devices.values()):
            programming.end_boot_checks(tx, report.host, {device.address for device in devices})
        # Without a partition job that has ended, no device waits for this report.
        if not state.partitioned:
            return result
        # It was requested at the end of the job, so it has the new layout.
        changed = programming.detach(tx, state.partitioned)
        providers.mark_stale_existing(tx, changed, now)
        return replace(result, stale_providers=result.stale_providers + len(changed))

    def _apply_plan(
        self,
        tx: sa.Connection,
        host: str,
        state: sync.HostState,
        devices: Sequence[Device],
        relevant: Mapping[Key, plan.Stored],
        now: datetime,
        *,
        has_overrides: bool = False,
    ) -> ReportResult:
        """Plan and write the steps from the stored ``relevant`` records to ``devices``.

        Records of ``state`` that are not in ``relevant`` stay. Without steps nothing is written.
        """
        steps, remarks = _defer_conflicting_addresses(
            state.stored, _plan_steps(tx, state, devices, relevant)
        )
        steps, deferred = _defer_owned_functions(state.stored, steps, state.bound)
        remarks += deferred
        if not steps:
            return ReportResult(stale_providers=0, summary="no changes", remarks=remarks)
        target = plan.apply(state.stored, steps)
        addresses = _stale_addresses(steps, {*state.stored, *target})
        names = {address: naming.provider_name(host, address) for address in sorted(addresses)}
        _choose_providers(tx, host, state, names)
        keep_tombstones = self.conf.conductor.tombstone_ttl > 0
        writer = sync.Writer(tx, host, state, now, keep_tombstones)
        # Before the events, which read the rows as they are after the report.
        writer.write(steps, target)
        device_events.record_changes(tx, host, state, steps, writer.added, now)
        if has_overrides and any(_backend_changed(state, step) for step in steps):
            desired_backends.sync_cordon(tx, [host], now)
        remarks += device_events.record_removed_devices(tx, state, steps, self.notifications)
        remarks += device_events.record_health_changes(tx, host, state, steps, self.notifications)
        stale = {state.providers[address]: name for address, name in names.items()}
        providers.mark_stale(tx, host, stale, now)
        others = writer.changed_sets - stale.keys()
        providers.mark_stale_existing(tx, others, now)
        return ReportResult(len(stale) + len(others), _summarize(steps), remarks)

    def remove_backend(
        self, tx: sa.Connection, host: str, backend: str | None, now: datetime
    ) -> ReportResult:
        """Remove the inventory of a backend (None: of all) as if it was no longer reported.

        Dirty handles are removed, too, unless another handle of the same deployable is bound. Their
        tombstones mark them as dirty, so they are cleaned first if they return. Of a device set
        without an owner the dirty members stay, to be cleaned without the work of the set.
        """
        state = sync.read_host_state(tx, host)
        addresses = {
            key.device
            for key, stored in state.stored.items()
            if isinstance(stored.value, Device) and backend in (None, stored.value.backend)
        }
        relevant = {key: stored for key, stored in state.stored.items() if key.device in addresses}
        places = _abandon_handles(tx, host, state, relevant, now)
        result = self._apply_plan(tx, host, state, (), relevant, now)
        if not places:
            return result
        dirty = [f"{key.handle} of {place}" for key, place in sorted(places.items())]
        remark = Remark(
            f"{len(places)} dirty handles were removed without cleaning: "
            f"{join_limited(dirty, MAX_NAMED)}",
            {"device": sorted({key.device for key in places})},
        )
        return replace(result, abandoned=len(places), remarks=(*result.remarks, remark))


def _plan_steps(
    tx: sa.Connection,
    state: sync.HostState,
    devices: Sequence[Device],
    relevant: Mapping[Key, plan.Stored],
) -> Sequence[Step]:
    """Plan the steps and lock what they remove; add handles that were claimed to ``state``.

    Planned without locks, since most reports remove nothing; only what is to be removed is locked,
    and planned again if it was claimed meanwhile.
    """
    steps: Sequence[Step] = plan.plan(devices, relevant, state.pins)
    removed = [step.key for step in steps if isinstance(step, plan.Remove)]
    handles = {state.ids[key] for key in removed if isinstance(key, HandleKey)}
    sets = {
        state.ids[key]: key
        for key in removed
        if isinstance(key, DeployableKey) and _is_set(state.stored[key].value)
    }
    members = device_sets.find_members(tx, sets) if sets else set()
    # All in one order: with a statement for the members and one for the others, this could wait
    # for a claim that waits for it.
    # The set through which each was claimed, None for none, by the row id of the handle.
    set_by_claimed = attach_handles.lock(tx, handles | members)
    of_sets = {
        id_: sets[set_id]
        for id_, set_id in set_by_claimed.items()
        if id_ in members and set_id in sets
    }
    kept = (set_by_claimed.keys() & handles) | of_sets.keys()
    if not kept:
        return steps
    # Claimed since they were read, some through a set, which must stay. The locks prevent further
    # claims, so the new plan is valid.
    keys = {id_: key for key, id_ in state.ids.items() if isinstance(key, HandleKey)}
    state.bound |= {keys[id_] for id_ in kept}
    state.bound_sets |= {keys[id_]: key for id_, key in of_sets.items()}
    return plan.plan(devices, relevant, state.pins)


def _choose_providers(
    tx: sa.Connection, host: str, state: sync.HostState, names: Mapping[str, str]
) -> None:
    """Add the uuids of new providers to ``state``; ``names`` has the names by address.

    The uuid of a provider is chosen here only: that of the existing one, which allocations name,
    else one that follows from host and address, so that a retry creates the same.
    """
    new = {address: name for address, name in names.items() if address not in state.providers}
    # A new deployable may have a provider, which is not deleted yet, of a former one.
    existing = providers.find_uuids(tx, new.values())
    for address, name in new.items():
        state.providers[address] = existing.get(name) or naming.provider_uuid(host, address)


def _abandon_handles(
    tx: sa.Connection,
    host: str,
    state: sync.HostState,
    relevant: Mapping[Key, plan.Stored],
    now: datetime,
) -> dict[HandleKey, str]:
    """Abandon the dirty handles that alone prevent the removal of ``relevant``; update ``state``.

    Also abandon the work of removed sets for their dirty members, which stay to be cleaned. Return
    both kinds of handles: the former with the address of their deployable, the latter with that of
    the set.
    """
    # This plan counts no dirty handle as bound, to find the deployables that can be removed.
    # ``_apply_plan`` plans again: a dirty handle of a deployable that stays is drained then, and
    # cleaned, because its deployable is still there to name it.
    without_dirty = replace(
        state,
        bound=state.bound - state.dirty,
        bound_sets={k: v for k, v in state.bound_sets.items() if k not in state.dirty},
    )
    steps = plan.plan(reported=(), stored=relevant, bound=without_dirty.pins)
    removed = {step.key for step in steps if isinstance(step, plan.Remove)}
    state.abandoned = {key for key in state.dirty if key.deployable_key in removed}
    # Dirty members that stay: they are cleaned without the work of the removed set.
    of_sets = {
        key: of_set
        for key, of_set in state.bound_sets.items()
        if of_set in removed and key not in state.abandoned
    }
    # Before the plan is applied: a removal deletes only handles that need no cleaning.
    attach_handles.force_clean(tx, [state.ids[key] for key in state.abandoned])
    attach_handles.abandon_sets(tx, [state.ids[key] for key in of_sets])
    places = {key: key.deployable for key in state.abandoned}
    places |= {key: of_set.deployable for key, of_set in of_sets.items()}
    abandoned = [
        entries.AbandonedHandle(state.devices[key.device]["uuid"], place, key.handle)
        for key, place in sorted(places.items())
    ]
    entries.record_abandoned(tx, host, abandoned, now)
    state.bound -= state.abandoned
    for key in places:
        state.bound_sets.pop(key, None)
    return places


def _kept_devices(state: sync.HostState, report: Report) -> dict[str, Remark]:
    """Return a remark for each device, by address, that another backend reports too early.

    A device with prepared handles stays with the backend that prepared them: no other driver can
    clean them. When they are clean, the next report moves the device. An imported device has no
    backend yet.
    """
    prepared = {key.device for key in state.prepared}
    backends = {backend.name for backend in report.backends}
    kept = {}
    for device in report.devices:
        if device.address not in prepared:
            continue
        owner = state.devices[device.address]["backend"]
        if owner in (device.backend, IMPORTED):
            continue
        text = (
            f"device stays with backend {owner}, which prepared handles of it, until they "
            f"are clean; backend {device.backend} reports it too"
        )
        if owner not in backends:
            text += (
                f". Host {report.host} has no backend {owner}, so nothing can clean them: "
                "restore its section in the configuration, or abandon the cleaning: cyborg "
                f"uninstall-driver DRIVER --host {report.host} --backend {owner} --force"
            )
        kept[device.address] = Remark(text, {"device": device.address})
    return kept


def _exclude_failed_backends(
    stored: Mapping[Key, plan.Stored],
    backends: Sequence[BackendState],
    devices: Sequence[Device],
    programming: Collection[str],
) -> dict[Key, plan.Stored]:
    """Return the stored records that the report may change.

    Two kinds of devices are left out: devices that are being programmed, and devices of a backend
    that is not READY if they are missing in the report. An agent reports the last known devices of
    a failed backend. After its restart the agent knows none of them, so their absence does not mean
    that they were removed.
    """
    failed = {b.name for b in backends if b.status is not BackendStatus.READY}
    reported = {device.address for device in devices}
    kept = set(programming) | {
        key.device
        for key, record in stored.items()
        if isinstance(record.value, Device)
        and record.value.backend in failed
        and key.device not in reported
    }
    return {key: record for key, record in stored.items() if key.device not in kept}


def _defer_conflicting_addresses(
    stored: Mapping[Key, plan.Stored], steps: Sequence[Step]
) -> tuple[Sequence[Step], list[Remark]]:
    """Skip new deployables whose address is still used by a deployable of another device.

    The name of a provider is unique. The other deployable is draining, or of a failed backend; when
    it is removed, the host reports again.
    """
    new = {step.key for step in steps if isinstance(step, plan.Add)}
    devices_by_address = {
        key.deployable: key.device
        for key in plan.apply(stored, steps)
        if isinstance(key, DeployableKey) and key not in new
    }

    def conflicts(key: Key) -> bool:
        if isinstance(key, DeviceKey):
            return False
        return devices_by_address.get(key.deployable, key.device) != key.device

    deferred = {key for key in new if conflicts(key)}
    remarks = [
        Remark(
            f"deployable {key.deployable} of device {key.device} is ignored until the deployable "
            f"of device {devices_by_address[key.deployable]} with this address is removed",
            {"device": key.device},
        )
        for key in (step.key for step in steps)
        if isinstance(key, DeployableKey) and key in deferred
    ]
    if not remarks:
        return steps, remarks
    return [step for step in steps if step.key not in deferred], remarks


def _defer_owned_functions(
    stored: Mapping[Key, plan.Stored],
    steps: Sequence[Step],
    bound: Collection[HandleKey],
) -> tuple[Sequence[Step], list[Remark]]:
    """Skip new handles of PCI functions that have an owner through a draining handle.

    The function moved to another deployable, for example since an imported host had one for each
    virtual function. It must not get a second owner. When it is released, the host reports again.
    """
    added = {
        step.key
        for step in steps
        if isinstance(step, plan.Add)
        and isinstance(step.key, HandleKey)
        and _is_function(step.value)
    }
    if not added:  # most reports: spare a walk over all records of the host
        return steps, []
    owned = {
        key.handle: key.deployable
        for key, record in plan.apply(stored, steps).items()
        if isinstance(key, HandleKey)
        and key in bound
        and record.draining
        and _is_function(record.value)
    }
    deferred = {key for key in added if key.handle in owned}
    remarks = [
        Remark(
            f"handle {key.handle} of deployable {key.deployable} is ignored until the handle of "
            f"deployable {owned[key.handle]} with this address is released",
            {"device": key.device},
        )
        for key in sorted(deferred)
    ]
    return [step for step in steps if step.key not in deferred], remarks


def _is_set(value: plan.Record) -> bool:
    """Return whether a record is a device set."""
    return isinstance(value, Deployable) and value.device_set is not None


def _is_function(value: plan.Record) -> bool:
    """Return whether a record is the handle of a PCI function."""
    return isinstance(value, AttachHandle) and value.type in FUNCTION_TYPES


def _backend_changed(state: sync.HostState, step: Step) -> bool:
    """Return whether a device is new or moves to another backend, which may be cordoned."""
    if not isinstance(step, plan.Add | plan.Change) or not isinstance(step.value, Device):
        return False
    stored = state.stored.get(step.key)
    return not (
        stored and isinstance(stored.value, Device) and stored.value.backend == step.value.backend
    )


def _stale_addresses(steps: Sequence[Step], keys: Collection[Key]) -> set[str]:
    """Return the addresses of the deployables whose provider may have changed."""
    changed = [step.key for step in steps]
    devices = {key.device for key in changed if isinstance(key, DeviceKey)}
    direct = {key.deployable for key in changed if not isinstance(key, DeviceKey)}
    return direct | {
        key.deployable for key in keys if isinstance(key, DeployableKey) and key.device in devices
    }


_NOUNS = {DeviceKey: "device", DeployableKey: "deployable", HandleKey: "handle"}


def _summarize(steps: Sequence[Step]) -> str:
    counts = Counter((_NOUNS[type(step.key)], type(step).__name__.lower()) for step in steps)
    return ", ".join(f"{kind} {action} {n}" for (kind, action), n in sorted(counts.items()))
