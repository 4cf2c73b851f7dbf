# SPDX-License-Identifier: Apache-2.0
"""Layouts that switch the MIG mode of a card: each to each other, with a failure at each step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Memory, VolatileMemory
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.testing.vgpu_host import SimulatedVgpuHost, VgpuType
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.unit.drivers.gpu.simulated_vgpus import (
    CARD,
    CHANGES,
    LARGE,
    SMALL,
    discover,
    make_access,
    make_driver,
    offered,
)

TYPES = (
    SMALL,
    LARGE,
    VgpuType(1501, "NVIDIA H200X-1-18C", 18, "1g.18gb"),
    VgpuType(1502, "NVIDIA H200X-3-71C", 71, "3g.71gb"),
)
RULE = f"address={CARD},type=H200X-70C|H200X-35C|H200X-1-18C|H200X-3-71C"
PAIR, MIXED = "2xH200X-70C", "1xH200X-70C+2xH200X-35C"
SLICES, SLICED = "7xH200X-1-18C", "1xH200X-3-71C+4xH200X-1-18C"
PROFILES = "1x3g.71gb+4x1g.18gb"
MIG = (SLICES, SLICED, PROFILES)
MIXES = [PAIR, MIXED, *MIG]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedVgpuHost:
    found = SimulatedVgpuHost(tmp_path)
    found.add_card(CARD, TYPES, framebuffer=141, numvfs=8)
    found.redirect(monkeypatch.setattr)
    return found


def make(host: SimulatedVgpuHost, memory: Memory | None = None, **options: Any) -> GpuDriver:
    options = {"devices": ["address=*"], "reset": "never"} | options
    return make_driver(host, RULE, vgpu_layouts=MIXES, memory=memory, **options)


def current(driver: GpuDriver) -> str:
    device = discover(driver)
    return next(found for found in driver.layouts(device) if found.matches(device)).name


def partition(driver: GpuDriver, layout: str) -> None:
    driver.partition(WorkItem("gpus", CARD, "", ""), layout)


def state(host: SimulatedVgpuHost) -> tuple[bool, bool, bool, bool, dict[str, int], list[str]]:
    card = host.cards[CARD]
    modes = card.mig, card.pending_mig, card.heterogeneous, bool(card.functions)
    return *modes, dict(+card.instances), sorted(card.vgpus)


class Steps:
    """Steps of a change; the one with the number ``failing`` fails, before or after its effect."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.failing: int | None = None
        self.late = False

    def wrap(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        def step(*arguments: object) -> None:
            fails = len(self.names) == self.failing
            self.names.append(name)
            if fails and not self.late:
                raise DriverFailed("the step failed")
            function(*arguments)
            if fails:
                raise DriverFailed("the step failed")

        return step


def make_recorded(host: SimulatedVgpuHost, steps: Steps) -> GpuDriver:
    """Return a driver whose privileged changes are steps."""
    access = make_access(host)
    changed: dict[str, Any] = {name: steps.wrap(name, getattr(access, name)) for name in CHANGES}
    access = replace(access, **changed)
    return GpuDriver("gpus", make(host).options, host.root, access)


def each_to_each(names: Sequence[str]) -> list[str]:
    """Return a sequence of layouts in which each one follows each other one."""
    found: list[str] = []
    for number, name in enumerate(names):
        found += [name, *(n for other in names[number + 1 :] for n in (other, name))]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("needs_reset", sample([False, True], True))
def test_partition_to_each_layout_from_each_layout(
    host: SimulatedVgpuHost, needs_reset: bool
) -> None:
    host.cards[CARD].needs_reset = needs_reset
    driver = make(host)
    counts = {"whole": 1, PAIR: 2, MIXED: 3, SLICES: 7, SLICED: 5, PROFILES: 5}
    mixed = {"3g.71gb": 1, "1g.18gb": 4}
    instances = {SLICES: {"1g.18gb": 7}, SLICED: mixed, PROFILES: mixed}
    for layout in each_to_each(list(counts)):
        partition(driver, layout)
        assert current(driver) == layout
        mig = layout in instances
        mode = (mig, mig, layout == MIXED, layout != "whole")
        assert state(host) == (*mode, instances.get(layout, {}), [])
        parts = discover(driver).deployables
        assert sum(len(part.handles) for part in parts) == counts[layout]
        assert any("CUSTOM_VGPU_H200X_1_18C" in part.traits for part in parts) is mig
        classes = {part.resource_class for part in parts}
        assert classes == {"PGPU" if layout == "whole" else "VGPU"}


# Changes that are tried in the default tier, or with --all; all of them are in the last tier.
MARKS: dict[tuple[str, str, bool], pytest.MarkDecorator | tuple[()]] = {
    ("whole", SLICES, False): (),
    (SLICES, "whole", True): pytest.mark.matrix,
    (MIXED, SLICED, True): (),
    (SLICED, MIXED, False): pytest.mark.matrix,
    (SLICES, SLICED, True): pytest.mark.matrix,
    ("whole", PROFILES, True): (),
    (PROFILES, PAIR, False): pytest.mark.matrix,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("previous", "layout", "late"),
    [
        pytest.param(*case, marks=MARKS.get(case, pytest.mark.long))
        for first, second in permutations(["whole", *MIXES], 2)
        for case in ((first, second, False), (first, second, True))
    ],
)
def test_partition_that_fails_at_any_step_restores_the_card(
    host: SimulatedVgpuHost, previous: str, layout: str, late: bool
) -> None:
    """The step fails before or after its effect."""
    host.cards[CARD].needs_reset = late
    steps = Steps()
    driver = make_recorded(host, steps)
    partition(driver, previous)
    steps.names.clear()
    partition(driver, layout)
    names = tuple(steps.names)
    switches = (previous in MIG) != (layout in MIG)
    assert ("set_mig_mode" in names) == switches
    partition(driver, previous)
    before, device = state(host), discover(driver)
    # The vGPUs of a mix are alike: the first and the last of them are enough.
    numbers = [
        n for n, name in enumerate(names) if n in (0, len(names) - 1) or name != names[n - 1]
    ]
    for number in numbers:
        steps.names.clear()
        steps.failing, steps.late = number, late
        with pytest.raises(DriverFailed, match=f"^the step failed; {CARD} is as before$"):
            partition(driver, layout)
        steps.failing = None
        assert (state(host), current(driver)) == (before, previous), names[number]
        assert discover(driver) == device, "what is offered, and what operators see"
    partition(driver, layout)
    assert current(driver) == layout


def test_partition_whose_mode_cannot_be_changed_back_says_so(host: SimulatedVgpuHost) -> None:
    driver = make(host)
    host.failing = {"instances", "mig 0"}
    with pytest.raises(
        DriverFailed, match="Insufficient Resources; the steps before could not be undone: the MIG"
    ):
        partition(driver, SLICES)
    assert current(driver) == "other"
    device = discover(driver)
    assert device.deployables == ()
    assert "it is in MIG mode" in device.vendor_board_info[NOT_OFFERED]
    host.failing = set()
    partition(driver, "whole")
    assert offered(driver) == {CARD: [CARD]}


def test_partition_of_a_card_that_nvml_stops_to_read_is_not_as_before(
    host: SimulatedVgpuHost,
) -> None:
    """The last known facts are those before the change: they hide what is to be undone."""
    is_failing, access = False, make_access(host)

    def set_mig_mode(card: str, enable: bool, program: str) -> None:
        nonlocal is_failing
        access.set_mig_mode(card, enable, program)
        is_failing = enable

    failing_access = replace(
        access,
        set_mig_mode=set_mig_mode,
        nvml=lambda address: None if is_failing else host.read_facts(address),
        mig_mode=lambda address: None if is_failing else host.read_mig_mode(address),
    )
    driver = GpuDriver("gpus", make(host).options, host.root, failing_access)
    assert current(driver) == "whole"
    with pytest.raises(DriverFailed, match="; the steps before could not be undone: NVML cannot"):
        partition(driver, SLICES)
    assert host.cards[CARD].mig
    assert (current(driver), offered(driver)) == ("other", {})
    is_failing = False
    partition(driver, "whole")
    assert (current(driver), offered(driver)) == ("whole", {CARD: [CARD]})
    is_failing, before = True, state(host)
    with pytest.raises(DriverFailed, match=f"^NVML cannot read {CARD}"):
        partition(driver, SLICES)
    assert state(host) == before


def test_partition_of_a_card_with_an_open_node_is_refused(host: SimulatedVgpuHost) -> None:
    driver = make(host)
    host.failing = {"mig 1"}
    with pytest.raises(DriverFailed, match=f"In use by another client; {CARD} is as before"):
        partition(driver, SLICES)
    assert state(host) == (False, False, False, False, {}, [])
    assert host.commands == []


def test_card_in_mig_mode_is_not_offered_as_a_whole(host: SimulatedVgpuHost) -> None:
    """An operator switched the mode; without layouts of the card, this is left to the operator."""
    host.request_mig_mode(CARD, enable=True)
    host._activate(host.cards[CARD])
    driver = make(host)
    assert (current(driver), offered(driver)) == ("other", {})
    with pytest.raises(DriverFailed, match="it is in MIG mode"):
        driver.prepare(WorkItem("gpus", CARD, CARD, CARD), None)
    partition(driver, "whole")
    assert (current(driver), offered(driver)) == ("whole", {CARD: [CARD]})
    assert state(host)[0] is False


def test_mix_whose_mig_mode_another_program_switched_is_another_layout(
    host: SimulatedVgpuHost,
) -> None:
    driver = make(host)
    partition(driver, PAIR)
    host.manage_sriov(CARD, enable=False)
    host.request_mig_mode(CARD, enable=True)
    host.manage_sriov(CARD, enable=True)
    driver = make(host, driver.memory)
    assert current(driver) == "other"
    partition(driver, PAIR)
    assert (current(driver), state(host)[:2]) == (PAIR, (False, False))


def test_partition_that_fails_in_mig_mode_without_functions_restores_this(
    host: SimulatedVgpuHost,
) -> None:
    """As after a boot of a card that keeps the mode."""
    host.request_mig_mode(CARD, enable=True)
    driver = make(host)
    before = state(host)
    host.failing = {"current_vgpu_type"}
    with pytest.raises(DriverFailed, match=f"{CARD} is as before"):
        partition(driver, SLICES)
    assert (state(host), current(driver)) == (before, "other")


@pytest.mark.parametrize("layout", ["whole", PAIR, SLICES])
def test_card_whose_mode_is_pending_is_not_offered_as_a_whole(
    host: SimulatedVgpuHost, layout: str
) -> None:
    """The reset for a server would switch the mode; the next change of the layout ends this."""
    host.cards[CARD].needs_reset = True
    assert host.request_mig_mode(CARD, enable=True) is not None
    driver = make(host)
    device = discover(driver)
    assert (current(driver), device.deployables) == ("other", ())
    assert "a change of its MIG mode is pending" in device.vendor_board_info[NOT_OFFERED]
    partition(driver, layout)
    assert current(driver) == layout
    mig = layout == SLICES
    assert state(host)[:2] == (mig, mig)


def test_mix_of_a_card_whose_mode_is_pending_is_applied_with_the_mode(
    host: SimulatedVgpuHost,
) -> None:
    host.cards[CARD].needs_reset = True
    driver = make(host)
    partition(driver, PAIR)
    host.cards[CARD].pending_mig = True
    partition(driver, MIXED)
    assert (current(driver), state(host)[:2]) == (MIXED, (False, False))


@pytest.mark.parametrize("kept", [False, True])
def test_partition_after_a_boot_applies_the_mode_again(host: SimulatedVgpuHost, kept: bool) -> None:
    """The mode of some cards is lost with the boot, that of others is not."""
    host.cards[CARD].needs_reset = kept
    memory = VolatileMemory()
    partition(make(host, memory), SLICED)
    before = state(host)
    host.reboot()
    driver = make(host, memory)
    assert current(driver) == "other"
    partition(driver, SLICED)
    assert (state(host), current(driver)) == (before, SLICED)


def test_partition_with_types_that_nvml_lists_in_one_mode_only(host: SimulatedVgpuHost) -> None:
    host.cards[CARD].lists_all = False
    memory = VolatileMemory()
    driver = make(host, memory)
    names = [layout.name for layout in driver.layouts(discover(driver))]
    assert names == ["whole", PAIR, MIXED]
    assert [text for text in driver.remarks if "enable the MIG mode once" in text]
    host.request_mig_mode(CARD, enable=True)
    host._activate(host.cards[CARD])
    driver = make(host, memory)
    names = [layout.name for layout in driver.layouts(discover(driver))]
    assert names == ["other", "whole", *MIXES]
    for layout in ("whole", SLICES, MIXED):
        partition(driver, layout)
        assert current(driver) == layout
    assert driver.remarks == ()
