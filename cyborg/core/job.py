# SPDX-License-Identifier: Apache-2.0
"""Host work that takes time: what an agent is asked to do, and what follows from its answer.

A job is a row of the database before an agent hears of it. The conductor that leases the row asks
the agent, again and again if need be, until the agent has told how it ended; the agent keeps a
check-point of each job (started, completed, failed), so that asking twice does the work once.

====================  ==========================  =============================================
kind                  given up (deadline, fault)  cancelled (the request is unbound or deleted)
====================  ==========================  =============================================
prepare               requests BindFailed, a      the agent refuses the job if it has not begun;
                      release job undoes it       a release job undoes what it did
release               never: tried again, ever    cannot be; a handle is dirty until it is done
                      more seldom
program               the deployable is open      cannot be
                      again, its bitstream
                      unknown
====================  ==========================  =============================================
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from cyborg.core.errors import Invalid
from cyborg.core.plain import string, strings
from cyborg.core.request import parse_uuid

MAX_ITEMS = 1024  # as many as requests in one PATCH
MAX_ERROR = 1000  # characters of a driver's words that are kept


class JobKind(StrEnum):
    """What is done on the host."""

    PREPARE = "prepare"  # make handles ready for an instance
    RELEASE = "release"  # take that back and clean up
    PROGRAM = "program"  # load an image into a deployable


class JobState(StrEnum):
    """How far a job is; open ones are leased again and again until they end."""

    OPEN = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Heard(StrEnum):
    """What an agent says of a job."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Verdict(StrEnum):
    """What the conductor does about a job."""

    FINISH = "finish"
    UNDO = "undo"
    WAIT = "wait"
    RETRY = "retry"


def decide(kind: JobKind, heard: Heard | None, *, overdue: bool) -> Verdict:
    """Return what follows from the agent's word; None when it could not be asked.

    ``overdue`` tells that the job's deadline has passed. Work that ended well is never undone,
    however late it is heard of.
    """
    if heard is Heard.DONE:
        return Verdict.FINISH
    if kind is JobKind.RELEASE:
        return Verdict.WAIT if heard is Heard.RUNNING else Verdict.RETRY
    if heard is Heard.FAILED or overdue:
        return Verdict.UNDO
    return Verdict.WAIT if heard is Heard.RUNNING else Verdict.RETRY


@dataclass(frozen=True, slots=True)
class Item:
    """One attach handle that is prepared or released, named as its driver reported it.

    ``backend`` is the configured driver; ``device``, ``deployable`` and ``handle`` are addresses,
    the last empty for work on the whole deployable. ``accel`` holds the ``accel:`` keys of the
    profile's group, without the prefix.
    """

    backend: str
    device: str
    deployable: str
    handle: str = ""
    accel: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "backend": self.backend,
            "device": self.device,
            "deployable": self.deployable,
            "handle": self.handle,
            "accel": dict(self.accel),
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        """Read plain values. Raises KeyError or TypeError."""
        return cls(
            backend=string(body["backend"]),
            device=string(body["device"]),
            deployable=string(body["deployable"]),
            handle=string(body.get("handle", "")),
            accel=strings(body.get("accel", {})),
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What an agent is asked to do: all items or none.

    ``image`` is the uuid of the image to program. ``instance`` is for the log and the driver.
    ``cancels`` names jobs that must not begin any more, should their message come later.
    ``seconds`` is the time that the whole may take on the host.
    """

    job: str
    kind: JobKind
    items: tuple[Item, ...]
    seconds: float
    instance: str | None = None
    image: str | None = None
    cancels: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without the job's uuid, kind and time: those stand in its row."""
        return {
            "items": [item.to_dict() for item in self.items],
            "instance": self.instance,
            "image": self.image,
            "cancels": list(self.cancels),
        }


def load_work(job: Any, kind: Any, arguments: Any, seconds: Any) -> Work:
    """Read a job as it travels over the bus. Raises Invalid."""
    uuid = parse_uuid(job, "job")
    try:
        items = tuple(Item.from_dict(item) for item in arguments["items"])
        work = Work(
            job=uuid,
            kind=JobKind(kind),
            items=items,
            seconds=float(seconds),
            instance=_optional(arguments.get("instance")),
            image=_optional(arguments.get("image")),
            cancels=tuple(parse_uuid(one, "cancels") for one in arguments.get("cancels", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as bad:
        raise Invalid(f"malformed job: {type(bad).__name__} {bad}", field="arguments") from bad
    if not 1 <= len(items) <= MAX_ITEMS:
        raise Invalid(f"a job of {len(items)} items: expected 1 to {MAX_ITEMS}", field="items")
    if not 0 < work.seconds < 86400:
        raise Invalid(f"a job of {work.seconds:g} s: expected up to a day", field="seconds")
    if (work.kind is JobKind.PROGRAM) != (work.image is not None):
        raise Invalid("a program job has an image and no other has one", field="image")
    return work


def _optional(value: Any) -> str | None:
    return None if value is None else string(value)
