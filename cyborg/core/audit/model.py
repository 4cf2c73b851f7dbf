# SPDX-License-Identifier: Apache-2.0
"""Kinds of findings of an audit, each with advice and, if there is one, a safe repair.

An audit compares four sources: the hardware as the agent sees it, our database, Placement, and
Nova's instances. ``core.audit.compare`` has the comparison.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self


class State(StrEnum):
    """State of an audit."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"


OPEN = (State.PENDING, State.RUNNING)


class Source(StrEnum):
    """Sources that an audit compares."""

    HARDWARE = "hardware"
    DATABASE = "database"
    PLACEMENT = "placement"
    NOVA = "nova"


class Repair(StrEnum):
    """Repairs that an audit may do without an operator. No repair changes allocations or Nova."""

    REPORT = "report"  # have the host report again
    PUBLISH = "publish"  # have the publisher reconcile a provider
    DELETE_PROVIDER = "delete_provider"  # delete a provider of ours without allocations
    CLEAN = "clean"  # have the host clean a handle
    RECONCILE = "reconcile"  # suspect an ARQ: it is released after the grace period


_REPORT = "Request a new report of the host; if the finding persists, read the agent's log."
_PUBLISH = "The publisher repairs it; if the finding persists, read the conductor's log."


class Kind(StrEnum):
    """Kinds of findings, each with advice for the operator.

    ``repair`` is the repair of each finding of the kind. If it is None, a finding may have its own
    repair.
    """

    advice: str
    repair: Repair | None

    def __new__(cls, value: str, advice: str, repair: Repair | None = None) -> Self:
        """Return the member of a value."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.advice, member.repair = advice, repair
        return member

    AGENT_UNREACHABLE = (
        "agent_unreachable",
        "Check that cyborg-agent runs and reaches the message broker.",
    )
    BACKEND_UNAVAILABLE = (
        "backend_unavailable",
        "Read the agent's log: this backend cannot discover its devices.",
    )
    DEVICE_UNRECORDED = "device_unrecorded", _REPORT, Repair.REPORT
    DEVICE_VANISHED = "device_vanished", _REPORT, Repair.REPORT
    DEVICE_RETURNED = "device_returned", _REPORT, Repair.REPORT
    DEPLOYABLE_UNRECORDED = "deployable_unrecorded", _REPORT, Repair.REPORT
    DEPLOYABLE_VANISHED = "deployable_vanished", _REPORT, Repair.REPORT
    DEPLOYABLE_DIFFERS = "deployable_differs", _REPORT, Repair.REPORT
    HANDLES_DIFFER = "handles_differ", _REPORT, Repair.REPORT
    DRAINED_NOT_REMOVED = "drained_not_removed", _REPORT, Repair.REPORT
    HANDLE_DIRTY = (
        "handle_dirty",
        "Have the host clean it; it is not allocated before that.",
        Repair.CLEAN,
    )
    HANDLE_WRONG_OWNER = "handle_wrong_owner", "Delete the ARQ; this frees its handle."
    REQUEST_WITHOUT_HANDLE = "request_without_handle", "Delete the ARQ, or rebuild its server."
    REQUEST_MISPLACED = (
        "request_misplaced",
        "Migrate or rebuild the server: it has a device of another provider.",
    )
    NODE_MISSING = (
        "node_missing",
        "Start nova-compute, or set [agent] resource_provider to the provider's name.",
    )
    PROVIDER_UNTRACKED = "provider_untracked", _PUBLISH, Repair.PUBLISH
    PROVIDER_STALE = (
        "provider_stale",
        "Check that Placement answers and that a conductor runs.",
        Repair.PUBLISH,
    )
    PROVIDER_FAILING = (
        "provider_failing",
        "Fix the error that Placement reports; the publisher then retries.",
        Repair.PUBLISH,
    )
    PROVIDER_MISSING = "provider_missing", _PUBLISH, Repair.PUBLISH
    PROVIDER_MISPLACED = "provider_misplaced", _PUBLISH, Repair.PUBLISH
    PROVIDER_NOT_CORDONED = "provider_not_cordoned", _PUBLISH, Repair.PUBLISH
    PROVIDER_CORDONED = "provider_cordoned", _PUBLISH, Repair.PUBLISH
    INVENTORY_DIFFERS = "inventory_differs", _PUBLISH, Repair.PUBLISH
    TRAITS_DIFFER = "traits_differ", _PUBLISH, Repair.PUBLISH
    PROVIDER_LEFTOVER = "provider_leftover", "Delete it in Placement once it has no allocations."
    ALLOCATION_MISSING = (
        "allocation_missing",
        "If the server is there, shelve and unshelve it, which allocates again; "
        "if not, the ARQ is released after [conductor] orphan_grace.",
    )
    ALLOCATION_SHORT = (
        "allocation_short",
        "Shelve and unshelve the server, which allocates again.",
    )
    ALLOCATION_UNUSED = (
        "allocation_unused",
        "If no server or migration has this uuid, run 'nova-manage placement "
        "audit'; a server whose bind failed keeps its allocation until it is deleted.",
    )
    INSTANCE_GONE = "instance_gone", "Delete the ARQ if Nova lists the servers of the whole cloud."
    INSTANCE_ELSEWHERE = (
        "instance_elsewhere",
        "Hard reboot or rebuild the server; if it does not use the device, delete the ARQ.",
    )
    CUSTODY_BROKEN = (
        "custody_broken",
        "Find out who changed custody_records or custody_heads: compare them with a backup.",
    )
    CUSTODY_UNSEALED = (
        "custody_unsealed",
        "Check that a conductor runs, and read its log for errors about custody records.",
    )
    NOVA_UNAVAILABLE = (
        "nova_unavailable",
        "Check that Nova answers and the user of [nova] may list all servers.",
    )
    TOO_MANY = "too_many", "Repair the reported findings, then audit each host again."


@dataclass(frozen=True, slots=True)
class Finding:
    """One disagreement of the sources about an object; ``explanation`` has the text of each source.

    ``provider`` and ``name`` are uuid and name of the resource provider concerned, ``instance`` is
    the consumer, and ``ids`` are the ids of the rows that the repair changes.
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
        """Return the key of the finding, by which a second comparison confirms it."""
        return self.kind, self.object

    def to_dict(self, *, repaired: bool = False, error: str | None = None) -> dict[str, Any]:
        """Return plain values for display; ``error`` is the reason why the repair failed."""
        return {
            "host": self.host,
            "kind": str(self.kind),
            "object": self.object,
            "explanation": self.explanation,
            "advice": self.kind.advice,
            "repair": None if self.repair is None else str(self.repair),
            "repaired": repaired,
            "error": error,
        }


def confirmed(first: Collection[Finding], second: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings of the second comparison whose keys the first comparison also has.

    Changes that were in progress at the first comparison are complete at the second. New findings
    of the second comparison are dropped, because it reads only the objects of the first findings.
    """
    keys = {finding.key for finding in first}
    return tuple(finding for finding in second if finding.key in keys)
