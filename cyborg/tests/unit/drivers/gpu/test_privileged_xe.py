# SPDX-License-Identifier: Apache-2.0
"""The privileged function for the scheduling of virtual functions, on a simulated host."""

from pathlib import Path

import pytest

from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.privileged import xe
from cyborg.tests.unit.drivers.gpu.simulated_intel import CARD, SimulatedIntelHost, remove_admin


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedIntelHost:
    found = SimulatedIntelHost(tmp_path)
    found.redirect(monkeypatch)
    return found


def test_set_scheduling_applies_to_all_functions(host: SimulatedIntelHost) -> None:
    host.enable(2)
    xe.set_scheduling(CARD, {"exec_quantum_ms": "18", "sched_priority": "high"})
    for number in (0, 1, 2):
        found = host.profile(number)
        assert (found["exec_quantum_ms"], found["preempt_timeout_us"]) == ("20", "0")
        assert found["sched_priority"] == "low normal [high]"
    xe.set_scheduling(CARD, {"exec_quantum_ms": "0"})
    assert host.profile(1)["exec_quantum_ms"] == "0"


@pytest.mark.parametrize(
    "arguments", [("..", {}), (CARD, None), (CARD, {"vram_quota": "1"}), (CARD, {"a": 1})]
)
def test_set_scheduling_malformed_argument_is_invalid(
    host: SimulatedIntelHost, arguments: tuple[str, dict[str, str]]
) -> None:
    with pytest.raises(Invalid):
        xe.set_scheduling(*arguments)
    assert host.writes == []


def test_set_scheduling_that_has_no_effect_or_no_function_fails(host: SimulatedIntelHost) -> None:
    with pytest.raises(DriverFailed, match="there is no card of xe with virtual functions"):
        xe.set_scheduling(CARD, {"exec_quantum_ms": "20"})
    host.enable(2)
    host.ignoring = {"exec_quantum_ms", "sched_priority"}
    with pytest.raises(DriverFailed, match="has 0 for exec_quantum_ms after a write of 20"):
        xe.set_scheduling(CARD, {"exec_quantum_ms": "20"})
    with pytest.raises(DriverFailed, match="has low for sched_priority after a write of high"):
        xe.set_scheduling(CARD, {"sched_priority": "high"})
    host.fixed_priority = True
    with pytest.raises(DriverFailed, match="refused 'high' for sched_priority: Operation not perm"):
        xe.set_scheduling(CARD, {"sched_priority": "high"})
    remove_admin(host)
    with pytest.raises(DriverFailed, match="does not have all of exec_quantum_ms"):
        xe.set_scheduling(CARD, {"exec_quantum_ms": "20"})
