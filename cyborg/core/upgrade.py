# SPDX-License-Identifier: Apache-2.0
"""Decisions of a rolling upgrade: which migrations may run, and which RPC versions to pin.

An expand migration only adds what daemons of the former release ignore. A contract migration
removes what they still use, so it runs when none of them is left.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cyborg.core.hosts import API, CONDUCTOR

# The key of a daemon's ``versions`` for the revision of the schema that its release knows.
SCHEMA = "schema"
# Daemons that use the database; an agent has no access to it.
DATABASE_USERS = frozenset({API, CONDUCTOR})


@dataclass(frozen=True, slots=True)
class Migration:
    """A migration; ``contracts``: daemons of an older release cannot use the database after it."""

    revision: str
    contracts: bool = False


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon that has sent a heartbeat, and the versions in it, None if it sent none."""

    binary: str
    host: str
    rpc: str | None = None
    schema: str | None = None

    def __str__(self) -> str:
        return f"{self.binary} of host {self.host}"


def split_contracts(
    missing: Sequence[Migration],
) -> tuple[Sequence[Migration], Sequence[Migration]]:
    """Divide migrations, oldest first, into those to run now and the last contract migrations.

    A contract migration before an expand migration is to run now: the later one builds on it.
    """
    count = len(missing)
    while count and missing[count - 1].contracts:
        count -= 1
    return missing[:count], missing[count:]


def find_blockers(daemons: Iterable[Daemon], supporting: Collection[str]) -> list[Daemon]:
    """Return the daemons that may still use what a contract migration removes.

    ``supporting`` are the revisions of the releases that do without it. A daemon that is down
    counts: it may start again.
    """
    return [
        daemon
        for daemon in daemons
        if daemon.binary in DATABASE_USERS and daemon.schema not in supporting
    ]


def parse_version(text: str) -> tuple[int, ...] | None:
    """Return a version such as 1.10 as numbers, None if it is none."""
    try:
        return tuple(int(part) for part in text.split("."))
    except ValueError:
        return None


def find_lowest(versions: Iterable[str | None]) -> str | None:
    """Return the lowest of RPC versions, None if none is known."""
    known = {parsed: text for text in versions if text and (parsed := parse_version(text))}
    return known[min(known)] if known else None


@dataclass(frozen=True, slots=True)
class PinProblem:
    """What an operator must know about a pin; ``is_failure``: calls fail until it is corrected."""

    text: str
    is_failure: bool = False


def check_pin(
    contract: str, release: str, pin: str | None, lowest: str | None
) -> PinProblem | None:
    """Compare a pin with the versions of the servers; return what is wrong with it.

    ``contract`` is conductor or agent, ``release`` the installed version of it, ``pin`` the value
    of [upgrade_levels], ``lowest`` the lowest version of a server, None if no server is known.
    """
    option = f"[upgrade_levels] {contract}"
    ours, pinned = parse_version(release), parse_version(pin or release)
    if ours is None or pinned is None or pinned[0] != ours[0]:
        return PinProblem(
            f"{option} is {pin}, but this release has version {release}: no daemon starts with "
            "another major version. Correct or remove it.",
            is_failure=True,
        )
    theirs = parse_version(lowest or release)
    # A server of another major version is a matter of the check of the daemons.
    if theirs is None or theirs[0] != ours[0]:
        return None
    if pin is None:
        if theirs >= ours:
            return None
        return PinProblem(
            f"A cyborg-{contract} serves version {lowest} only: set {option} = {lowest} for the "
            f"daemons of this release, which has version {release}, until all are upgraded. "
            "Without it, calls of new methods fail."
        )
    if pinned > theirs:
        return PinProblem(
            f"{option} is {pin}, but a cyborg-{contract} serves version {lowest} only: set it to "
            f"{lowest}.",
            is_failure=True,
        )
    if pinned < ours <= theirs and lowest is not None:
        return PinProblem(
            f"{option} is {pin}, but each cyborg-{contract} serves version {lowest}: remove it, "
            "and restart the daemons. Until then they do without what this release has added."
        )
    return None
