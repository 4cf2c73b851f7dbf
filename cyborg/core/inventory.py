# SPDX-License-Identifier: Apache-2.0
"""What must change in the records of a host so that they tell what the host reports.

A host's inventory is laid out flat: each device, deployable and handle is a record of its own under
a key that tells where it belongs. The plan is the difference of two such layouts, except that
nothing which is bound, or which holds something bound, is ever removed: it is drained.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from cyborg.core.device import AttachHandle, Deployable, Device

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
    """Lay a report out flat, parents before children."""
    flat: dict[Key, Record] = {}
    for device in devices:
        flat["device", device.address] = device.bare()
        for part in device.deployables:
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
    already is not told to drain again.
    """
    wanted = flatten(reported)
    held = _held(bound)
    gone: list[Step] = []
    for key in sorted(stored, key=len, reverse=True):
        if key in wanted:
            continue
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


def _held(bound: Collection[Key]) -> set[Key]:
    """Return the keys of bound handles and of all that they lie in."""
    held: set[Key] = set()
    for key in bound:
        _, device, deployable, _ = key
        held |= {key, ("deployable", device, deployable), ("device", device)}
    return held
