# SPDX-License-Identifier: Apache-2.0
"""How a host comes from the backends that it has to those that are wanted of it.

What is wanted and cannot be done leaves a backend as it was, so a host remembers two things of
each: what was wanted last, and what it follows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cyborg.core import option, wanted
from cyborg.core.option import LISTS, Option
from cyborg.core.plain import string
from cyborg.core.wanted import Wanted, WantedHost, Wish


@dataclass(frozen=True, slots=True)
class Held:
    """What a host remembers of one backend.

    ``wanted`` is what was wanted last, ``error`` why that could not be done. ``applied`` is what
    the backend follows: the same, or after a failure what it followed before; None stands for the
    configuration file.
    """

    wanted: Wanted
    error: str | None
    applied: Wanted | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "wanted": self.wanted.to_dict(),
            "error": self.error,
            "applied": None if self.applied is None else self.applied.to_dict(),
        }


class Act(StrEnum):
    """What is to be done about a backend."""

    START = "start"
    REPLACE = "replace"  # by one that is built anew; the old one goes on until that works
    STOP = "stop"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Move:
    """One backend, what is to be done about it, and to what end.

    ``wanted`` is None for one that is to be again as the configuration file has it.
    """

    act: Act
    backend: str
    wanted: Wanted | None


def load(body: Mapping[str, Any]) -> Held:
    """Read plain values. Raises KeyError, TypeError or ValueError."""
    error, applied = body["error"], body["applied"]
    return Held(
        wanted=wanted.load(body["wanted"]),
        error=None if error is None else string(error),
        applied=None if applied is None else wanted.load(applied),
    )


def difference(
    held: Mapping[str, Held], host: WantedHost, configured: Collection[str]
) -> tuple[Move, ...]:
    """Return what is to be done about each backend that is wanted, or was.

    ``configured`` are the backends of the configuration file: those that nothing is wanted of are
    as that says. What ends comes last.
    """
    moves = [
        Move(_act(held.get(one.backend), one, configured), one.backend, one)
        for one in host.backends
    ]
    named = {one.backend for one in host.backends}
    moves += [
        Move(_back(one, configured), backend, None)
        for backend, one in held.items()
        if backend not in named
    ]
    return tuple(sorted(moves, key=lambda move: move.act is Act.STOP))


def after(move: Move, held: Held | None, error: str | None) -> Held | None:
    """Return what is remembered of a backend after a move; ``error`` says why it could not be.

    None is nothing: then it is as the configuration file has it.
    """
    if move.wanted is None:
        # Nobody waits for word of it: what it follows must not be forgotten before it is over.
        return None if error is None else held
    if held is not None and _done(held, move.wanted):
        return held
    if error is None:
        return Held(move.wanted, None, move.wanted)
    return Held(move.wanted, error, None if held is None else held.applied)


def effective(
    options: Sequence[Option], section: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the value of each option: its default, over it the file's, over that what is wanted.

    Raises Invalid for what no option has.
    """
    defaults = {o.name: list(o.default) if o.kind in LISTS else o.default for o in options}
    return {**defaults, **section, **option.parse_all(options, config)}


def _act(held: Held | None, one: Wanted, configured: Collection[str]) -> Act:
    if held is not None and _done(held, one):
        return Act.KEEP
    applied = None if held is None else held.applied
    runs = _runs(one.backend, applied, configured)
    if one.wish is Wish.ABSENT:
        return Act.STOP if runs else Act.KEEP
    if not runs:
        return Act.START
    # The same once more is a wish to have it built anew, unless it only takes back what failed.
    if held is not None and applied is not None and _same(applied, one):
        failed = held.error is not None and not _same(held.wanted, one)
        return Act.KEEP if failed or applied.wish is not one.wish else Act.REPLACE
    return Act.REPLACE


def _back(held: Held, configured: Collection[str]) -> Act:
    backend, applied = held.wanted.backend, held.applied
    if applied is None:
        return Act.KEEP
    if backend not in configured:
        return Act.STOP if _runs(backend, applied, configured) else Act.KEEP
    return Act.REPLACE if _runs(backend, applied, configured) else Act.START


def _done(held: Held, one: Wanted) -> bool:
    """Tell whether a wish was tried already.

    The revision alone does not say so: a database that was restored counts on from an older one.
    """
    return held.wanted.revision == one.revision and _same(held.wanted, one)


def _runs(backend: str, applied: Wanted | None, configured: Collection[str]) -> bool:
    return backend in configured if applied is None else applied.wish is not Wish.ABSENT


def _same(one: Wanted, other: Wanted) -> bool:
    """Tell whether two wishes lead to the same running backend."""
    absent = [wish is Wish.ABSENT for wish in (one.wish, other.wish)]
    return absent[0] is absent[1] and one.driver == other.driver and one.config == other.config
