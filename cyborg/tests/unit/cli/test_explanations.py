# SPDX-License-Identifier: Apache-2.0
"""The rows of an explanation."""

from typing import Any

from cyborg.cli.device_profiles import _provider_rows, summary_rows

GROUP = {"group": 0, "fitting_providers": 0, "free_handles": 0, "reasons": []}
FAILURE: dict[str, Any] = {
    "at": "2026-01-02T03:04:05+00:00",
    "code": "taken",
    "reason": "handle is taken",
    "hostname": "compute-1",
    "job_uuid": None,
    "groups": [
        {
            "group": 1,
            "provider_uuid": "p",
            "code": "taken",
            "reason": "handle is taken",
            "handles": 2,
        }
    ],
}


def explanation(**values: Any) -> dict[str, Any]:
    base = {"fitting_hosts": 0, "last_failure": None, "groups": [GROUP], "providers": []}
    return {**base, **values}


def test_summary_of_one_group_has_no_row_for_all_groups() -> None:
    (row,) = summary_rows(explanation())
    assert (row["group"], row["result"]) == (0, "fits")


def test_summary_of_several_groups_starts_with_all_groups() -> None:
    groups = [GROUP, {**GROUP, "group": 1}]
    first, *_ = summary_rows(explanation(groups=groups))
    assert (first["group"], first["result"]) == ("all", "no_host")
    first, *_ = summary_rows(explanation(groups=groups, fitting_hosts=2))
    assert first["reason"] == "hosts that can serve all groups together: 2"
    assert first["result"] == "fits"


def test_last_failure_comes_after_the_present_state() -> None:
    *_, last = summary_rows(explanation(last_failure=FAILURE))
    assert (last["result"], last["group"], last["handles"]) == ("last_failure", 1, 2)
    assert last["reason"] == "2026-01-02T03:04:05+00:00 on host compute-1: taken: handle is taken"
    (row,) = _provider_rows(explanation(last_failure=FAILURE))
    assert (row["hostname"], row["uuid"]) == ("compute-1", "p")


def test_failed_host_work_is_a_row_without_a_group() -> None:
    work = {**FAILURE, "code": "prepare_failed", "reason": "checksum differs", "groups": []}
    *_, last = summary_rows(explanation(last_failure={**work, "hostname": None}))
    assert last["group"] is None
    assert last["reason"] == "2026-01-02T03:04:05+00:00: prepare_failed: checksum differs"
