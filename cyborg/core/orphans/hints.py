# SPDX-License-Identifier: Apache-2.0
"""Nova's versioned notifications as hints to check the ARQs of an instance.

A notification is a hint and no authority: it may be forged, late, duplicated or reordered. Only the
event type and the uuid of the instance are used. Whether an ARQ is released depends on the answers
of Placement and Nova.

Source of the format: "Notifications" in Nova's reference documentation, and the samples in
``doc/notification_samples`` of Nova's repository. The body has ``event_type``, such as
``instance.delete.end``, and ``payload``, an object with ``nova_object.namespace``,
``nova_object.version`` and ``nova_object.data``, whose ``uuid`` is the instance. The topic is
``versioned_notifications`` (``[notifications] versioned_notifications_topics`` of Nova).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any

from cyborg.core.errors import Invalid
from cyborg.core.orphans.orphans import Presence
from cyborg.core.validation import check_text, parse_uuid

# Seconds for which a hint is kept while Placement or Nova does not answer.
MAX_AGE = 3600.0

# Age of a bind before which its ARQ is not released without a grace period.
MIN_BIND_AGE = timedelta(seconds=60)

_VERSION = re.compile(r"1\.[0-9]{1,4}")  # a new major version may move the uuid
_FIRST_PAUSE = 5.0
_MAX_PAUSE = 60.0
_JITTER = 0.25  # largest share by which a pause is extended


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """When to check the ARQs of an instance after an event.

    ``delay`` is the number of seconds until the first check. Further checks, up to ``checks``
    altogether, follow while Placement or Nova still shows the state before the event.
    """

    delay: float
    checks: int = 1


# nova-compute deletes the allocation before it sends these events; the further checks cover a
# replica of Nova's or Placement's database that is behind.
_RELEASED = CheckPlan(delay=1.0, checks=3)
# The allocation is deleted later, or not at all if nova-compute stops in between: then the
# restarted nova-compute completes the deletion, and sends instance.delete.end.
_DELETING = CheckPlan(delay=60.0)
# Nova removes the allocation on the source host after or shortly before these events.
_MOVED = CheckPlan(delay=15.0)

# Events after which the ARQs of an instance are checked.
#
# Other events are ignored, on purpose also:
#
# * ``instance.soft_delete.end``: the server can be restored and keeps its allocation. When Nova
#   reclaims it, the events of a deletion follow.
# * ``instance.shelve.end``: the server keeps its host and its allocation until it is offloaded.
# * ``instance.unshelve.end`` and ``instance.create.end``: Nova binds new ARQs, nothing is released.
# * ``*.start`` of a move: the allocation on the source is still needed.
CHECKS: Mapping[str, CheckPlan] = {
    "instance.delete.start": _DELETING,
    "instance.delete.end": _RELEASED,
    "instance.shelve_offload.end": _RELEASED,
    "instance.evacuate": _MOVED,
    "instance.live_migration_post.end": _MOVED,
    "instance.live_migration_post_dest.end": _MOVED,
    "instance.live_migration_rollback.end": _MOVED,
    "instance.rebuild.end": _MOVED,  # also the end of an evacuation, on the new host
    "instance.resize_confirm.end": _MOVED,
    "instance.resize_revert.end": _MOVED,
}


@dataclass(frozen=True, slots=True)
class Hint:
    """Request to check the ARQs of an instance. Times are in seconds of one monotonic clock.

    ``last`` is the time of the latest check that was requested, if that is after ``due``.
    """

    instance: str
    due: float
    received: float
    checks: int = 1  # further checks, including the next one, if the state is not settled
    failures: int = 0  # checks that Placement or Nova did not answer
    last: float = 0.0

    def merge(self, other: "Hint") -> "Hint":
        """Return one hint for two of one instance, with both times and the larger ``checks``."""
        return replace(
            self,
            due=min(self.due, other.due),
            received=max(self.received, other.received),
            checks=max(self.checks, other.checks),
            failures=min(self.failures, other.failures),
            last=max(self.last, other.last, self.due, other.due),
        )


def parse_notification(fields: Mapping[str, Any], now: float) -> Hint | None:
    """Return the hint of a notification, None if no ARQ needs a check. Raise Invalid."""
    event = check_text("event_type", fields.get("event_type"))
    plan = CHECKS.get(event)
    if plan is None:
        return None
    payload = fields.get("payload")
    if not isinstance(payload, Mapping):
        raise Invalid(f"payload is {type(payload).__name__}, not an object", field="payload")
    if payload.get("nova_object.namespace") != "nova":
        raise Invalid("payload is no object of Nova", field="nova_object.namespace")
    version = check_text("nova_object.version", payload.get("nova_object.version"), 16)
    if not _VERSION.fullmatch(version):
        raise Invalid(
            f"nova_object.version is {version!r}; expected 1.0 or a later 1.x",
            field="nova_object.version",
        )
    data = payload.get("nova_object.data")
    if not isinstance(data, Mapping):
        raise Invalid(
            f"nova_object.data is {type(data).__name__}, not an object", field="nova_object.data"
        )
    instance = parse_uuid(data.get("uuid"), "uuid")
    return Hint(instance, due=now + plan.delay, received=now, checks=plan.checks)


class Decision(StrEnum):
    """What to do with a bound ARQ of an instance that a hint names."""

    DELETE = "delete"  # release its device and delete it
    UNBIND = "unbind"  # release its device and keep it, unbound
    SUSPECT = "suspect"  # the grace period of the orphan collector begins
    KEEP = "keep"  # the instance has its allocation
    RETRY = "retry"  # Nova did not answer, or the bind is too new


def decide(presence: Presence, bind_age: timedelta) -> Decision:
    """Return what to do with a bound ARQ whose instance has no allocation on its provider.

    ``presence`` is the answer of Nova about the instance, ``bind_age`` the age of the bind.
    """
    if presence is Presence.UNKNOWN:
        return Decision.RETRY
    # Placement and Nova may read from replicas of their databases. A replica that is behind by some
    # seconds has neither the allocation nor the server of a new bind, so both would agree wrongly.
    if bind_age < MIN_BIND_AGE and presence in (Presence.NOT_FOUND, Presence.OFFLOADED):
        return Decision.RETRY
    # Without a grace period, because both services agree and neither state changes back: a
    # deleted server does not return, and an offloaded one gets new ARQs when it is unshelved. Nova
    # itself deletes the ARQs at these events, also if the server's host is down. The grace period
    # of the collector is for a server that Nova still shows, or does not answer for.
    if presence is Presence.NOT_FOUND:
        return Decision.DELETE
    if presence is Presence.OFFLOADED:
        return Decision.UNBIND
    # A server on another host: during a resize, its allocation on the source belongs to the
    # migration, and the resize can still be reverted. On the same host: the device may be in use,
    # which the collector reports.
    return Decision.SUSPECT


def next_check(hint: Hint, now: float, *, answered: bool, jitter: float = 0.0) -> Hint | None:
    """Return the hint for the next check of an instance with bound ARQs, None if there is none.

    ``answered`` is False if Placement or Nova did not answer. ``jitter``, from 0 to 1, extends the
    pause after a failure, so that the checks that failed together are not repeated together.
    """
    if not answered:
        if now - hint.received >= MAX_AGE:
            return None
        pause = min(_MAX_PAUSE, _FIRST_PAUSE * 2.0 ** min(hint.failures, 10))
        return replace(hint, due=now + _extend(pause, jitter), failures=hint.failures + 1)
    # With the three checks of ``_RELEASED``: 5 s after the first, 25 s after the second.
    pause = _FIRST_PAUSE if hint.checks > 2 else 5 * _FIRST_PAUSE
    due = now + pause if hint.checks > 1 else math.inf
    if now < hint.last < due:
        # Of a merged hint: its event needs a check at this time, besides those of the plan.
        return replace(hint, due=hint.last)
    if hint.checks <= 1:
        return None
    return replace(hint, due=due, checks=hint.checks - 1)


def postpone(hint: Hint, now: float, jitter: float = 0.0) -> Hint | None:
    """Return the hint for a check that a limit prevented; None if the hint is too old.

    This does not count as a failure, so the instance comes before instances whose checks failed.
    """
    if now - hint.received >= MAX_AGE:
        return None
    return replace(hint, due=now + _extend(_FIRST_PAUSE, jitter))


def _extend(pause: float, jitter: float) -> float:
    return pause * (1.0 + _JITTER * jitter)
