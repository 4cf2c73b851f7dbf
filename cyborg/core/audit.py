# SPDX-License-Identifier: Apache-2.0
"""The disagreements that an audit can find, each with a kind, an advice and a safe repair if any.

An audit holds four sides against each other: the hardware as its agent sees it, our database,
Placement, and Nova's instances. ``core.audit_compare`` finds; this says what can be found.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """How far an audit is."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"


OPEN = (State.PENDING, State.RUNNING)


class Side(StrEnum):
    """Whose word is held against the others'."""

    HARDWARE = "hardware"
    DATABASE = "database"
    PLACEMENT = "placement"
    NOVA = "nova"


class Repair(StrEnum):
    """What an audit may do by itself. None of it touches an allocation, or anything of Nova's."""

    REPORT = "report"  # have the host report again
    PUBLISH = "publish"  # have the publisher bring Placement to what is wanted
    DELETE_PROVIDER = "delete_provider"  # delete a provider of ours that nobody has a part of
    CLEAN = "clean"  # have the host clean a handle
    RECONCILE = "reconcile"  # suspect a request: the reconciler frees it after the grace


class Kind(StrEnum):
    """What disagrees."""

    AGENT_SILENT = "agent_silent"
    BACKEND_SILENT = "backend_silent"
    DEVICE_UNRECORDED = "device_unrecorded"
    DEVICE_VANISHED = "device_vanished"
    DEVICE_RETURNED = "device_returned"
    PART_UNRECORDED = "part_unrecorded"
    PART_VANISHED = "part_vanished"
    PART_DIFFERS = "part_differs"
    HANDLES_DIFFER = "handles_differ"
    DRAINED_LEFT = "drained_left"
    HANDLE_DIRTY = "handle_dirty"
    HANDLE_MISHELD = "handle_misheld"
    REQUEST_WITHOUT_HANDLE = "request_without_handle"
    REQUEST_MISPLACED = "request_misplaced"
    NODE_MISSING = "node_missing"
    PROVIDER_UNTRACKED = "provider_untracked"
    PROVIDER_STALE = "provider_stale"
    PROVIDER_FAILING = "provider_failing"
    PROVIDER_MISSING = "provider_missing"
    PROVIDER_MISPLACED = "provider_misplaced"
    PROVIDER_OPEN = "provider_open"
    PROVIDER_CLOSED = "provider_closed"
    INVENTORY_DIFFERS = "inventory_differs"
    TRAITS_DIFFER = "traits_differ"
    PROVIDER_LEFTOVER = "provider_leftover"
    ALLOCATION_MISSING = "allocation_missing"
    ALLOCATION_SHORT = "allocation_short"
    ALLOCATION_UNUSED = "allocation_unused"
    INSTANCE_GONE = "instance_gone"
    INSTANCE_ELSEWHERE = "instance_elsewhere"
    NOVA_SILENT = "nova_silent"
    TOO_MANY = "too_many"


_K, _REPORT = Kind, "Have the host report again; if it stays, read the agent's log."
_PUBLISH = "The publisher repairs it; if it stays, its row and the conductor's log say why."

ADVICE: Mapping[Kind, str] = {
    _K.AGENT_SILENT: "See whether cyborg-agent runs on the host and reaches the message broker.",
    _K.BACKEND_SILENT: "Read the agent's log: this driver cannot see its devices at present.",
    _K.DEVICE_UNRECORDED: _REPORT,
    _K.DEVICE_VANISHED: _REPORT,
    _K.DEVICE_RETURNED: _REPORT,
    _K.PART_UNRECORDED: _REPORT,
    _K.PART_VANISHED: _REPORT,
    _K.PART_DIFFERS: _REPORT,
    _K.HANDLES_DIFFER: _REPORT,
    _K.DRAINED_LEFT: _REPORT,
    _K.HANDLE_DIRTY: "Have the host clean it; nobody gets it before.",
    _K.HANDLE_MISHELD: "Delete the request; its handle is free then.",
    _K.REQUEST_WITHOUT_HANDLE: "Delete the request, or rebuild its server.",
    _K.REQUEST_MISPLACED: "Migrate or rebuild the server: it has another device than it was sold.",
    _K.NODE_MISSING: "Start nova-compute, or set [agent] resource_provider to the provider's name.",
    _K.PROVIDER_UNTRACKED: _PUBLISH,
    _K.PROVIDER_STALE: "See whether Placement answers and a conductor runs.",
    _K.PROVIDER_FAILING: "Remove the reason that Placement gives; it is tried again by itself.",
    _K.PROVIDER_MISSING: _PUBLISH,
    _K.PROVIDER_MISPLACED: _PUBLISH,
    _K.PROVIDER_OPEN: _PUBLISH,
    _K.PROVIDER_CLOSED: _PUBLISH,
    _K.INVENTORY_DIFFERS: _PUBLISH,
    _K.TRAITS_DIFFER: _PUBLISH,
    _K.PROVIDER_LEFTOVER: "Delete it in Placement, once nobody has an allocation of it.",
    _K.ALLOCATION_MISSING: "If the server is there, run 'nova-manage placement heal_allocations'; "
    "if not, the reconciler frees the request after [conductor] orphan_grace.",
    _K.ALLOCATION_SHORT: "Run 'nova-manage placement heal_allocations' for the server.",
    _K.ALLOCATION_UNUSED: "If no server or migration has this uuid, run 'nova-manage placement "
    "audit'; a server whose bind failed keeps its allocation until it is deleted.",
    _K.INSTANCE_GONE: "Delete the request, if Nova answers for the whole cloud.",
    _K.INSTANCE_ELSEWHERE: "Hard reboot or rebuild the server; if it does not use the device, "
    "delete the request.",
    _K.NOVA_SILENT: "See whether Nova answers and lets the user of [nova] list all servers.",
    _K.TOO_MANY: "Repair what is told, then audit again, host by host.",
}

REPAIRS: Mapping[Kind, Repair] = {
    **dict.fromkeys(
        (
            _K.DEVICE_UNRECORDED,
            _K.DEVICE_VANISHED,
            _K.DEVICE_RETURNED,
            _K.PART_UNRECORDED,
            _K.PART_VANISHED,
            _K.PART_DIFFERS,
            _K.HANDLES_DIFFER,
            _K.DRAINED_LEFT,
        ),
        Repair.REPORT,
    ),
    **dict.fromkeys(
        (
            _K.PROVIDER_UNTRACKED,
            _K.PROVIDER_STALE,
            _K.PROVIDER_FAILING,
            _K.PROVIDER_MISSING,
            _K.PROVIDER_MISPLACED,
            _K.PROVIDER_OPEN,
            _K.PROVIDER_CLOSED,
            _K.INVENTORY_DIFFERS,
            _K.TRAITS_DIFFER,
        ),
        Repair.PUBLISH,
    ),
    _K.HANDLE_DIRTY: Repair.CLEAN,
}
"""The repair of each kind that always has the same one; some kinds have one now and then."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One disagreement. ``object`` names what it is about, ``explanation`` what each side says.

    ``provider`` and ``name`` are those of the resource provider concerned, ``instance`` is the
    consumer, and ``ids`` are the rows that the repair changes.
    """

    host: str
    kind: Kind
    object: str
    explanation: str
    repair: Repair | None = None
    provider: str | None = None
    name: str | None = None
    instance: str | None = None
    ids: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[Kind, str]:
        """Return by what a second look knows the disagreement again."""
        return self.kind, self.object

    def to_dict(self, *, repaired: bool = False, error: str | None = None) -> dict[str, Any]:
        """Return plain values for people; ``error`` is why the repair failed."""
        return {
            "host": self.host,
            "kind": str(self.kind),
            "object": self.object,
            "explanation": self.explanation,
            "advice": ADVICE[self.kind],
            "repair": None if self.repair is None else str(self.repair),
            "repaired": repaired,
            "error": error,
        }


def lasting(first: Collection[Finding], second: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the disagreements of a second look that the first had too, as they are now.

    What was on its way at the first look has arrived at the second; the rest is none of its
    business, for it looks at what disagreed alone.
    """
    known = {finding.key for finding in first}
    return tuple(finding for finding in second if finding.key in known)


if missing := set(Kind) - set(ADVICE):
    raise AssertionError(f"kinds of disagreement without an advice: {sorted(missing)}")
