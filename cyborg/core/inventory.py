# SPDX-License-Identifier: Apache-2.0
"""What must change in the records of a host so that they tell what the host reports.

A host's inventory is laid out flat: each device, deployable and handle is a record of its own under
a key that tells where it belongs. The plan is the difference of two such layouts, except that
nothing which is bound, or which holds something bound, is ever removed: it is drained.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from cyborg.core.device import AttachHandle, Deployable, Device

_T = TypeVar("_T")

Key = tuple[str, ...]
"""("device", address), ("deployable", device, address) or ("handle", device, deployable, address).
"""

Record = Device | Deployable | AttachHandle
"""The bare facts of one thing, without what lies below it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as the database has it; a draining one is kept only until it is released."""

    value: Record
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Add:
    """Something new."""

    key: Key
    value: Record


@dataclass(frozen=True, slots=True)
class Change:
    """Facts that differ, or a thing that drained and is back."""

    key: Key
    value: Record


@dataclass(frozen=True, slots=True)
class Drain:
    """Gone from the host and bound: keep it, close it, wait for its release."""

    key: Key


@dataclass(frozen=True, slots=True)
class Remove:
    """Gone from the host and free."""

    key: Key


Step = Add | Change | Drain | Remove


def flatten(devices: Sequence[Device]) -> dict[Key, Record]:
    """Lay a report out flat, parents before children, however deep deployables lie in others."""
    flat: dict[Key, Record] = {}
    for device in devices:
        flat["device", device.address] = device.bare()
        parents = {part.address: part.parent for part in device.deployables}
        depths = _depths(parents, parents.get)
        for part in sorted(device.deployables, key=lambda p: depths[p.address]):
            flat["deployable", device.address, part.address] = part.bare()
            for handle in part.handles:
                flat["handle", device.address, part.address, handle.address] = handle
    return flat


def plan(
    reported: Sequence[Device], stored: Mapping[Key, Stored], bound: Collection[Key]
) -> tuple[Step, ...]:
    """Return the steps from what is stored to what is reported; none when the two are equal.

    ``bound`` holds the keys of handles that have an owner. The steps can be taken one after
    another: what goes, goes children first, and then what comes, comes parents first. What drains
    already is not told to drain again. The work grows as the input does.
    """
    wanted = flatten(reported)
    after = {key: known.value for key, known in stored.items()} | wanted
    held = _held(bound, after)
    gone: list[Step] = []
    for key in _children_first([key for key in stored if key not in wanted], after):
        if key not in held:
            gone.append(Remove(key))
        elif not stored[key].draining:
            gone.append(Drain(key))
    come: list[Step] = []
    for key, value in wanted.items():
        known = stored.get(key)
        if known is None:
            come.append(Add(key, value))
        elif known.draining or known.value != value:
            come.append(Change(key, value))
    return (*gone, *come)


def apply(stored: Mapping[Key, Stored], steps: Sequence[Step]) -> dict[Key, Stored]:
    """Return what is stored once the steps are taken."""
    result = dict(stored)
    for step in steps:
        match step:
            case Add(key, value) | Change(key, value):
                result[key] = Stored(value)
            case Drain(key):
                result[key] = replace(result[key], draining=True)
            case Remove(key):
                del result[key]
    return result


def _held(bound: Collection[Key], records: Mapping[Key, Record]) -> set[Key]:
    """Return the keys of bound handles and of all that they lie in.

    That includes the deployables around theirs: Placement keeps a provider that has children.
    """
    held: set[Key] = set()
    for key in bound:
        held |= {key, ("device", key[1])}
        around: Key | None = ("deployable", *key[1:3])
        while around is not None and around not in held:
            held.add(around)
            around = _around(around, records)
    return held


def _around(key: Key, records: Mapping[Key, Record]) -> Key | None:
    """Return the key of the deployable that a deployable lies within, if it does."""
    record = records.get(key)
    if not isinstance(record, Deployable) or record.parent is None:
        return None
    return ("deployable", key[1], record.parent)


def _children_first(keys: Sequence[Key], records: Mapping[Key, Record]) -> list[Key]:
    """Order handles before deployables, inner ones before outer ones, and these before devices."""
    parts = [key for key in keys if key[0] == "deployable"]
    depths = _depths(parts, lambda key: _around(key, records))
    parts.sort(key=depths.__getitem__, reverse=True)
    handles = [key for key in keys if key[0] == "handle"]
    return [*handles, *parts, *(key for key in keys if key[0] == "device")]


def _depths(of: Iterable[_T], parent: Callable[[_T], _T | None]) -> dict[_T, int]:
    """Return how deep each thing lies, 0 for the outermost; a ring counts as if it were cut open.

    Each thing is looked at once: a chain is walked up to what is known and numbered on the way
    back, as its length would otherwise count again for each of its members.
    """
    depths: dict[_T, int] = {}
    for start in of:
        chain: dict[_T, None] = {}
        at: _T | None = start
        while at is not None and at not in depths and at not in chain:
            chain[at] = None
            at = parent(at)
        depth = -1 if at is None else depths.get(at, -1)
        for member in reversed(chain):
            depth += 1
            depths[member] = depth
    return depths
