# SPDX-License-Identifier: Apache-2.0
"""Selection of handles for ARQs."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.binding.profile import AttachTarget
from cyborg.core.errors import NoHandle
from cyborg.core.explain.selection import (
    Candidate,
    Demand,
    _Search,
    choose_handles,
    explain_rejection,
)
from cyborg.core.inventory.device_state import DeviceFacts

UUID = "4d023c23-2686-4788-8257-20f0da2c19ef"
NEED = Demand("r0", "rp", "h", "FPGA")
FREE = Candidate(1, "u1", "rp", "FPGA")

candidate_values = st.builds(
    Candidate,
    handle_id=st.integers(1, 8),
    handle=st.just("u"),
    provider=st.sampled_from(["rp", "rp2"]),
    resource_class=st.sampled_from(["FPGA", "PGPU"]),
    traits=st.frozensets(st.sampled_from(["CUSTOM_A", "CUSTOM_B"])),
    facts=st.builds(
        DeviceFacts,
        status=st.sampled_from(["enabled", "enabled", "maintaining"]),
        draining=st.booleans(),
    ),
    in_use=st.booleans(),
)
demand_values = st.builds(
    Demand,
    arq_uuid=st.sampled_from(["r0", "r1", "r2", "r3"]),
    provider=st.sampled_from(["rp", "rp2"]),
    host=st.just("h"),
    resource_class=st.sampled_from(["FPGA", "PGPU"]),
    required=st.frozensets(st.sampled_from(["CUSTOM_A"])),
    forbidden=st.frozensets(st.sampled_from(["CUSTOM_B"])),
)


@given(
    st.lists(demand_values, min_size=1, max_size=4, unique_by=lambda n: n.arq_uuid),
    st.lists(candidate_values, max_size=8, unique_by=lambda c: c.handle_id),
    st.integers(),
)
def test_choose_handles_all_or_none(
    demands: list[Demand], offered: list[Candidate], seed: int
) -> None:
    by_id = {c.handle_id: c for c in offered}
    try:
        selected = choose_handles(demands, offered, random.Random(seed))
    except NoHandle as exc:
        assert exc.details["reasons"]
        assert set(exc.details["reasons"]) <= {n.arq_uuid for n in demands}
        return
    assert set(selected) == {n.arq_uuid for n in demands}
    assert len(set(selected.values())) == len(selected)
    for demand in demands:
        candidate = by_id[selected[demand.arq_uuid]]
        assert candidate.provider == demand.provider
        assert explain_rejection(demand, candidate) == []


def _with(**facts: Any) -> dict[str, Any]:
    return {"facts": DeviceFacts(**facts)}


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        (_with(status="maintaining"), "maintaining", "device is under maintenance"),
        (_with(health="unhealthy"), "unhealthy", "device is unhealthy"),
        (_with(draining=True), "draining", "device is draining"),
        (_with(setup_required=True), "setup_required", "setup required"),
        (_with(reboot_required=True), "reboot_required", "reboot required"),
        (_with(failing=True), "failing", "the last prepare jobs of the device failed"),
        (_with(deliverable=False), "undeliverable", "device cannot be attached to an instance"),
        ({"in_use": True}, "taken", "handle is taken"),
        ({"resource_class": "PGPU"}, "resource_class", "resource class differs: PGPU"),
        ({"traits": frozenset({"CUSTOM_B"})}, "trait_forbidden", "trait forbidden: CUSTOM_B"),
    ],
)
def test_explain_rejection_reason(change: dict[str, Any], code: str, reason: str) -> None:
    demand = replace(NEED, forbidden=frozenset({"CUSTOM_B"}))
    offered = [replace(FREE, handle_id=n, **change) for n in range(3)]
    with pytest.raises(NoHandle) as exc:
        choose_handles([demand], offered, random.Random(0))
    (rejection,) = exc.value.details["reasons"]["r0"]
    expected = {"group": 0, "provider": "rp", "code": code, "reason": reason, "handles": 3}
    assert rejection == expected
    assert reason in exc.value.message


def test_choose_handles_missing_trait_is_reported() -> None:
    demand = replace(NEED, required=frozenset({"CUSTOM_A"}))
    with pytest.raises(NoHandle, match="trait missing: CUSTOM_A"):
        choose_handles([demand], [FREE], random.Random(0))


def test_choose_handles_port_takes_only_a_handle_with_a_network() -> None:
    port = replace(NEED, arq_uuid="r1", target=AttachTarget.PORT, profile="sriov")
    plain = replace(FREE, device="0000:3b:00.0")
    connected = replace(plain, handle_id=2, info={"physical_network": "physnet1"})
    assert choose_handles([port], [plain, connected], random.Random(0)) == {"r1": 2}
    assert choose_handles([NEED], [plain], random.Random(0)) == {"r0": 1}
    with pytest.raises(NoHandle) as exc:
        choose_handles([NEED, port], [plain, replace(plain, handle_id=2)], random.Random(0))
    (rejection,) = exc.value.details["reasons"]["r1"]
    assert "device 0000:3b:00.0 have no physical_network" in str(rejection["reason"])
    assert "profile sriov" in exc.value.message


@pytest.mark.parametrize("seed", range(8))
def test_choose_handles_leaves_the_handle_with_a_network_to_the_port(seed: int) -> None:
    port = replace(NEED, arq_uuid="r1", target=AttachTarget.PORT, profile="sriov")
    connected = replace(FREE, handle_id=2, info={"physical_network": "physnet1"})
    chosen = choose_handles([NEED, port], [FREE, connected], random.Random(seed))
    assert chosen == {"r0": FREE.handle_id, "r1": 2}


@pytest.mark.parametrize("seed", range(32))
def test_choose_handles_leaves_handles_with_a_network_to_later_servers(seed: int) -> None:
    """Two servers with a port and a device find handles, one after the other."""
    order = random.Random(seed)
    port = replace(NEED, arq_uuid="r1", target=AttachTarget.PORT, profile="sriov")
    network = {"physical_network": "physnet1"}
    free = [replace(FREE, handle_id=n, info=network if n < 2 else {}) for n in range(4)]
    for _ in range(2):
        chosen = set(choose_handles([NEED, port], free, order).values())
        free = [candidate for candidate in free if candidate.handle_id not in chosen]
    assert free == []


def test_choose_handles_one_handle_for_two_demands_is_rejected() -> None:
    with pytest.raises(NoHandle) as exc:
        choose_handles([NEED, replace(NEED, arq_uuid="r1")], [FREE], random.Random(0))
    (rejection,) = exc.value.details["reasons"]["r1"]
    assert rejection["reason"] == "claimed by another request of this call"


def test_choose_handles_provider_without_candidates_has_no_handle() -> None:
    with pytest.raises(NoHandle, match="group 0: no handle"):
        choose_handles([replace(NEED, provider="none")], [FREE], random.Random(0))


def test_choose_handles_error_names_groups_and_no_arqs() -> None:
    demands = [
        *(replace(NEED, arq_uuid=f"a{n}", profile="fpga") for n in range(3)),
        replace(NEED, arq_uuid="b0", profile="fpga", group=1, resource_class="PGPU"),
    ]
    with pytest.raises(NoHandle) as exc:
        choose_handles(demands, [replace(FREE, in_use=True)], random.Random(0))
    assert exc.value.message == (
        "no free attach handle for device profile fpga: group 0: handle is taken (1 handles). "
        "group 1: resource class differs: FPGA (1 handles); handle is taken (1 handles). "
        "What to do: see cyborg device-profile-explain fpga"
    )
    demands[3] = replace(demands[3], profile="gpu")
    commands = r"see cyborg device-profile-explain fpga, cyborg device-profile-explain gpu$"
    with pytest.raises(NoHandle, match=rf"profile fpga: .*of device profile gpu: .*{commands}"):
        choose_handles(demands, [replace(FREE, in_use=True)], random.Random(0))


@pytest.mark.parametrize(
    ("profile", "subject", "command"),
    [
        (
            "fpga",
            " for device profile fpga",
            ". What to do: see cyborg device-profile-explain fpga",
        ),
        (
            f"ctx-{UUID}",
            f" for device context {UUID}",
            f". What to do: see cyborg device-context-explain {UUID}",
        ),
        (f"acc-{UUID}", " for the accelerator", ""),
        ("", "", ""),
    ],
)
def test_choose_handles_error_names_what_the_user_knows_and_what_to_do(
    profile: str, subject: str, command: str
) -> None:
    with pytest.raises(NoHandle) as exc:
        choose_handles(
            [replace(NEED, profile=profile)], [replace(FREE, in_use=True)], random.Random(0)
        )
    assert exc.value.message == (
        f"no free attach handle{subject}: group 0: handle is taken (1 handles){command}"
    )


def test_choose_handles_error_message_is_short() -> None:
    demands = [replace(NEED, arq_uuid=f"r{n}") for n in range(1000)]
    with pytest.raises(NoHandle) as exc:
        choose_handles(demands, [replace(FREE, in_use=True)], random.Random(0))
    assert len(exc.value.message) < 500
    assert len(exc.value.details["reasons"]) == 1000


def test_choose_handles_is_shuffled() -> None:
    offered = [replace(FREE, handle_id=n) for n in range(16)]
    chosen_ids = {choose_handles([NEED], offered, random.Random(seed))["r0"] for seed in range(64)}
    assert len(chosen_ids) > 8


def test_choose_handles_examines_each_handle_once() -> None:
    """A thousand demands examine thousands of handles in one pass, met or rejected."""
    demands = [replace(NEED, arq_uuid=f"r{n}") for n in range(1000)]
    examined = 0

    class Counted(list[Candidate]):
        def __getitem__(self, at: Any) -> Any:
            nonlocal examined
            examined += 1
            return super().__getitem__(at)

    search = _Search(Counted(replace(FREE, handle_id=n, in_use=True) for n in range(3000)))
    assert all(search.next(demand, set()) is None for demand in demands)
    assert examined == 3000
    free = [replace(FREE, handle_id=n) for n in range(1000)]
    assert len(choose_handles(demands, free, random.Random(0))) == 1000


def test_choose_handles_accepts_the_trait_of_all_providers() -> None:
    demand = replace(NEED, required=frozenset({"OWNER_CYBORG"}))
    assert choose_handles([demand], [FREE], random.Random(0)) == {"r0": 1}
