# SPDX-License-Identifier: Apache-2.0
"""What is remembered of devices that have gone from their host, for the day they return.

A device is the same when it stands at the same address of the same host. It gets back its uuid and
the status that an operator gave it, its deployables their uuids and an operator's attributes. What
the host reports of itself is not remembered: the host tells it again. What was given up before it
could be cleaned is cleaned on its return, before anybody gets it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Attribute:
    """An operator's attribute of a deployable."""

    uuid: str
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Part:
    """What a deployable gets back; ``dirty`` are addresses of handles that nobody has cleaned."""

    uuid: str
    attributes: tuple[Attribute, ...] = ()
    dirty: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Departed:
    """What a device gets back; ``parts`` are its deployables that are gone, by address.

    A device that is there may have such parts too.
    """

    uuid: str
    status: str
    parts: Mapping[str, Part] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recalled:
    """What those that come get, and what is remembered from now on.

    ``devices`` by address, ``parts`` by the addresses of device and deployable, ``kept`` by the
    device's address.
    """

    devices: Mapping[str, Departed]
    parts: Mapping[tuple[str, str], Part]
    kept: Mapping[str, Departed]


def recall(
    known: Mapping[str, Departed],
    gone: Mapping[str, Departed],
    come: Collection[tuple[str, str]],
    there: Collection[str],
) -> Recalled:
    """Decide what returns and what is remembered, of one host.

    ``known`` is what was remembered until now, ``gone`` what goes at this moment: each device that
    goes or loses parts, with these. ``come`` are the parts that are new, by the addresses of device
    and deployable, and ``there`` the devices that the host has after this. A part that moves to
    another device takes along what is its own.
    """
    kept = dict(known)
    for device, left in gone.items():
        parts = {**kept[device].parts, **left.parts} if device in kept else left.parts
        kept[device] = replace(left, parts=parts)
    moved = {address: device for device, left in gone.items() for address in left.parts}
    given: dict[tuple[str, str], Part] = {}
    for device, address in sorted(come):
        # What goes at this moment is newer than what another time has left here.
        source = moved.get(address, device)
        parts = dict(kept[source].parts) if source in kept else {}
        if address not in parts:
            continue
        given[device, address] = parts.pop(address)
        kept[source] = replace(kept[source], parts=parts)
        if source != device and device in kept:
            rest = {a: p for a, p in kept[device].parts.items() if a != address}
            kept[device] = replace(kept[device], parts=rest)
    return Recalled(
        devices={address: known[address] for address in there if address in known},
        parts=given,
        kept={a: one for a, one in kept.items() if one.parts or a not in there},
    )
