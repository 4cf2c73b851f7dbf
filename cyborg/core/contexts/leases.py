# SPDX-License-Identifier: Apache-2.0
"""Leases of device contexts: the bodies of pre_bind and bind, and their effect in each state.

A lease has an end and an epoch, the fencing token: the epoch of a context rises with each lease,
and with each bind without a lease. The holder of an earlier epoch can neither renew, bind nor
unbind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from typing import Any

from cyborg.core.binding.request_groups import make_group_name, parse_mappings
from cyborg.core.contexts.states import LEASED, OWNING, USABLE, ContextState
from cyborg.core.errors import Conflict, CyborgError, Invalid, WrongState
from cyborg.core.text import describe, join_limited
from cyborg.core.validation import check_integer, check_text, parse_uuid

RESERVE_FIELDS = ("hostname", "mappings", "lease_seconds", "epoch")
BIND_FIELDS = ("hostname", "instance_uuid", "mappings", "epoch")
UNBIND_FIELDS = ("epoch", "instance_uuid")


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """Request of pre_bind; ``providers`` has the provider of each group, by its number.

    With ``epoch``, the lease of this epoch is renewed.
    """

    hostname: str
    providers: tuple[str, ...]
    seconds: int
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class ContextBindRequest:
    """Request of bind; ``providers`` is None if the lease has them."""

    hostname: str
    instance: str
    providers: tuple[str, ...] | None = None
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class UnbindRequest:
    """Request of unbind: which use of the context is to end."""

    epoch: int | None = None
    instance: str | None = None


@dataclass(frozen=True, slots=True)
class ContextFacts:
    """Facts about a context that decide a request.

    ``providers`` are the providers of its ARQs, by group number. If the context owns no handles,
    ``hostname`` and ``providers`` are None or outdated.
    """

    uuid: str
    state: str
    epoch: int
    hostname: str | None = None
    instance: str | None = None
    expires_at: datetime | None = None
    providers: tuple[str | None, ...] = ()


class Decision(Enum):
    """Effect of a request."""

    RESERVE = auto()  # start the next lease
    RENEW = auto()  # postpone the end of the lease
    BIND = auto()  # bind without a lease
    CONSUME = auto()  # bind the handles of the lease
    UNCHANGED = auto()  # an earlier, equal request was successful


def parse_reserve(body: Any, num_groups: int, default_seconds: int, limit: int) -> ReserveRequest:
    """Parse the body of pre_bind for a context of ``num_groups`` groups.

    ``limit`` is the maximum of ``lease_seconds``. Raise Invalid with the field.
    """
    values = _check_body(body, RESERVE_FIELDS)
    seconds = values.get("lease_seconds", min(default_seconds, limit))
    if check_integer("lease_seconds", seconds, limit) < 1:
        raise Invalid(
            f"lease_seconds: 0, expected an integer from 1 to {limit}", field="lease_seconds"
        )
    return ReserveRequest(
        check_text("hostname", values.get("hostname")),
        _parse_providers(values.get("mappings"), num_groups),
        seconds,
        _parse_epoch(values),
    )


def parse_bind(body: Any, num_groups: int) -> ContextBindRequest:
    """Parse the body of bind for a context of ``num_groups`` groups. Raise Invalid."""
    values = _check_body(body, BIND_FIELDS)
    has_mappings = "mappings" in values
    return ContextBindRequest(
        check_text("hostname", values.get("hostname")),
        parse_uuid(values.get("instance_uuid"), "instance_uuid"),
        _parse_providers(values["mappings"], num_groups) if has_mappings else None,
        _parse_epoch(values),
    )


def parse_unbind(body: Any) -> UnbindRequest:
    """Parse the body of unbind. Raise Invalid."""
    values = _check_body(body, UNBIND_FIELDS)
    instance = values.get("instance_uuid")
    return UnbindRequest(
        _parse_epoch(values),
        None if instance is None else parse_uuid(instance, "instance_uuid"),
    )


def check_hosts(hostname: str, providers: Sequence[str], hosts: Mapping[str, str]) -> None:
    """Raise Invalid unless each provider is a device of the host.

    ``hosts`` has the host of each of the providers that this service has.
    """
    for number, provider in enumerate(providers):
        field = f"mappings['{make_group_name(number)}']"
        if provider not in hosts:
            raise Invalid(
                f"{field}: resource provider {provider} is no device of this service; GET "
                "/v2/deployables lists the known ones",
                field=field,
            )
        if hosts[provider] != hostname:
            raise Invalid(
                f"{field}: resource provider {provider} is on host {hosts[provider]}, not on "
                f"{hostname}",
                field=field,
            )


def decide_reserve(context: ContextFacts, request: ReserveRequest, now: datetime) -> Decision:
    """Return RESERVE or RENEW. Raise Conflict, WrongState."""
    if context.state not in LEASED:
        _check_unused(context, request.epoch, "reserve")
        return Decision.RESERVE
    if request.epoch is None:
        raise _wrong_state(
            context,
            f"device context {context.uuid} is {context.state} on host {context.hostname} "
            f"until {context.expires_at} UTC with epoch {context.epoch}: give this epoch to "
            "renew the lease, or unbind the context",
        )
    _check_holder(context, request, request.epoch, now)
    return Decision.RENEW


def decide_bind(context: ContextFacts, request: ContextBindRequest, now: datetime) -> Decision:
    """Return BIND, CONSUME or UNCHANGED. Raise Invalid, Conflict, WrongState."""
    # A repeated call, whose first answer was lost, must succeed.
    if context.state in (ContextState.BOUND, ContextState.BINDING):
        if (
            (request.instance, request.hostname) != (context.instance, context.hostname)
            or request.epoch not in (None, context.epoch)
            or request.providers not in (None, context.providers)
        ):
            raise _in_use(context, "bind")
        return Decision.UNCHANGED
    if context.state in LEASED:
        # Without its epoch, a former holder of a lease could take the lease of the next one.
        if request.epoch is None:
            raise _wrong_state(
                context,
                f"epoch: missing; device context {context.uuid} has a lease, which can be bound "
                "only with its epoch",
                field="epoch",
            )
        _check_holder(context, request, request.epoch, now)
        return Decision.CONSUME
    _check_unused(context, request.epoch, "bind")
    if request.providers is None:
        raise Invalid(
            f"mappings: missing; device context {context.uuid} has no lease, so the resource "
            "provider of each group must be given",
            field="mappings",
        )
    return Decision.BIND


def check_unbind(context: ContextFacts, request: UnbindRequest, *, elevated: bool) -> None:
    """Raise Conflict or WrongState unless the request names the present use of the context.

    ``elevated`` callers need not name it. If the context owns no handles, do nothing.
    """
    if context.state not in OWNING:
        return
    # Also for elevated callers: a late call must not end a use that it does not know.
    if request.epoch not in (None, context.epoch):
        raise _not_in_use_by(context, f"epoch {request.epoch}", "epoch")
    if request.instance not in (None, context.instance):
        raise _not_in_use_by(context, f"instance {request.instance}", "instance_uuid")
    if elevated or request.epoch is not None:
        return
    if context.state in LEASED:
        raise _wrong_state(
            context,
            f"epoch: missing; device context {context.uuid} is {context.state} with epoch "
            f"{context.epoch}: give this epoch if the lease is yours",
            field="epoch",
        )
    if request.instance is None:
        raise _wrong_state(
            context,
            f"instance_uuid: missing; device context {context.uuid} is {context.state} for "
            f"instance {context.instance} with epoch {context.epoch}: give the instance or the "
            "epoch that you want to unbind",
            field="instance_uuid",
        )


def _not_in_use_by(context: ContextFacts, given: str, field: str) -> Conflict:
    return Conflict(
        f"{field}: device context {context.uuid} is {context.state} for "
        f"{'instance ' + context.instance if context.instance else 'a lease'} with epoch "
        f"{context.epoch}, not for {given}: another use of the context began, do not unbind it",
        device_context=context.uuid,
        field=field,
        epoch=context.epoch,
    )


def stale_lease(uuid: str, state: str, epoch: int, *, given: int | None) -> CyborgError:
    """Return the error for a lease that has ended or has another epoch than ``given``."""
    context = ContextFacts(uuid, state, epoch)
    if given is not None and given != epoch:
        return _stale(context, given)
    return _wrong_state(
        context,
        f"the lease of device context {uuid} has ended, and its handles are being released: "
        "retry, or unbind it first",
    )


def lost_lease(context: ContextFacts, given: int, error: str | None) -> CyborgError:
    """Return the error for an attachment whose lease, with the epoch ``given``, is over.

    ``error`` is the error of the context.
    """
    uuid, state = context.uuid, context.state
    # First, whatever the epoch: the instance is the reason that helps the caller. In error, the
    # instance is only that of the failed bind.
    if context.instance is not None and state != ContextState.ERROR:
        return _wrong_state(
            context,
            f"device context {uuid} is {state}, bound to instance {context.instance}: another "
            "call has taken its lease",
        )
    # With another epoch the state is that of a later use, and explains nothing.
    if given != context.epoch:
        return _stale(context, given)
    if state == ContextState.ERROR:
        return _wrong_state(
            context,
            f"device context {uuid} has no lease any more, it is in error: "
            f"{error or 'no reason is known'}; unbind it, and attach it again",
        )
    if state in USABLE:
        return _wrong_state(
            context,
            f"the lease of device context {uuid} has ended, and the context is {state}: attach it "
            "again",
        )
    return stale_lease(uuid, state, context.epoch, given=given)


def _stale(context: ContextFacts, given: int) -> Conflict:
    return Conflict(
        f"epoch: device context {context.uuid} is {context.state} and has no lease with epoch "
        f"{given}; its epoch is {context.epoch}",
        device_context=context.uuid,
        field="epoch",
        epoch=context.epoch,
    )


def _check_unused(context: ContextFacts, epoch: int | None, verb: str) -> None:
    """Raise WrongState if the context is in use, Conflict for the epoch of an earlier use."""
    if context.state not in USABLE:
        raise _in_use(context, verb)
    if epoch is not None:
        raise _stale(context, epoch)


def _check_holder(
    context: ContextFacts,
    request: ReserveRequest | ContextBindRequest,
    epoch: int,
    now: datetime,
) -> None:
    """Raise Conflict or WrongState unless a request is about the present lease of a context.

    The lease has the epoch, has not ended, and is for the host and the providers, if given.
    """
    if context.expires_at is None or context.expires_at <= now or epoch != context.epoch:
        raise stale_lease(context.uuid, context.state, context.epoch, given=epoch)
    if request.hostname != context.hostname:
        raise Conflict(
            f"hostname: the lease of device context {context.uuid} is for host "
            f"{context.hostname}, not for {request.hostname}: unbind the context to change it",
            device_context=context.uuid,
            field="hostname",
        )
    if request.providers not in (None, context.providers):
        leased = join_limited([str(provider) for provider in context.providers], 5)
        raise Conflict(
            f"mappings: the lease of device context {context.uuid} is for the resource providers "
            f"{leased}: unbind the context to change it",
            device_context=context.uuid,
            field="mappings",
        )


def _in_use(context: ContextFacts, verb: str) -> WrongState:
    instance = f" for instance {context.instance}" if context.instance else ""
    host = f" on host {context.hostname}" if context.hostname else ""
    return _wrong_state(
        context,
        f"cannot {verb} device context {context.uuid}: it is {context.state}{instance}{host}; "
        "unbind it first",
    )


def _wrong_state(context: ContextFacts, text: str, field: str | None = None) -> WrongState:
    """Return an error with the state of a context, or with the field that the request lacks."""
    detail = {"state": context.state} if field is None else {"field": field}
    return WrongState(text, device_context=context.uuid, **detail)


def _check_body(body: Any, allowed: Sequence[str]) -> dict[str, Any]:
    """Return the fields that are not null. Raise Invalid for an unknown field."""
    if not isinstance(body, Mapping):
        raise Invalid("body: expected an object", field="body")
    if unknown := [name for name in body if name not in allowed]:
        shown = describe(unknown[0])
        raise Invalid(f"{shown}: unknown field, expected some of {', '.join(allowed)}", field=shown)
    return {str(name): value for name, value in body.items() if value is not None}


def _parse_epoch(values: Mapping[str, Any]) -> int | None:
    return check_integer("epoch", values["epoch"]) if "epoch" in values else None


def _parse_providers(mappings: Any, num_groups: int) -> tuple[str, ...]:
    names = [make_group_name(number) for number in range(num_groups)]
    by_group = parse_mappings(names, mappings)
    return tuple(by_group[name] for name in names)
