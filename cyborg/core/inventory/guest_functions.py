# SPDX-License-Identifier: Apache-2.0
"""Decision which PCI functions of guests are of servers of this service, and which are not.

A guest is a server of this service for a function if an ARQ of its instance owns the function. The
decision must hold in these moments:

* An ARQ is bound before the guest is defined. So guests are read first, and owners after that.
* An ARQ can be released before the definition of its guest is changed: Nova leaves a function that
  is detached in the definition of a stopped server, and writes a new definition at its next start.
  So a definition with a function for which its instance had an ARQ does not withhold the function.
  A guest that still runs with it does: this is asked again from time to time, and before host work.
* An ARQ can be released, and its guest end, between both reads. So the guests are read again before
  a function is withheld that was not.
* The conductor may not answer. Then a function is withheld only if the guest had it without an ARQ
  at the last answer: a function whose owner is unknown may be of a server, and would be shown as
  lost if it was withheld.
* A function of another ARQ is not withheld: a device with an owner stays with its owner.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

MAX_FUNCTIONS = 4096
"""Functions in one question to the conductor."""


class FunctionOwner(StrEnum):
    """Owner of a PCI function of a guest, as the conductor answers; None means no owner."""

    INSTANCE = "instance"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Guest:
    """A guest of the host: the uuid of its instance, its name, its PCI functions by address.

    ``running`` are the functions with which it runs now, ``functions`` also those with which it
    would start. Those of a guest that is not readable are unknown.
    """

    uuid: str
    name: str
    functions: frozenset[str]
    running: frozenset[str] = frozenset()
    is_readable: bool = True


@dataclass(frozen=True, slots=True)
class GuestRecord:
    """What is known of a guest with PCI functions.

    ``owned``: functions for which its instance had an ARQ. ``foreign``: functions that nothing but
    the guest had at the last answer of a conductor. Both only as long as the guest has them; a
    function in both had an ARQ, and the guest still ran with it without one.
    """

    name: str
    owned: frozenset[str] = frozenset()
    foreign: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GuestDecision:
    """Records of the guests by uuid; ``unknown`` is whether a function has no known owner."""

    records: Mapping[str, GuestRecord] = field(default_factory=dict)
    unknown: bool = False

    @property
    def withheld(self) -> dict[str, str]:
        """Return the functions that must not be offered: the name of the guest by address."""
        return {
            address: record.name
            for _, record in sorted(self.records.items())
            for address in sorted(record.foreign)
        }


Owners = Mapping[tuple[str, str], FunctionOwner | None]
"""Owners of the functions of guests, by the uuid of the guest and the address of the function."""


def list_questions(
    guests: Iterable[Guest], known: Mapping[str, GuestRecord], *, recheck: bool = False
) -> list[tuple[str, str]]:
    """Return the functions whose owner must be asked for: uuid of the guest, and address.

    Those that a guest had with an ARQ are known, and so are those that it had without one. With
    ``recheck`` those of running guests and the latter are asked for too: an ARQ may have been
    deleted, or made. Those of another ARQ are asked for each time: it may end.
    """
    found: list[tuple[str, str]] = []
    for guest in guests:
        record = _record(known, guest)
        functions = guest.functions - record.owned - (frozenset() if recheck else record.foreign)
        functions |= guest.running if recheck else frozenset()
        found += [(guest.uuid, address) for address in sorted(functions)]
    return found


def decide(
    guests: Iterable[Guest], known: Mapping[str, GuestRecord], owners: Owners
) -> GuestDecision:
    """Return what is known of the guests from now; ``known`` is the last result.

    ``owners`` has the answers to the questions, none of those that the conductor did not answer.
    """
    records: dict[str, GuestRecord] = {}
    unknown = False
    for guest in guests:
        before = _record(known, guest)
        if not guest.is_readable:
            records |= {guest.uuid: before} if guest.uuid in known else {}
            continue
        if not guest.functions:
            continue
        owned = before.owned & guest.functions
        foreign = before.foreign & guest.functions - (owned - guest.running)
        for address in guest.functions:
            if (guest.uuid, address) not in owners:
                unknown |= address not in owned | foreign
                continue
            owner = owners[guest.uuid, address]
            if owner is FunctionOwner.INSTANCE:
                owned |= {address}
            is_used = owner is None and (address not in owned or address in guest.running)
            foreign = foreign | {address} if is_used else foreign - {address}
        records[guest.uuid] = GuestRecord(guest.name, owned, foreign)
    return GuestDecision(records, unknown)


def _record(known: Mapping[str, GuestRecord], guest: Guest) -> GuestRecord:
    return known.get(guest.uuid, GuestRecord(guest.name))
