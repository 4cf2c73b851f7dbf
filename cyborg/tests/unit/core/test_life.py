# SPDX-License-Identifier: Apache-2.0
"""The life of a device."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.device import Health
from cyborg.core.life import Facts, Life, decide

FACTS = st.builds(
    Facts,
    status=st.sampled_from(["enabled", "maintaining"]),
    health=st.sampled_from(list(Health)),
    setup_required=st.booleans(),
    reboot_required=st.booleans(),
    programming=st.booleans(),
    draining=st.booleans(),
    host_down=st.booleans(),
)
ONE: dict[Life, dict[str, Any]] = {
    Life.SETUP_REQUIRED: {"setup_required": True},
    Life.REBOOT_REQUIRED: {"reboot_required": True},
    Life.WITHDRAWN: {"withdrawn": True},
    Life.MAINTAINING: {"status": "maintaining"},
    Life.PROGRAMMING: {"programming": True},
    Life.UNHEALTHY: {"health": Health.UNHEALTHY},
    Life.HOST_DOWN: {"host_down": True},
    Life.DRAINING: {"draining": True},
}


@pytest.mark.parametrize("state", ONE, ids=str)
def test_each_fact_closes_by_itself(state: Life) -> None:
    standing = decide(Facts(**ONE[state]))
    assert (standing.state, standing.open, standing.reasons) == (state, False, (state,))


def test_without_any_it_is_ready() -> None:
    assert set(ONE) | {Life.READY} == set(Life)
    for health in (Health.OK, Health.UNKNOWN):
        assert decide(Facts(health=health)).state is Life.READY
        assert decide(Facts(health=health)).open


def test_a_status_of_a_newer_release_closes() -> None:
    assert decide(Facts(status="retired")).state is Life.MAINTAINING


@given(FACTS, st.sampled_from(list(ONE)))
def test_reasons_add_up_and_the_strongest_shows(facts: Facts, more: Life) -> None:
    before, after = decide(facts), decide(replace(facts, **ONE[more]))
    assert set(after.reasons) == {*before.reasons, more}
    ranks = list(Life)
    assert [ranks.index(reason) for reason in after.reasons] == sorted(
        (ranks.index(reason) for reason in after.reasons), reverse=True
    )
    assert after.state is after.reasons[0]
