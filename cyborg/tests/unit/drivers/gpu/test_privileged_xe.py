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
    xe.set_scheduling(CARD, {"exec_quantum_ms": "18", "sched_priority": "normal"})
    for number in (0, 1, 2):
        found = host.profile(number)
        assert (found["exec_quantum_ms"], found["preempt_timeout_us"]) == ("20", "0")
        assert found["sched_priority"].startswith("low [normal]")
    xe.set_scheduling(CARD, {"exec_quantum_ms": "0"})
    assert host.profile(1)["exec_quantum_ms"] == "0"


@pytest.mark.parametrize(
    "arguments",
    [
        ("..", {}),
        (CARD, None),
        (CARD, {"vram_quota": "1"}),
        (CARD, {"a": 1}),
        (CARD, {"sched_priority": "high"}),
    ],
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
    with pytest.raises(DriverFailed, match="has low for sched_priority after a write of norm"):
        xe.set_scheduling(CARD, {"sched_priority": "normal"})
    host.fixed_priority = True
    with pytest.raises(DriverFailed, match="refused 'normal' for sched_priority: Operation not"):
        xe.set_scheduling(CARD, {"sched_priority": "normal"})
    remove_admin(host)
    with pytest.raises(DriverFailed, match="does not have all of exec_quantum_ms"):
        xe.set_scheduling(CARD, {"exec_quantum_ms": "20"})


def test_simulated_kernel_refuses_the_priority_of_the_physical_function(
    host: SimulatedIntelHost,
) -> None:
    """What ``is_valid`` refuses before: the firmware permits it for no virtual function."""
    with pytest.raises(OSError, match="Invalid argument"):
        host.write_attribute(host.bus / CARD / "sriov_admin/.bulk_profile/sched_priority", "high")


def test_set_vram_gives_each_function_the_same_part(host: SimulatedIntelHost) -> None:
    host.enable(3)
    assert host.vram_mib() == [4096] * 3 + [0] * 4, "an equal part is a power of two"
    xe.set_vram(CARD, 8117)
    assert host.vram_mib() == [8118] * 3 + [0] * 4, "rounded up"
    host.writes.clear()
    xe.set_vram(CARD, 8117)
    assert host.writes == [], "not again: that would take the memory of a server away"


def test_set_vram_takes_memory_before_it_gives_it(host: SimulatedIntelHost) -> None:
    host.enable(2)
    for number, mib in ((1, 4096), (2, 18432)):
        path = host.bus / CARD / f"sriov_admin/vf{number}/profile/vram_quota"
        host.write_attribute(path, str(mib << 20))
    xe.set_vram(CARD, 12000)
    assert host.vram_mib()[:2] == [12000, 12000]


def test_set_vram_of_all_functions_at_once_is_not_used(host: SimulatedIntelHost) -> None:
    """It would also give memory to functions that do not exist."""
    host.enable(2)
    path = host.bus / CARD / "sriov_admin/.bulk_profile/vram_quota"
    with pytest.raises(OSError, match="Cannot allocate memory"):
        host.write_attribute(path, str(11776 << 20))


@pytest.mark.parametrize("arguments", [("..", 8), (CARD, 0), (CARD, True), (CARD, 1 << 25)])
def test_set_vram_malformed_argument_is_invalid(
    host: SimulatedIntelHost, arguments: tuple[str, int]
) -> None:
    with pytest.raises(Invalid):
        xe.set_vram(*arguments)
    assert host.writes == []


def test_set_vram_that_is_refused_or_has_no_effect_fails(host: SimulatedIntelHost) -> None:
    with pytest.raises(DriverFailed, match="there is no card of xe with virtual functions"):
        xe.set_vram(CARD, 8192)
    host.enable(2)
    with pytest.raises(DriverFailed, match="refused 13000 MiB for virtual function 2: Cannot all"):
        xe.set_vram(CARD, 13000)
    assert host.vram_mib()[:2] == [13000, 0], "it lost what it had"
    host.ignoring = {"vram_quota"}
    with pytest.raises(DriverFailed, match=r"function 1 of .* has 13631488000 bytes of memory"):
        xe.set_vram(CARD, 4096)
    host.fixed_vram = True
    with pytest.raises(DriverFailed, match="Operation not permitted"):
        xe.set_vram(CARD, 4096)


def test_set_vram_of_a_card_without_the_attribute_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = SimulatedIntelHost(tmp_path, vram_mib=0)
    host.redirect(monkeypatch)
    host.enable(2)
    with pytest.raises(DriverFailed, match=r"does not have vram_quota in sriov_admin: Linux 7\.0"):
        xe.set_vram(CARD, 4096)


def test_set_vram_while_a_guest_may_have_a_function_is_refused(host: SimulatedIntelHost) -> None:
    names = host.enable(2)
    host.bind(names[1], "vfio-pci")
    group = (host.bus / names[1] / "iommu_group").resolve().name
    (host.root.parent / "dev/vfio" / group).unlink()
    (host.root.parent / "dev/vfio" / group).mkdir()  # cannot be opened, like one that is in use
    host.writes.clear()
    with pytest.raises(DriverFailed, match=f"function {names[1]} is or may be in use"):
        xe.set_vram(CARD, 4096)
    assert host.writes == []
    xe.set_vram(CARD, 8192)
