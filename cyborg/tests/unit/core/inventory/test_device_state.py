# SPDX-License-Identifier: Apache-2.0
"""Conditions and status of a device."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_state import DeviceCondition, DeviceFacts, evaluate

FACTS = st.builds(
    DeviceFacts,
    status=st.sampled_from(["enabled", "maintaining"]),
    health=st.sampled_from(list(Health)),
    setup_required=st.booleans(),
    reboot_required=st.booleans(),
    deliverable=st.booleans(),
    programming=st.booleans(),
    restore_failed=st.booleans(),
    failing=st.booleans(),
    withheld=st.booleans(),
    draining=st.booleans(),
    host_down=st.booleans(),
)
ONE: dict[DeviceCondition, dict[str, Any]] = {
    DeviceCondition.WITHHELD: {"withheld": True},
    DeviceCondition.SETUP_REQUIRED: {"setup_required": True},
    DeviceCondition.REBOOT_REQUIRED: {"reboot_required": True},
    DeviceCondition.UNDELIVERABLE: {"deliverable": False},
    DeviceCondition.BACKEND_DISABLED: {"cordoned": True},
    DeviceCondition.MAINTAINING: {"status": "maintaining"},
    DeviceCondition.PROGRAMMING: {"programming": True},
    DeviceCondition.RESTORE_FAILED: {"restore_failed": True},
    DeviceCondition.FAILING: {"failing": True},
    DeviceCondition.UNHEALTHY: {"health": Health.UNHEALTHY},
    DeviceCondition.HOST_DOWN: {"host_down": True},
    DeviceCondition.DRAINING: {"draining": True},
}


@pytest.mark.parametrize("state", ONE, ids=str)
def test_evaluate_each_condition_is_unschedulable(state: DeviceCondition) -> None:
    standing = evaluate(DeviceFacts(**ONE[state]))
    assert (standing.state, standing.schedulable, standing.reasons) == (state, False, (state,))


def test_evaluate_without_conditions_is_ready() -> None:
    assert set(ONE) | {DeviceCondition.READY} == set(DeviceCondition)
    for health in (Health.OK, Health.UNKNOWN):
        assert evaluate(DeviceFacts(health=health)).state is DeviceCondition.READY
        assert evaluate(DeviceFacts(health=health)).schedulable


def test_evaluate_unknown_status_is_unschedulable() -> None:
    assert evaluate(DeviceFacts(status="retired")).state is DeviceCondition.MAINTAINING


@given(FACTS, st.sampled_from(list(ONE)))
def test_evaluate_shows_strongest_of_all_reasons(facts: DeviceFacts, more: DeviceCondition) -> None:
    before, after = evaluate(facts), evaluate(replace(facts, **ONE[more]))
    assert set(after.reasons) == {*before.reasons, more}
    ranks = list(DeviceCondition)
    assert [ranks.index(reason) for reason in after.reasons] == sorted(
        (ranks.index(reason) for reason in after.reasons), reverse=True
    )
    assert after.state is after.reasons[0]
