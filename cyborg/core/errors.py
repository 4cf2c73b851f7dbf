# SPDX-License-Identifier: Apache-2.0
"""Every kind of failure this service tells anyone about.

::

    CyborgError                     internal
    +-- Invalid                     invalid          the caller's words are wrong
    +-- NotFound                    not_found        no such object
    +-- Forbidden                   forbidden        the caller may not
    |   +-- ServiceTokenRequired    service_token    ... without a service token
    +-- Conflict                    conflict         a name or state already taken
    |   +-- InUse                   in_use           something depends on the object
    |   +-- WrongState              wrong_state      the object's state forbids it
    |   +-- NoHandle                no_handle        no free attach handle fits
    |   +-- Unresolved              unresolved       not decided yet, ask again
    +-- Stale                       stale            a report from an epoch that is over
    +-- Unavailable                 unavailable      a neighbour does not answer
    |   +-- TimedOut                timed_out        ... in the time it was given
    +-- DriverFailed                driver_failed    a driver raised, lied or hung
    +-- Misconfigured               misconfigured    an option's value is not usable

A kind has a stable ``code``, a message for people and ``details`` for machines. The codes travel
over the bus and are part of the internal contract; HTTP statuses are chosen in
``cyborg.api.faults`` alone.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar


class CyborgError(Exception):
    """The root: something failed and nobody foresaw how."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details

    def to_wire(self) -> dict[str, Any]:
        """Return the error as plain values, as it travels over the bus."""
        return {"code": self.code, "message": self.message, "details": self.details}


class Invalid(CyborgError):
    """The request is malformed; ``details['field']`` names the part that is wrong."""

    code = "invalid"


class NotFound(CyborgError):
    """There is no such object, or not for this caller."""

    code = "not_found"


class Forbidden(CyborgError):
    """The caller is known and may not do this."""

    code = "forbidden"


class ServiceTokenRequired(Forbidden):
    """Only a service, such as Nova, may do this: the request lacks a service token."""

    code = "service_token"


class Conflict(CyborgError):
    """The request is well formed but the state of things contradicts it."""

    code = "conflict"


class InUse(Conflict):
    """The object cannot go while others depend on it."""

    code = "in_use"


class WrongState(Conflict):
    """The transition table of ``core.states`` has no such step from where the object is."""

    code = "wrong_state"


class NoHandle(Conflict):
    """No free attach handle serves the request; ``details['reasons']`` says why, one by one."""

    code = "no_handle"


class Unresolved(Conflict):
    """The answer is not known yet; the same question later gets it."""

    code = "unresolved"


class Stale(CyborgError):
    """A host's message comes from an epoch or generation that has been superseded."""

    code = "stale"


class Unavailable(CyborgError):
    """A neighbour (database, broker, Placement, Nova, an agent) is away."""

    code = "unavailable"


class TimedOut(Unavailable):
    """A neighbour did not answer in the time it was given."""

    code = "timed_out"


class DriverFailed(CyborgError):
    """A driver raised, hung or reported what cannot be."""

    code = "driver_failed"


class Misconfigured(CyborgError):
    """An option holds what it cannot; the message says which, what was found, what is expected."""

    code = "misconfigured"


def _kinds(kind: type[CyborgError]) -> Iterator[type[CyborgError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)


KINDS: Mapping[str, type[CyborgError]] = {kind.code: kind for kind in _kinds(CyborgError)}


def from_wire(body: Mapping[str, Any]) -> CyborgError:
    """Rebuild an error that ``to_wire`` described; an unknown code becomes the root kind."""
    kind = KINDS.get(str(body.get("code")), CyborgError)
    details = body.get("details")
    fields = {str(k): v for k, v in details.items()} if isinstance(details, Mapping) else {}
    error = kind(str(body.get("message", "no message")))
    error.details = fields
    return error
