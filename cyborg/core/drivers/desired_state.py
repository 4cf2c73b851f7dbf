# SPDX-License-Identifier: Apache-2.0
"""Desired state of a host: backends that add to, or replace, the backends of its configuration.

The conductor stores it, with a generation for the host that rises with each change. When the
generation differs from its own, the agent fetches the desired state, applies it and reports the
result for each backend. An agent that was down or missed a notification converges in the same way.

The plan of a reconciliation has the actions from the current to the desired backends. A desired
state that cannot be applied leaves the backend unchanged. So a host records two states of each
backend: the last desired state and the applied state.
"""

import operator
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cyborg.core.codec import Serializable, wire
from cyborg.core.drivers import registry
from cyborg.core.drivers.registry import LISTS, Option
from cyborg.core.errors import Invalid
from cyborg.core.text import DescribedEnum, sanitize
from cyborg.core.validation import find_duplicate, malformed, string

# Backends of one host.
MAX_BACKENDS = 256
MAX_ERROR = 1000


class ManagedOption(DescribedEnum):
    """Options of a driver that are lists of addresses, each with what the driver does."""

    ADOPT = "adopt", "adopt single devices"
    ADOPT_IN_USE = "adopt_in_use", "adopt devices that the host uses"
    RELEASE = "release", "release single devices"


# Option of devices that are adopted although their hosts use them.
ADOPT_IN_USE: str = ManagedOption.ADOPT_IN_USE.value

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,254}$")


class DesiredStatus(StrEnum):
    """Desired status of a backend."""

    ENABLED = "enabled"
    DISABLED = "disabled"  # it runs and the conductor cordons its devices
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class DesiredBackend(Serializable):
    """Desired state of one backend.

    ``config`` has option values that override the host's configuration file and the defaults.
    ``generation`` is the host's generation at the last change of the backend.
    """

    backend: str
    driver: str
    status: DesiredStatus
    generation: int
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DesiredHostState(Serializable):
    """Desired state of a host at a generation; generation 0 has no backend."""

    generation: int = field(default=0, metadata=wire(required=True))
    backends: tuple[DesiredBackend, ...] = field(default=(), metadata=wire(required=True))


def _load_error(error: Any) -> str | None:
    # Never an empty text, which would look like success.
    return None if error is None else sanitize(string(error))[:MAX_ERROR] or "no message"


@dataclass(frozen=True, slots=True)
class BackendOutcome(Serializable):
    """Result of applying one desired backend; ``error`` is None on success.

    After an error the host keeps the previous backend unchanged.
    """

    backend: str
    generation: int
    error: str | None = field(default=None, metadata=wire(load=_load_error))


def parse_backend_name(name: Any) -> str:
    """Return the name if it is a valid backend name. Raise Invalid otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Invalid(
            f"invalid backend name {str(name)[:40]!r}: expected letters, digits, _, . and -, at "
            "most 255",
            field="backend",
        )
    return name


def managed_options(
    config: Mapping[str, Any], address: str, option: str, adopted_at: str = ""
) -> dict[str, list[str]]:
    """Return the options of a backend with an address in the list ``option`` of ``ManagedOption``.

    The time ``adopted_at`` follows the address after ``@``, so that a repetition changes the
    option: only then does the agent check the device again. Unchanged lists are left out: a desired
    option hides its value in the configuration file.
    """
    lists: dict[str, list[str]] = {}
    # An address is in one list at most: the lists contradict each other.
    for name in map(str, ManagedOption):
        current = list(config.get(name, ()))
        others = [listed for listed in current if listed.partition("@")[0] != address]
        if name == option:
            lists[name] = sorted({*others, f"{address}@{adopted_at}" if adopted_at else address})
        elif others != current:
            lists[name] = others
    return lists


def load_host(body: Any) -> DesiredHostState:
    """Parse the desired state of a host. Raise Invalid if it is malformed."""
    with malformed("desired state", "backends"):
        host = DesiredHostState.from_dict(body)
    backends = host.backends
    if len(backends) > MAX_BACKENDS:
        raise Invalid(
            f"the desired state has {len(backends)} backends, at most {MAX_BACKENDS} are allowed",
            field="backends",
        )
    if find_duplicate(backend.backend for backend in backends) is not None:
        raise Invalid("the desired state has two backends of the same name", field="backends")
    return host


def load_outcomes(body: Any) -> tuple[BackendOutcome, ...]:
    """Parse the results of desired backends. Raise Invalid if they are malformed."""
    if not isinstance(body, list) or len(body) > MAX_BACKENDS:
        raise Invalid(
            f"outcomes must be a list of at most {MAX_BACKENDS} objects", field="outcomes"
        )
    with malformed("outcome", "outcomes"):
        return tuple(map(BackendOutcome.from_dict, body))


@dataclass(frozen=True, slots=True)
class BackendRecord(Serializable):
    """Record of one backend on its host.

    ``desired`` is the last desired state, and ``error`` the reason why it could not be applied.
    ``applied`` is the state in effect: equal to ``desired`` or, after an error, the previously
    applied state. None means the options of the configuration file. ``never_ran`` is set if the
    backend was absent before its removal was desired: ``applied`` does not have its options.
    """

    desired: DesiredBackend
    error: str | None
    applied: DesiredBackend | None
    never_ran: bool = field(default=False, metadata=wire(omit=operator.not_))


class Action(StrEnum):
    """Actions on a backend."""

    START = "start"
    REPLACE = "replace"  # by a newly built one; the old one runs until the new one works
    STOP = "stop"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """One backend, the action on it, and its desired state.

    ``desired`` is None for a backend that returns to the configuration file.
    """

    action: Action
    backend: str
    desired: DesiredBackend | None


def plan(
    records: Mapping[str, BackendRecord], host: DesiredHostState, configured: Collection[str]
) -> tuple[PlannedAction, ...]:
    """Return one action for each backend that has a desired state or a record; STOP comes last.

    ``records`` are by backend name. ``configured`` has the names of the backends of the
    configuration file; a backend without a desired state follows that file.
    """
    desired = {backend.backend: backend for backend in host.backends}
    actions = [
        PlannedAction(_choose_action(records.get(name), backend, configured), name, backend)
        for name, backend in desired.items()
    ]
    actions += [
        PlannedAction(_revert_action(record, configured), name, desired=None)
        for name, record in records.items()
        if name not in desired
    ]
    return tuple(sorted(actions, key=lambda planned: planned.action is Action.STOP))


def next_record(
    planned: PlannedAction, record: BackendRecord | None, error: str | None
) -> BackendRecord | None:
    """Return the record of a backend after an action; ``error`` is None if the action succeeded.

    None means that the backend follows the configuration file and needs no record.
    """
    if planned.desired is None:
        # No result is reported. After an error the record stays, as the backend still follows it.
        return None if error is None else record
    if record is not None and _was_tried(record, planned.desired):
        return record
    if error is None:
        is_removal = planned.desired.status is DesiredStatus.ABSENT
        # Nothing was stopped: if the host has never run the backend with a desired state, handles
        # are released with the options of the configuration file.
        was_absent = is_removal and planned.action is Action.KEEP
        never_ran = was_absent and (record is None or record.applied is None or record.never_ran)
        return BackendRecord(
            planned.desired, error=None, applied=planned.desired, never_ran=never_ran
        )
    applied = None if record is None else record.applied
    return BackendRecord(planned.desired, error=error, applied=applied)


def merge_options(
    options: Sequence[Option], section: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the value of each option: ``config`` overrides ``section``, which overrides defaults.

    ``section`` has options from the configuration file, ``config`` options of the desired state.
    Raise Invalid for a name or a value of ``config`` that the options do not allow.
    """
    defaults = {o.name: list(o.default) if o.kind in LISTS else o.default for o in options}
    return {**defaults, **section, **registry.parse_values(options, config)}


def _choose_action(
    record: BackendRecord | None, desired: DesiredBackend, configured: Collection[str]
) -> Action:
    """Return what brings a backend from its record to the desired state."""
    if record is not None and _was_tried(record, desired):
        return Action.KEEP
    applied = None if record is None else record.applied
    running = _is_running(desired.backend, applied, configured)
    if desired.status is DesiredStatus.ABSENT:
        return Action.STOP if running else Action.KEEP
    if not running:
        return Action.START
    # An equal state with a new generation is a request to rebuild the backend, except when it only
    # reverts a failed change or switches between enabled and disabled.
    if record is not None and applied is not None and _is_equivalent(applied, desired):
        reverts = record.error is not None and not _is_equivalent(record.desired, desired)
        return Action.KEEP if reverts or applied.status is not desired.status else Action.REPLACE
    return Action.REPLACE


def _revert_action(record: BackendRecord, configured: Collection[str]) -> Action:
    backend, applied = record.desired.backend, record.applied
    if applied is None:
        return Action.KEEP
    running = _is_running(backend, applied, configured)
    if backend not in configured:
        return Action.STOP if running else Action.KEEP
    return Action.REPLACE if running else Action.START


def _was_tried(record: BackendRecord, desired: DesiredBackend) -> bool:
    """Return whether a desired state was tried already."""
    # The generation alone is not enough: a restored database continues from an older one.
    same_generation = record.desired.generation == desired.generation
    return same_generation and _is_equivalent(record.desired, desired)


def _is_running(backend: str, applied: DesiredBackend | None, configured: Collection[str]) -> bool:
    return backend in configured if applied is None else applied.status is not DesiredStatus.ABSENT


def _is_equivalent(left: DesiredBackend, right: DesiredBackend) -> bool:
    """Return whether two desired states lead to the same running backend."""
    # Enabled and disabled backends run alike: the conductor cordons the devices of a disabled one.
    absent = [status is DesiredStatus.ABSENT for status in (left.status, right.status)]
    return absent[0] is absent[1] and left.driver == right.driver and left.config == right.config
