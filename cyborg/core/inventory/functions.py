# SPDX-License-Identifier: Apache-2.0
"""Functions of a backend, and the number of accelerators that have each function.

A function is a capability of a device, such as ``crypto.ipsec.aes``; it is not a PCI function. The
first element of its name is the resource class in lower case without ``CUSTOM_``; ``PGPU`` is
``gpu``. The other elements are a path in the capability tree of the device. A device without a
valid tree has only the function named after its resource class. A profile requires a function by
its trait: ``CUSTOM_CRYPTO_IPSEC_AES`` for ``crypto.ipsec.aes``.

An accelerator is a handle. The total of a function is the number of handles of its devices; for
each device it is limited by every ``num`` on the path. Handles that have an owner or are being
cleaned are used. A used handle counts for every function of its device, as the function that its
owner uses is unknown. Free handles can be allocated now: a device that is not schedulable has none.
So used plus free is at most the total, and less if a device is not schedulable.

The last part of the module decides which PCI functions of guests are of servers of this service. A
guest is a server of this service for a function if an ARQ of its instance owns the function. The
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

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cyborg.core.errors import Invalid
from cyborg.core.inventory import capability

MAX_NAME = 255
_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")
_CUSTOM = "CUSTOM_"
# PGPU is a standard class of Placement, without the prefix CUSTOM_.
_CLASS_ALIASES = {"PGPU": "gpu"}


@dataclass(frozen=True, slots=True)
class HandleUsage:
    """Numbers of handles of one resource class on one device: in total, used and free.

    Used handles have an owner or are being cleaned, free handles can be allocated now. ``tree`` is
    the device's capability tree as ``capability.encoded_text`` returns it.
    """

    resource_class: str
    total: int
    used: int
    free: int
    tree: str = ""


@dataclass(frozen=True, slots=True)
class Function:
    """A function, with the numbers of its accelerators: in total, used and free."""

    name: str
    total: int
    used: int
    free: int


def summarize_functions(
    usages: Iterable[HandleUsage], within: str | None = None
) -> tuple[Function, ...]:
    """Return the functions of all usages, sorted by name.

    With ``within`` only the function of that name and the functions below it are returned.
    """
    functions: dict[str, Function] = {}
    for usage in usages:
        for name, limit in _limits(usage.resource_class, usage.tree):
            if within is None or name == within or name.startswith(f"{within}."):
                total = min(usage.total, limit)
                used = min(usage.used, total)
                free = min(usage.free, total - used)
                sums = functions.get(name, Function(name, total=0, used=0, free=0))
                functions[name] = Function(
                    name, total=sums.total + total, used=sums.used + used, free=sums.free + free
                )
    return tuple(function for _, function in sorted(functions.items()))


def names_of(resource_class: str, tree: str) -> frozenset[str]:
    """Return the functions of a device of this resource class and capability tree.

    No name is longer than MAX_NAME, as a tree whose traits would be longer is not valid.
    """
    return frozenset(name for name, _ in _limits(resource_class, tree))


def parse_name(text: str) -> str:
    """Return the name of a function in lower case. Raise Invalid if it is not valid."""
    name = text.lower()
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise Invalid(
            f"function: invalid name {text[:60]!r}, expected up to {MAX_NAME} letters, digits and "
            "_, in elements separated by dots, such as crypto.ipsec.aes",
            field="function",
        )
    return name


def root_of(resource_class: str) -> str:
    """Return the first element of the function names of a resource class."""
    return _CLASS_ALIASES.get(resource_class) or resource_class.removeprefix(_CUSTOM).lower()


# Cached: a cloud has thousands of devices of a few models.
@functools.lru_cache(maxsize=128)
def _limits(resource_class: str, text: str) -> tuple[tuple[str, int], ...]:
    root = root_of(resource_class)
    try:
        tree = capability.validate(capability.decode_tree(text))
        capability.build_traits(root, tree)
    except Invalid:
        tree = {}
    limits = capability.function_limits(tree)
    return tuple((".".join((root, *path)), limit) for path, limit in limits.items())


# Functions in one question to the conductor.
MAX_FUNCTIONS = 4096


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


# Owners of the functions of guests, by the uuid of the guest and the address of the function.
Owners = Mapping[tuple[str, str], FunctionOwner | None]


def list_questions(
    guests: Iterable[Guest], known: Mapping[str, GuestRecord], *, recheck: bool = False
) -> list[tuple[str, str]]:
    """Return the functions whose owner must be asked for: uuid of the guest, and address.

    ``known`` has the records of the last decision. Functions that the guest had with an ARQ
    (``owned``) or without one (``foreign``) are left out. With ``recheck``, only the owned
    functions of a stopped guest are left out: an ARQ of the other functions may have been made or
    deleted meanwhile. A function of another ARQ is asked for each time: that ARQ may end.
    """
    questions: list[tuple[str, str]] = []
    for guest in guests:
        record = _record(known, guest)
        functions = guest.functions - record.owned
        if recheck:
            functions |= guest.running
        else:
            functions -= record.foreign
        questions += [(guest.uuid, address) for address in sorted(functions)]
    return questions


def decide(
    guests: Iterable[Guest], known: Mapping[str, GuestRecord], owners: Owners
) -> GuestDecision:
    """Return what is known of the guests from now; ``known`` has the records of the last decision.

    ``owners`` has the answers to ``list_questions``. A question without an answer is not in it.
    """
    records: dict[str, GuestRecord] = {}
    unknown = False
    for guest in guests:
        before = _record(known, guest)
        # Its functions may be unchanged: what was known of it stays.
        if not guest.is_readable:
            if guest.uuid in known:
                records[guest.uuid] = before
            continue
        if not guest.functions:
            continue
        owned = before.owned & guest.functions
        # Nova writes a new definition at the next start, without the functions that had an ARQ.
        left_over = owned - guest.running
        foreign = (before.foreign & guest.functions) - left_over
        for address in guest.functions:
            if (guest.uuid, address) not in owners:
                # Without an answer, what was known of the function stays.
                unknown = unknown or address not in (owned | foreign)
                continue
            owner = owners[guest.uuid, address]
            if owner is FunctionOwner.INSTANCE:
                owned |= {address}
            # A function without an ARQ is of the guest alone, unless it is left over.
            is_foreign = owner is None and (address not in owned or address in guest.running)
            if is_foreign:
                foreign |= {address}
            else:
                foreign -= {address}
        records[guest.uuid] = GuestRecord(guest.name, owned, foreign)
    return GuestDecision(records, unknown)


def _record(known: Mapping[str, GuestRecord], guest: Guest) -> GuestRecord:
    return known.get(guest.uuid, GuestRecord(guest.name))
