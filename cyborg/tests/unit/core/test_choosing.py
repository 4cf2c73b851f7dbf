# SPDX-License-Identifier: Apache-2.0
"""Which handle serves which request."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.choosing import Candidate, Need, _Search, choose, refusals
from cyborg.core.errors import NoHandle, NotFound

NEED = Need("r0", "rp", "h", "FPGA")
FREE = Candidate(1, "u1", "rp", "h", "FPGA")

candidates = st.builds(
    Candidate,
    handle_id=st.integers(1, 8),
    handle=st.just("u"),
    provider=st.sampled_from(["rp", "rp2"]),
    host=st.just("h"),
    resource_class=st.sampled_from(["FPGA", "PGPU"]),
    traits=st.frozensets(st.sampled_from(["CUSTOM_A", "CUSTOM_B"])),
    device_status=st.sampled_from(["enabled", "enabled", "maintaining"]),
    draining=st.booleans(),
    taken=st.booleans(),
)
needs = st.builds(
    Need,
    request=st.sampled_from(["r0", "r1", "r2", "r3"]),
    provider=st.sampled_from(["rp", "rp2"]),
    host=st.just("h"),
    resource_class=st.sampled_from(["FPGA", "PGPU"]),
    required=st.frozensets(st.sampled_from(["CUSTOM_A"])),
    forbidden=st.frozensets(st.sampled_from(["CUSTOM_B"])),
)


@given(
    st.lists(needs, min_size=1, max_size=4, unique_by=lambda n: n.request),
    st.lists(candidates, max_size=8, unique_by=lambda c: c.handle_id),
    st.integers(),
)
def test_all_or_none_and_each_handle_once(
    wishes: list[Need], offered: list[Candidate], seed: int
) -> None:
    by_id = {c.handle_id: c for c in offered}
    try:
        chosen = choose(wishes, offered, random.Random(seed))
    except NotFound:
        assert {n.provider for n in wishes} - {c.provider for c in offered}
        return
    except NoHandle as bad:
        assert bad.details["reasons"]
        assert set(bad.details["reasons"]) <= {n.request for n in wishes}
        return
    assert set(chosen) == {n.request for n in wishes}
    assert len(set(chosen.values())) == len(chosen)
    for need in wishes:
        given_ = by_id[chosen[need.request]]
        assert given_.provider == need.provider
        assert refusals(need, given_) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_status": "maintaining"}, "device is under maintenance"),
        ({"health": "unhealthy"}, "device is unhealthy"),
        ({"draining": True}, "device is draining"),
        ({"setup_required": True}, "setup required"),
        ({"reboot_required": True}, "reboot required"),
        ({"taken": True}, "handle is taken"),
        ({"resource_class": "PGPU"}, "resource class differs: PGPU"),
        ({"traits": frozenset({"CUSTOM_B"})}, "trait forbidden: CUSTOM_B"),
    ],
)
def test_the_reason_is_told(change: dict[str, Any], reason: str) -> None:
    need = replace(NEED, forbidden=frozenset({"CUSTOM_B"}))
    offered = [replace(FREE, handle_id=n, **change) for n in range(3)]
    with pytest.raises(NoHandle) as bad:
        choose([need], offered, random.Random(0))
    (told,) = bad.value.details["reasons"]["r0"]
    assert told == {"provider": "rp", "reason": reason, "handles": 3}
    assert reason in bad.value.message


def test_a_missing_trait_is_named() -> None:
    need = replace(NEED, required=frozenset({"CUSTOM_A"}))
    with pytest.raises(NoHandle, match="trait missing: CUSTOM_A"):
        choose([need], [FREE], random.Random(0))


def test_one_handle_serves_one_of_two() -> None:
    with pytest.raises(NoHandle) as bad:
        choose([NEED, replace(NEED, request="r1")], [FREE], random.Random(0))
    (told,) = bad.value.details["reasons"]["r1"]
    assert told["reason"] == "claimed by another request of this call"


def test_a_provider_elsewhere_is_not_found() -> None:
    with pytest.raises(NotFound, match="is on host h"):
        choose([replace(NEED, host="other")], [FREE], random.Random(0))
    with pytest.raises(NotFound, match="has no handle"):
        choose([replace(NEED, provider="none")], [FREE], random.Random(0))


def test_the_message_stays_short() -> None:
    wishes = [replace(NEED, request=f"r{n}") for n in range(1000)]
    with pytest.raises(NoHandle) as bad:
        choose(wishes, [replace(FREE, taken=True)], random.Random(0))
    assert len(bad.value.message) < 500
    assert len(bad.value.details["reasons"]) == 1000


def test_the_choice_is_shuffled() -> None:
    offered = [replace(FREE, handle_id=n) for n in range(16)]
    seen = {choose([NEED], offered, random.Random(seed))["r0"] for seed in range(64)}
    assert len(seen) > 8


def test_many_needs_look_at_each_handle_once() -> None:
    """A thousand refusals over thousands of handles are one walk, and so is a thousand grants."""
    wishes = [replace(NEED, request=f"r{n}") for n in range(1000)]
    looked = 0

    class Counted(list[Candidate]):
        def __getitem__(self, at: Any) -> Any:
            nonlocal looked
            looked += 1
            return super().__getitem__(at)

    search = _Search(Counted(replace(FREE, handle_id=n, taken=True) for n in range(3000)))
    assert all(search.next(need, set()) is None for need in wishes)
    assert looked == 3000
    free = [replace(FREE, handle_id=n) for n in range(1000)]
    assert len(choose(wishes, free, random.Random(0))) == 1000
