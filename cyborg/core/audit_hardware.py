# SPDX-License-Identifier: Apache-2.0
"""An audit's first pair: what the agent sees against what the database has of its host."""

from collections.abc import Collection, Iterator

from cyborg.core.audit import REPAIRS, Finding, Kind
from cyborg.core.audit_view import DeviceRecord, Facts, HandleRecord, PartRecord
from cyborg.core.hardware import Hardware, Part, Seen

NAMED = 5
"""So many names of a list are told, and how many more there are."""


def compare(facts: Facts) -> Iterator[Finding]:
    """Give what hardware and database disagree about; nothing of a silent agent but that."""
    if facts.silence is not None:
        yield _found(
            facts, Kind.AGENT_SILENT, "agent", f"hardware: {facts.silence}; what it has is unknown"
        )
    silent = facts.hardware.silent if facts.hardware is not None else {}
    for backend, error in sorted(silent.items()):
        if error is not None:
            yield _found(
                facts,
                Kind.BACKEND_SILENT,
                f"backend {backend}",
                f"hardware: the backend cannot see ({error}); the database keeps what it saw last",
            )
    known = {device.address: device for device in facts.records.devices}
    for device in known.values():
        if not _programming(device):
            if facts.hardware is not None:
                yield from _device(facts, facts.hardware, device)
            if device.backend not in silent:
                yield from _left(facts, device)
    if facts.hardware is not None:
        for address, seen in sorted(facts.hardware.devices.items()):
            if address not in known:
                yield _found(
                    facts,
                    Kind.DEVICE_UNRECORDED,
                    f"device {address}",
                    f"hardware: backend {seen.backend} sees it; database: no such device",
                )


def _device(facts: Facts, hardware: Hardware, device: DeviceRecord) -> Iterator[Finding]:
    seen = hardware.devices.get(device.address)
    name = f"device {device.address}"
    if seen is None:
        # A report says nothing of the devices of a backend that cannot see.
        if not device.draining and device.backend not in hardware.silent:
            told = "hardware: no such device; database: it is there and not draining"
            yield _found(facts, Kind.DEVICE_VANISHED, name, told)
    elif device.draining:
        told = f"hardware: backend {seen.backend} sees it; database: it is gone and drained"
        yield _found(facts, Kind.DEVICE_RETURNED, name, told)
    else:
        yield from _parts(facts, device, seen)


def _parts(facts: Facts, device: DeviceRecord, seen: Seen) -> Iterator[Finding]:
    if seen.parts is None:  # the agent is of the release before
        return
    known = {part.address: part for part in device.parts}
    for address, part in sorted(seen.parts.items()):
        record = known.get(address)
        if record is None or record.draining:
            has = "no such deployable" if record is None else "it is gone and drained"
            told = f"hardware: {part.resource_class}, {len(part.handles)} handles; database: {has}"
            yield _found(facts, Kind.PART_UNRECORDED, f"deployable {address}", told)
        else:
            yield from _part(facts, record, part)
    for address, record in sorted(known.items()):
        if address not in seen.parts and not record.draining:
            told = "hardware: no such deployable; database: it is there and not draining"
            yield _found(facts, Kind.PART_VANISHED, f"deployable {address}", told)


def _part(facts: Facts, record: PartRecord, part: Part) -> Iterator[Finding]:
    name = f"deployable {record.address}"
    if record.resource_class != part.resource_class:
        told = f"hardware: class {part.resource_class}; database: class {record.resource_class}"
        yield _found(facts, Kind.PART_DIFFERS, name, told)
    offered = {handle.address for handle in record.handles if not handle.draining}
    if offered != part.handles:
        told = (
            f"hardware alone: handles {_few(part.handles - offered)}; "
            f"database alone: {_few(offered - part.handles)}"
        )
        yield _found(facts, Kind.HANDLES_DIFFER, name, told)


def _left(facts: Facts, device: DeviceRecord) -> Iterator[Finding]:
    """Tell of what is drained and could go, for nobody holds any of it."""
    idle: list[HandleRecord] = []
    parts = 0
    for part in device.parts:
        mine = [h for h in part.handles if (device.draining or part.draining or h.draining)]
        idle += [handle for handle in mine if not handle.held]
        parts += part.draining and not any(handle.held for handle in part.handles)
    held = any(handle.held for part in device.parts for handle in part.handles)
    if idle or parts or (device.draining and not held):
        yield _found(
            facts,
            Kind.DRAINED_LEFT,
            f"device {device.address}",
            f"database: {len(idle)} handles of it are drained and nobody holds them any longer",
        )


def _programming(device: DeviceRecord) -> bool:
    # Reports leave such a device as it is until the job has ended.
    return any(part.programming for part in device.parts)


def _few(names: Collection[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(sorted(names)[:NAMED]) + more


def _found(facts: Facts, kind: Kind, name: str, told: str) -> Finding:
    return Finding(facts.host, kind, name, told, REPAIRS.get(kind))
