# SPDX-License-Identifier: Apache-2.0
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.jobs.job import JobKind, WorkItem
from cyborg.core.jobs.progress import (
    Failure,
    WorkHistory,
    add_failure,
    add_success,
    build_failure,
    describe_failure,
    find_failed_item,
    is_evidence,
)

PREPARE = JobKind.PREPARE
KINDS = [kind for kind in JobKind if kind is not JobKind.RELEASE]
A0, A1, B0, B2 = (
    WorkItem("gpu", card, card, slot)
    for card, slot in (("card a", "0"), ("card a", "1"), ("card b", "0"), ("card b", "2"))
)


def fail(history: WorkHistory, kind: JobKind = PREPARE, *, counted: bool = True) -> WorkHistory:
    failure = Failure(kind, "job", "card", "it broke", "now")
    return add_failure(history, failure, counted=counted, close_after=3)


@given(st.sampled_from([A0, A1, B2]), st.text())
def test_failed_item_is_found_in_its_error(item: WorkItem, text: str) -> None:
    error = describe_failure(PREPARE, item, text)
    assert find_failed_item(PREPARE, [A0, A1, B2], error) == (item, text, True)


def test_handles_of_two_cards_with_one_address_blame_neither() -> None:
    error = describe_failure(PREPARE, B0, "it broke")
    assert find_failed_item(PREPARE, [A0, A1, B0], error) is None


def test_error_without_item_blames_the_only_device() -> None:
    assert find_failed_item(PREPARE, [A0, A1], "too slow") == (A0, "too slow", False)
    assert find_failed_item(PREPARE, [A0, B0], "too slow") is None


def test_failure_is_described_with_kind_time_subject_and_job() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, 6, UTC)
    failure = build_failure(PREPARE, "1234", A1, "Input/output error", now)
    assert failure.describe() == (
        "prepare of 1 failed at 2026-01-02T03:04:05Z, job 1234: Input/output error"
    )
    assert Failure.from_dict(failure.to_dict()) == failure


@pytest.mark.parametrize(("accel", "counted"), [({}, True), ({"bitstream_id": "x"}, False)])
def test_item_with_parameters_is_no_evidence(accel: dict[str, str], counted: bool) -> None:
    assert is_evidence(WorkItem("fpga", "0000:01:00.0", "0000:01:00.0", "0", accel)) is counted


@given(st.lists(st.sampled_from([*KINDS, *(f"not {kind}" for kind in KINDS)]), max_size=12))
def test_history_is_closed_after_failures_in_a_row(results: list[str]) -> None:
    history, in_a_row, closed = WorkHistory(), 0, False
    for result in results:
        if result in KINDS:
            history, in_a_row, closed = add_success(history, JobKind(result)), 0, False
            shown = PREPARE if result == JobKind.RESTORE else result
        else:
            shown = JobKind(result.removeprefix("not "))
            history = fail(history, shown)
            in_a_row += shown is PREPARE
            closed = closed or (shown is PREPARE and in_a_row >= 3)
            assert history.failures[0].kind is shown
        assert (shown in [old.kind for old in history.failures]) is (result not in KINDS)
        assert (history.failed_prepares, history.failing) == (in_a_row, closed)
        assert len(history.failures) == len({old.kind for old in history.failures})


def test_failures_that_are_no_evidence_never_close() -> None:
    history = WorkHistory()
    for _ in range(9):
        history = fail(history, counted=False)
    assert (history.failed_prepares, history.failing) == (0, False)
    never = add_failure(
        WorkHistory(failed_prepares=99), history.failures[0], counted=True, close_after=0
    )
    assert not never.failing
