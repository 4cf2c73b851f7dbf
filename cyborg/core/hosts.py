# SPDX-License-Identifier: Apache-2.0
"""Hosts: their names in Nova, the instances on them, and the liveness of their services.

The names lead to the compute node of a host, the parent of our providers. The liveness says when a
conductor declares a service down.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from cyborg.core.codec import Serializable
from cyborg.core.errors import Invalid
from cyborg.core.validation import check_text, parse_uuid

MAX_NAMES = 16
MAX_NAME = 255
# Names that closest_names compares: each costs some microseconds.
MAX_COMPARED = 2000


@dataclass(frozen=True, slots=True)
class Identity(Serializable):
    """Identity of a host's compute node, as the agent knows it.

    ``provider`` is the configured name or uuid of a resource provider. ``compute_id`` is the
    provider's uuid from nova-compute's file ``compute_id``. ``names`` are the other names that the
    system has for the host.
    """

    provider: str | None = None
    compute_id: str | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.compute_id is not None:
            object.__setattr__(self, "compute_id", parse_uuid(self.compute_id, "compute_id"))
        if len(self.names) > MAX_NAMES:
            raise Invalid(
                f"the host has {len(self.names)} names, at most {MAX_NAMES} are allowed",
                field="identity",
            )
        for name in [*self.names, *([] if self.provider is None else [self.provider])]:
            check_text("identity", name, MAX_NAME, subject="host name")


NO_IDENTITY = Identity()


def name_variants(names: Iterable[str]) -> tuple[str, ...]:
    """Return the ways in which Nova may write these names of a host, case-folded.

    The full names come first, then the names without their domains. An IP address has no domain to
    remove. ``localhost`` is left out: every host has that name.
    """
    full = [name.casefold() for name in names]
    # Full names first: a short name may be that of hosts in several domains.
    variants = [name for name in [*full, *map(_short, full)] if not _is_localhost(name)]
    return tuple(dict.fromkeys(variants))


def matching_nodes(names: Sequence[str], nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the sorted names of compute nodes that may belong to the host with these ``names``.

    A node name with a domain matches a short name of the host, unless the host also has that short
    name with another domain. More than one result is ambiguous.
    """
    variants = name_variants(names)
    # A host that knows its domain does not match a node of another domain by the short name.
    with_domain = {_short(name) for name in variants if _short(name) != name}
    # Short names of which no domain is known.
    bare = {name for name in variants if _short(name) == name and name not in with_domain}
    return tuple(
        sorted(
            node
            for node in set(nodes)
            if (folded := node.casefold()) in variants or _short(folded) in bare
        )
    )


def closest_names(name: str, nodes: Iterable[str], max_names: int = 3) -> tuple[str, ...]:
    """Return up to ``max_names`` node names that are similar to ``name``, best first.

    Only the first MAX_COMPARED nodes are compared.
    """
    folded = {node.casefold(): node for node in sorted(nodes)[:MAX_COMPARED]}
    return tuple(folded[n] for n in difflib.get_close_matches(name.casefold(), folded, max_names))


def _short(name: str) -> str:
    first, dot, _ = name.partition(".")
    is_address = name.replace(".", "").isdecimal() or ":" in name
    # The part of an address before its first dot names nothing.
    return first if dot and first and not is_address else name


def _is_localhost(name: str) -> bool:
    return _short(name) in ("localhost", "localhost4", "localhost6", "ip6-localhost")


_BUSY = frozenset({"BUILD", "MIGRATING", "REBUILD", "RESIZE", "REVERT_RESIZE", "VERIFY_RESIZE"})


_DELETED = frozenset({"DELETED"})


@dataclass(frozen=True, slots=True)
class Instance:
    """A server as Nova shows it.

    ``host`` and ``node`` are None for a server without a host. ``host_visible`` is False if Nova
    does not show hosts to our user. ``task`` is Nova's task state.
    """

    uuid: str
    status: str
    host: str | None = None
    node: str | None = None
    task: str | None = None
    host_visible: bool = True

    @property
    def busy(self) -> bool:
        """Return whether Nova is creating, moving or deleting the server."""
        return self.task is not None or self.status in _BUSY

    @property
    def deleted(self) -> bool:
        """Return whether the server is deleted."""
        return self.status in _DELETED

    @property
    def offloaded(self) -> bool:
        """Return whether the server is shelved, on no host, and not being unshelved."""
        return self.status == "SHELVED_OFFLOADED" and self.task is None and self.host is None

    def is_on(self, hostname: str) -> bool:
        """Return whether the server is on a host; the case of the name does not matter."""
        # Nova has two names of a host, and they may differ from ours in case.
        names = {name.casefold() for name in (self.host, self.node) if name}
        return hostname.casefold() in names


AGENT = "cyborg-agent"
CONDUCTOR = "cyborg-conductor"
API = "cyborg-api"


class ServiceStatus(StrEnum):
    """Status that a daemon reports with its heartbeat."""

    READY = "READY"
    DEGRADED = "DEGRADED"  # a loop is stuck


# Key of the versions in an agent's heartbeat: whether it attaches devices to running guests.
LIVE_ATTACH = "live_attach"

# Key of the versions in an agent's heartbeat: whether it sends its epoch with each result.
RESULT_EPOCHS = "result_epochs"


def is_current_epoch(epoch: str | None, current: str | None, versions: Mapping[str, Any]) -> bool:
    """Return whether a result with ``epoch`` is from the current agent of its host.

    ``current`` and ``versions`` are those of the last heartbeat of the agent. A result without an
    epoch (None) is accepted unless this heartbeat was from an agent that sends epochs.
    """
    return versions.get(RESULT_EPOCHS) is not True if epoch is None else epoch == current


def has_rebooted(previous: str | None, current: str | None) -> bool:
    """Return whether two boot ids of a host are of different boots; False if one is unknown."""
    return None not in (previous, current) and previous != current


# CPU seconds that a conductor needs for a heartbeat without changes.
#
# ``tools/bench agents`` measures it. Alternative not taken: each conductor measures its own cost. A
# process cannot tell the threads of the message bus that serve heartbeats from those that serve
# other calls, and an interval that follows the load of the moment changes with every heartbeat.
HEARTBEAT_COST = 0.003

# Cores of a conductor process that heartbeats may use.
MAX_CORES = 0.5


def choose_interval(agents: int, processes: int, minimum: float, maximum: float) -> float:
    """Return the seconds between two heartbeats of an agent.

    ``agents`` is the number of agents that are up, ``processes`` that of conductor processes. The
    interval is the shortest one with which the heartbeats use MAX_CORES of each process, within
    ``minimum`` and ``maximum``. ``minimum`` takes precedence if it is the larger one.
    """
    # At least one process: a conductor that has just started has not counted itself yet.
    needed = agents * HEARTBEAT_COST / (max(1, processes) * MAX_CORES)
    return max(minimum, min(needed, maximum))


# Without a time zone, as the times of the database are.
_START = datetime(1970, 1, 1)


class Liveness(StrEnum):
    """Liveness of a service by its last heartbeat: ``state`` in the listing of services."""

    UP = "up"
    LATE = "late"
    DOWN = "down"


def heartbeat_timeout(interval_seconds: float, missed: int) -> timedelta:
    """Return how long after the last heartbeat the number of missed heartbeats reaches ``missed``.

    This is ``(missed + 1) * interval_seconds``: a heartbeat is missed one interval after it was
    due.
    """
    return timedelta(seconds=interval_seconds) * (missed + 1)


def evaluate(late_at: datetime, down_at: datetime, now: datetime) -> Liveness:
    """Return the liveness of a service with these deadlines."""
    if now >= down_at:
        return Liveness.DOWN
    return Liveness.LATE if now >= late_at else Liveness.UP


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Period in which one conductor received its own heartbeats over the bus without a gap.

    ``since`` and ``last`` are the first and the last of these heartbeats, in seconds of the
    monotonic clock. ``clock_offset`` is the offset at the last heartbeat.
    """

    since: float
    last: float
    clock_offset: float


def clock_offset(clock: float, now: datetime) -> float:
    """Return by how many seconds the wall clock (naive UTC) is ahead of the monotonic clock."""
    return (now - _START).total_seconds() - clock


def record(
    previous: SelfCheck | None, clock: float, now: datetime, max_gap: float, max_step: float
) -> SelfCheck:
    """Return the self-check after one more own heartbeat was received.

    The period starts again after more than ``max_gap`` seconds without a heartbeat, or after a
    step of the wall clock by more than ``max_step`` seconds.
    """
    offset = clock_offset(clock, now)
    if previous is None or not _is_continuous(previous, clock, offset, max_gap, max_step):
        return SelfCheck(since=clock, last=clock, clock_offset=offset)
    return SelfCheck(since=previous.since, last=clock, clock_offset=offset)


def observed_seconds(
    check: SelfCheck | None, clock: float, now: datetime, max_gap: float, max_step: float
) -> float:
    """Return for how many seconds this conductor has received its own heartbeats without a gap.

    In this time it would also have received the heartbeats of other services. It may declare a
    service down if the time is as long as the deadline of that service, and a time to reconnect.
    """
    if check is None:
        return 0.0
    if not _is_continuous(check, clock, clock_offset(clock, now), max_gap, max_step):
        return 0.0
    return check.last - check.since


def _is_continuous(
    check: SelfCheck, clock: float, offset: float, max_gap: float, max_step: float
) -> bool:
    return clock - check.last <= max_gap and abs(offset - check.clock_offset) <= max_step
