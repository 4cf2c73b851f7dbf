# SPDX-License-Identifier: Apache-2.0
"""Maintenance windows of devices: the times, and the states of successors.

During its window a device has the status ``maintaining``. Afterwards it gets the status that an
operator set separately: ``enabled``, unless the device was disabled before or during the window.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from cyborg.core.attachments.attachment import RELEASE_STEPS, AttachmentState, Step
from cyborg.core.errors import Invalid
from cyborg.core.text import DescribedEnum, abbreviate
from cyborg.core.validation import parse_future_time, parse_uuid

MIN_RETRY_DELAY = timedelta(minutes=1)
MAX_RETRY_DELAY = timedelta(hours=1)


class SuccessorMode(StrEnum):
    """Whether the device contexts of a device get successors."""

    AUTO = "auto"  # each context that is bound to an instance gets one
    NONE = "none"  # no context gets one; also the mode of a new window without a mode


class SuccessorState(DescribedEnum):
    """States of the successor of a device context."""

    PREPARING = "preparing", "Another device is claimed and prepared; Nova does not see it yet."
    AWAITING_RESTART = (
        "awaiting_restart",
        "The context has the other device; the guest has the old one until it is started again.",
    )
    RELEASING = "releasing", "The guest has the other device; the old one is being released."
    FAILED = "failed", "There is no successor, for the reason in ``error``; this is retried."


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """A checked request for a maintenance window; ``until`` is naive UTC.

    Without ``successor``, a window that exists keeps its mode.
    """

    device: str
    until: datetime
    successor: SuccessorMode | None


def parse_window(request: Mapping[str, Any], now: datetime, longest: timedelta) -> WindowRequest:
    """Return the request for a window that begins ``now``. Raise Invalid."""
    device = parse_uuid(request.get("uuid"), "uuid")
    until = parse_future_time(request.get("until"), "until", now, "a later time")
    if until - now > longest:
        raise Invalid(
            f"until: a maintenance window has at most {longest.total_seconds():.0f} seconds, and "
            f"{abbreviate(request.get('until'))} is later; see [conductor] max_maintenance",
            field="until",
        )
    successor = request.get("successor")
    if successor is not None and successor not in list(SuccessorMode):
        raise Invalid(
            f"successor: {abbreviate(successor)!r} is not supported, expected "
            f"{' or '.join(SuccessorMode)}",
            field="successor",
        )
    return WindowRequest(device, until, None if successor is None else SuccessorMode(successor))


def retry_time(begun_at: datetime, now: datetime) -> datetime:
    """Return when to retry the work on a successor that has failed ``now``.

    The delay is the time since the successor was planned. So each delay is about twice the previous
    delay.
    """
    # No counter is stored: the time since the plan is the sum of the delays so far.
    return now + min(max(now - begun_at, MIN_RETRY_DELAY), MAX_RETRY_DELAY)


def successor_state(state: str, step: str | None) -> SuccessorState:
    """Return the state of a successor from the state and the step of the work on it."""
    # Derived, and not stored: the attachment has the only state, which one UPDATE changes.
    if state == AttachmentState.ERROR:
        return SuccessorState.FAILED
    if state == AttachmentState.ATTACHING:
        # The work on a failed successor undoes the steps before it ends in an error.
        return SuccessorState.FAILED if step in RELEASE_STEPS else SuccessorState.PREPARING
    if step in (Step.HIDE, Step.GUEST):
        return SuccessorState.AWAITING_RESTART
    return SuccessorState.RELEASING
