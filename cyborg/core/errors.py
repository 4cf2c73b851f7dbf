# SPDX-License-Identifier: Apache-2.0
"""Kinds of errors that this service reports to its callers.

::

    CyborgError                     internal
    +-- Invalid                     invalid          the request is malformed
    +-- NotFound                    not_found        no such object
    +-- Forbidden                   forbidden        the caller may not
    |   +-- ServiceTokenRequired    service_token    ... without a service token
    |   +-- OverLimit               over_limit       ... create more objects of this kind
    +-- Conflict                    conflict         a name or state already taken
    |   +-- InUse                   in_use           something depends on the object
    |   +-- WrongState              wrong_state      the object's state forbids it
    |   +-- NoHandle                no_handle        no free attach handle fits
    |   +-- Unresolved              unresolved       not decided yet, retry later
    +-- Stale                       stale            a message of an earlier epoch or generation
    +-- Unavailable                 unavailable      another service does not answer
    |   +-- TimedOut                timed_out        ... within its timeout
    +-- DriverFailed                driver_failed    a driver raised, hung or gave impossible values
    +-- Misconfigured               misconfigured    an option's value is not usable

A kind has a stable ``code``, a message for people and ``details`` for machines. The codes are sent
over the bus and are part of the internal contract. ``cyborg.api.faults`` maps them to HTTP status
codes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")

# A detail of Unavailable: a server that stops has carried out nothing, and another one can. Not a
# kind: a peer of an earlier release would take an unknown code for an internal error.
STOPPING = "stopping"


class CyborgError(Exception):
    """Base class of all kinds of errors; by itself, an unexpected failure."""

    # Not the name of the class, which may change: peers of other releases read the code.
    code: ClassVar[str] = "internal"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = details

    def to_wire(self) -> dict[str, Any]:
        """Return the error as plain values, for the bus."""
        return {"code": self.code, "message": self.message, "details": self.details}


class Invalid(CyborgError):
    """The request is malformed; ``details['field']`` names the invalid field."""

    code = "invalid"


class NotFound(CyborgError):
    """The object does not exist, or the caller may not see it."""

    code = "not_found"


class Forbidden(CyborgError):
    """The caller is authenticated and not allowed to do this."""

    code = "forbidden"


class ServiceTokenRequired(Forbidden):
    """The request lacks a service token: only a service such as Nova may do this."""

    code = "service_token"


class OverLimit(Forbidden):
    """A project has reached its limit; ``details`` has ``limit`` and ``used``."""

    code = "over_limit"


class Conflict(CyborgError):
    """The request is well formed but conflicts with the current state."""

    code = "conflict"


class InUse(Conflict):
    """The object cannot be deleted while others depend on it."""

    code = "in_use"


class WrongState(Conflict):
    """The state of the object does not allow the operation."""

    code = "wrong_state"


class NoHandle(Conflict):
    """No free attach handle fits the request; ``details['reasons']`` has the reasons by ARQ."""

    code = "no_handle"


class Unresolved(Conflict):
    """The result is not known yet; the caller must repeat the request later."""

    code = "unresolved"


class Stale(CyborgError):
    """A host sent a message of an earlier epoch or generation than its current one."""

    code = "stale"


class Unavailable(CyborgError):
    """Another service (database, broker, Placement, Nova, an agent) is unavailable."""

    code = "unavailable"


class TimedOut(Unavailable):
    """Another service did not answer within its timeout."""

    code = "timed_out"


class DriverFailed(CyborgError):
    """A driver raised, hung or reported impossible values."""

    code = "driver_failed"


class Misconfigured(CyborgError):
    """An option has an invalid value; the message has the option, the value and valid values."""

    code = "misconfigured"


def is_expected(exc: BaseException) -> bool:
    """Return whether an exception is of a subclass of CyborgError, so not a programming error."""
    # The base class is raised for what must not happen, such as a result that JSON cannot encode.
    return isinstance(exc, CyborgError) and type(exc) is not CyborgError


def attempt(call: Callable[[], T]) -> T | CyborgError:
    """Return the result of a call, or the error of this service that it raised."""
    try:
        return call()
    except CyborgError as exc:
        return exc


def _kinds(kind: type[CyborgError]) -> Iterator[type[CyborgError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)


# From the classes themselves, so that a new kind cannot be forgotten.
KINDS: Mapping[str, type[CyborgError]] = {kind.code: kind for kind in _kinds(CyborgError)}


def from_wire(body: Mapping[str, Any]) -> CyborgError:
    """Return the error that ``to_wire`` converted; an unknown code becomes a CyborgError."""
    # A peer of a newer release may send a code that this one does not know.
    kind = KINDS.get(str(body.get("code")), CyborgError)
    details = body.get("details")
    fields = {str(k): v for k, v in details.items()} if isinstance(details, Mapping) else {}
    error = kind(str(body.get("message", "no message")))
    error.details = fields
    return error
