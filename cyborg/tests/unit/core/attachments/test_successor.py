# SPDX-License-Identifier: Apache-2.0
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.attachments.attachment import AttachmentState, Step
from cyborg.core.attachments.successor import OwnedUnit, describe_missing, describe_work, pair_units
from cyborg.core.errors import Conflict
from cyborg.core.explain.explanation import GroupDemand, HandleCounts, ProviderState
from cyborg.core.explain.predicates import Predicate
from cyborg.core.inventory.device_state import DeviceFacts

GROUPS = st.lists(st.integers(0, 4), min_size=1, max_size=12)


@pytest.mark.slow
@given(GROUPS, st.randoms())
def test_pair_units_pairs_each_unit_with_one_of_its_group(groups: list[int], order: object) -> None:
    old = [OwnedUnit(n, group, "old") for n, group in enumerate(groups)]
    new = [OwnedUnit(100 + n, group, "new") for n, group in enumerate(groups)]
    order.shuffle(old)  # type: ignore[attr-defined]
    order.shuffle(new)  # type: ignore[attr-defined]
    pairs = pair_units(old, new)
    assert {a.arq_id for a, _ in pairs} == {unit.arq_id for unit in old}
    assert {b.arq_id for _, b in pairs} == {unit.arq_id for unit in new}
    assert all(a.group == b.group for a, b in pairs)


@given(GROUPS, GROUPS)
def test_pair_units_refuses_other_numbers_of_units(first: list[int], second: list[int]) -> None:
    old = [OwnedUnit(n, group, "old") for n, group in enumerate(first)]
    new = [OwnedUnit(100 + n, group, "new") for n, group in enumerate(second)]
    if Counter(first) == Counter(second):
        assert len(pair_units(old, new)) == len(first)
    else:
        with pytest.raises(Conflict, match="has changed"):
            pair_units(old, new)


def state(
    device: str, *, taken: int = 0, total: int = 1, facts: DeviceFacts | None = None
) -> ProviderState:
    counts = HandleCounts(total=total, taken=taken)
    return ProviderState(
        uuid=f"provider of {device}",
        host="compute-1",
        device_uuid=f"uuid of {device}",
        device=device,
        resource_class="FPGA",
        facts=facts or DeviceFacts(),
        handles=counts,
    )


def test_describe_missing_names_the_first_failure_of_each_other_device() -> None:
    demands = [GroupDemand(0, {"FPGA": 1})]
    own = state("01", facts=DeviceFacts(status="maintaining"))
    full, closed = state("02", taken=1), state("03", facts=DeviceFacts(status="maintaining"))
    text = describe_missing(demands, [own, full, closed], "uuid of 01")
    assert text == (
        "group 0: 02: handle is taken (1 of 1 handles); 03: device is under maintenance"
    )
    assert describe_missing(demands, [own], "uuid of 01") == "group 0: no other device"


def test_describe_missing_of_an_attachment_names_no_device() -> None:
    sick = state("0000:03:00.0", facts=DeviceFacts(health="unhealthy"))
    sick = replace(sick, remarks={Predicate.UNHEALTHY: "serial 12"})
    full = [state(f"0000:0{number}:00.0", taken=1) for number in (1, 2)]
    text = describe_missing([GroupDemand(0, {"FPGA": 1})], [sick, *full], None)
    assert text == "group 0: handle is taken (2 devices); device is unhealthy (1 devices)"
    text = describe_missing([GroupDemand(0, {"FPGA": 1}, frozenset({"CUSTOM_A"}))], full, None)
    assert text == "group 0: trait missing: CUSTOM_A (2 devices)"
    assert describe_missing([GroupDemand(0, {"FPGA": 1})], [], None) == "group 0: no device"


def test_describe_missing_counts_the_devices_that_it_does_not_name() -> None:
    full = [state(f"{number:02}", taken=1) for number in range(2, 8)]
    text = describe_missing([GroupDemand(0, {"FPGA": 1})], full, "uuid of 01")
    assert text.endswith("3 more devices")


def test_describe_missing_names_the_groups_that_do_not_fit_together() -> None:
    demands = [GroupDemand(0, {"FPGA": 1}), GroupDemand(1, {"FPGA": 1})]
    text = describe_missing(demands, [state("02")], "uuid of 01")
    assert text.startswith("groups 0 and 1 together need more handles than host ")


def test_describe_missing_without_a_failing_group_says_so() -> None:
    demands = [GroupDemand(0, {"FPGA": 1}), GroupDemand(1, {"FPGA": 1})]
    both = [state("02"), state("03")]
    assert describe_missing(demands, both, "uuid of 01").endswith("or Placement has no room")


@pytest.mark.parametrize(
    ("state", "step", "text"),
    [
        (AttachmentState.ATTACHING, Step.PREPARE, "is being undone"),
        (AttachmentState.ATTACHING, Step.CLEAN, "is being undone"),
        (AttachmentState.DETACHING, Step.GUEST, "stop or delete the server"),
        (AttachmentState.DETACHING, Step.CLEAN, "is being released"),
        (None, None, "is being undone"),
    ],
)
def test_describe_work_depends_on_the_step(state: str | None, step: str | None, text: str) -> None:
    assert text in describe_work(state, step)
