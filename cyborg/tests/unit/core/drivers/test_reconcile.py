# SPDX-License-Identifier: Apache-2.0
"""Plan of the actions on the backends of a host, from its records and its desired state."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.drivers.desired_state import (
    Action,
    BackendRecord,
    DesiredBackend,
    DesiredHostState,
    DesiredStatus,
    PlannedAction,
    merge_options,
    next_record,
    plan,
)
from cyborg.core.drivers.registry import Option
from cyborg.core.errors import Invalid

ON, OFF, ABSENT = DesiredStatus.ENABLED, DesiredStatus.DISABLED, DesiredStatus.ABSENT


def desired(
    generation: int, status: DesiredStatus = ON, backend: str = "f1", **config: Any
) -> DesiredBackend:
    return DesiredBackend(backend, "fake", status, generation, config)


def record(
    target: DesiredBackend, error: str | None = None, applied: DesiredBackend | None = None
) -> BackendRecord:
    return BackendRecord(target, error, applied if error else target)


def planned_action(
    previous: BackendRecord | None, target: DesiredBackend | None, *configured: str
) -> Action:
    host = DesiredHostState(9, () if target is None else (target,))
    records = {} if previous is None else {previous.desired.backend: previous}
    (planned,) = plan(records, host, configured)
    assert (planned.backend, planned.desired) == ("f1", target)
    return planned.action


@pytest.mark.parametrize(
    ("previous", "target", "configured", "expected"),
    [
        (None, desired(1), (), Action.START),
        (None, desired(1, OFF), (), Action.START),
        (None, desired(1, ABSENT), (), Action.KEEP),
        (None, desired(1), ("f1",), Action.REPLACE),
        (None, desired(1, ABSENT), ("f1",), Action.STOP),
        (record(desired(1)), desired(1), (), Action.KEEP),
        (record(desired(1)), desired(2, num=2), (), Action.REPLACE),
        (record(desired(1)), desired(2, ABSENT), (), Action.STOP),
        (record(desired(1, ABSENT)), desired(2), ("f1",), Action.START),
        (record(desired(1, ABSENT)), desired(2, ABSENT), ("f1",), Action.KEEP),
        # The running backend does not differ.
        (record(desired(1)), desired(2, OFF), (), Action.KEEP),
        (record(desired(1, OFF)), desired(2), (), Action.KEEP),
        # An equal state with a new generation is a reload.
        (record(desired(1)), desired(2), (), Action.REPLACE),
        # After an error the applied state only reverts the failed change ...
        (record(desired(2, num=2), "no", desired(1)), desired(3), (), Action.KEEP),
        # ... except after a failed reload.
        (record(desired(2), "no", desired(1)), desired(3), (), Action.REPLACE),
        # A failed state is not retried until it is requested again.
        (record(desired(2, num=2), "no", desired(1)), desired(2, num=2), (), Action.KEEP),
        (record(desired(2, num=2), "no"), desired(2, num=2), (), Action.KEEP),
        (record(desired(2, num=2), "no"), desired(3, num=2), (), Action.START),
        # No desired state: the configuration file applies.
        (record(desired(1)), None, (), Action.STOP),
        (record(desired(1)), None, ("f1",), Action.REPLACE),
        (record(desired(1, ABSENT)), None, ("f1",), Action.START),
        (record(desired(1, ABSENT)), None, (), Action.KEEP),
        (record(desired(1), "no"), None, ("f1",), Action.KEEP),
    ],
)
def test_plan_action(
    previous: BackendRecord | None,
    target: DesiredBackend | None,
    configured: tuple[str, ...],
    expected: Action,
) -> None:
    assert planned_action(previous, target, *configured) is expected


def test_plan_stops_are_last() -> None:
    host = DesiredHostState(2, (desired(2, ABSENT, "a"), desired(2, ON, "b")))
    actions = plan({}, host, ["a"])
    assert [(planned.action, planned.backend) for planned in actions] == [
        (Action.STOP, "a"),
        (Action.START, "b"),
    ][::-1]


def test_next_record_error_keeps_applied_state() -> None:
    first, second = desired(1), desired(2, num=2)
    previous = next_record(PlannedAction(Action.START, "f1", first), None, None)
    assert previous == BackendRecord(first, None, first)
    assert next_record(
        PlannedAction(Action.REPLACE, "f1", second), previous, "no"
    ) == BackendRecord(second, "no", first)
    assert next_record(PlannedAction(Action.START, "f1", first), None, "no") == BackendRecord(
        first, "no", None
    )
    failed = BackendRecord(second, "no", first)
    assert next_record(PlannedAction(Action.KEEP, "f1", second), failed, None) == failed
    assert next_record(PlannedAction(Action.REPLACE, "f1", None), previous, None) is None
    assert next_record(PlannedAction(Action.REPLACE, "f1", None), previous, "no") == previous, (
        "it is retried"
    )


NAMES = ("a", "b", "c")
STATUSES = st.dictionaries(
    st.sampled_from(NAMES), st.tuples(st.sampled_from(list(DesiredStatus)), st.integers(0, 1))
)


@pytest.mark.parametrize(
    ("previous", "action", "expected"),
    [
        (None, Action.KEEP, True),
        (None, Action.STOP, False),
        (record(desired(1, ABSENT)), Action.KEEP, False),
        (record(desired(1), "no"), Action.KEEP, True),
        (record(desired(1), "no", desired(1, ABSENT)), Action.KEEP, False),
        (BackendRecord(desired(1, ABSENT), None, desired(1, ABSENT), True), Action.KEEP, True),
    ],
)
def test_next_record_of_an_absent_backend_tells_whether_it_ran(
    previous: BackendRecord | None, action: Action, expected: bool
) -> None:
    new = next_record(PlannedAction(action, "f1", desired(2, ABSENT)), previous, None)
    assert new is not None
    assert new.never_ran is expected
    assert BackendRecord.from_dict(json.loads(json.dumps(new.to_dict()))) == new
    again = next_record(PlannedAction(Action.START, "f1", desired(3)), new, None)
    assert again == record(desired(3)), "it runs"


@given(
    st.frozensets(st.sampled_from(NAMES)),
    st.lists(st.tuples(STATUSES, st.frozensets(st.sampled_from(NAMES))), max_size=6),
)
def test_plan_running_backends_equal_applied_records(
    configured: frozenset[str],
    rounds: list[tuple[dict[str, tuple[DesiredStatus, int]], frozenset[str]]],
) -> None:
    """Running backends equal the applied records, and the desired ones if no action failed."""
    running: dict[str, Any] = dict.fromkeys(configured, "file")
    records: dict[str, BackendRecord] = {}
    for generation, (statuses, failing) in enumerate(rounds, 1):
        host = DesiredHostState(
            generation,
            tuple(
                desired(generation, status, name, num=num)
                for name, (status, num) in statuses.items()
            ),
        )
        for planned in plan(records, host, configured):
            builds = planned.action in (Action.START, Action.REPLACE)
            error = "no" if builds and planned.backend in failing else None
            assert (planned.backend in running) is (
                planned.action in (Action.REPLACE, Action.STOP)
            ) or (planned.action is Action.KEEP)
            if planned.action is Action.STOP:
                del running[planned.backend]
            elif builds and error is None:
                running[planned.backend] = (
                    "file" if planned.desired is None else planned.desired.config
                )
            kept_record = next_record(planned, records.pop(planned.backend, None), error)
            if kept_record is not None:
                records[planned.backend] = BackendRecord.from_dict(
                    json.loads(json.dumps(kept_record.to_dict()))
                )
                assert records[planned.backend] == kept_record
        for name in NAMES:
            applied = records[name].applied if name in records else None
            file = "file" if name in configured else None
            config = None if applied is None or applied.status is ABSENT else applied.config
            assert running.get(name) == (file if applied is None else config)
        for backend in host.backends:
            if records[backend.backend].error is None:
                expected = None if backend.status is ABSENT else backend.config
                assert running.get(backend.backend) == expected


OPTIONS = (
    Option("count", "int", 1, "How many."),
    Option("rules", "multi", (), "Which."),
    Option("name", "str", "x", "What."),
)


def test_merge_options_precedence() -> None:
    assert merge_options(OPTIONS, {}, {}) == {"count": 1, "rules": [], "name": "x"}
    values = merge_options(OPTIONS, {"count": 2, "name": "y"}, {"count": "3", "rules": "a=b"})
    assert values == {"count": 3, "rules": ["a=b"], "name": "y"}
    with pytest.raises(Invalid, match="no option 'cuont'; did you mean count"):
        merge_options(OPTIONS, {}, {"cuont": 3})
