# SPDX-License-Identifier: Apache-2.0
"""Explanations and capacities of hosts with device sets agree with a real Placement."""

from collections.abc import Sequence
from itertools import combinations_with_replacement
from urllib.parse import urlencode

import pytest
import sqlalchemy as sa

from cyborg.core.explain.capacity import compute_capacity
from cyborg.core.explain.explanation import GroupDemand, ProviderState
from cyborg.core.explain.predicates import Predicate
from cyborg.core.explain.request_fit import RequestFit, evaluate_request
from cyborg.core.inventory.device_set import OfferMode, SetKind
from cyborg.db import schema
from cyborg.db.explain import provider_states
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.device_sets.host import GPU, SetHost, gpu_address
from cyborg.tests.fixtures.device_sets.saved import make_set_host
from cyborg.tests.fixtures.machine.tiers import pick_points, sample

__all__ = ["node", "placement_adapter"]

SIZES = (1, 2, 3, 4, 8)
PLAIN = SetKind.PCIE  # a set without work on its host


def make_demands(*sizes: int) -> list[GroupDemand]:
    return [GroupDemand(number, {GPU: size}) for number, size in enumerate(sizes)]


def read_states(host: SetHost, uuids: Sequence[str] | None = None) -> list[ProviderState]:
    with host.engine.connect() as connection:
        return provider_states.find(connection, host=host.node.name, uuids=uuids)


def find_candidates(host: SetHost, demands: Sequence[GroupDemand]) -> set[str]:
    """Return the providers of all allocation candidates of the host, as Nova asks for them."""
    query = {"limit": "1000", "group_policy": "none"}
    for demand in demands:
        query[f"resources_{demand.number}"] = f"{GPU}:{demand.count}"
        query[f"in_tree_{demand.number}"] = host.node.uuid
    answer = host.node.client.get(f"/allocation_candidates?{urlencode(query)}")
    assert answer.status_code == 200, answer.text
    requests = answer.json()["allocation_requests"]
    return {uuid for request in requests for uuid in request["allocations"]}


def find_fitting(fit: RequestFit, states: Sequence[ProviderState]) -> set[str]:
    return {state.uuid for state in states if None in fit.failures(state)}


def assert_equal_to_placement(host: SetHost) -> None:
    states = read_states(host)
    triples = list(combinations_with_replacement(SIZES, 3))
    for sizes in (
        *combinations_with_replacement(SIZES, 1),
        *combinations_with_replacement(SIZES, 2),
        *(triples[point] for point in pick_points(len(triples))),
    ):
        demands = make_demands(*sizes)
        fit = evaluate_request(demands, states)
        candidates = find_candidates(host, demands)
        assert find_fitting(fit, states) == candidates, sizes
        assert bool(fit.fitting_hosts) == bool(candidates), sizes


@pytest.mark.slow
@pytest.mark.parametrize("mode", sample(OfferMode, OfferMode.DISJOINT))
def test_fitting_sets_are_those_of_placement(
    sqlite_engine: sa.Engine, node: Node, mode: OfferMode
) -> None:
    host = make_set_host(
        sqlite_engine, node, kind=PLAIN, mode=mode, wanted={"4": 1, "2": 1, "1": 2}
    )
    assert_equal_to_placement(host)
    (single, pair) = (
        next(name for name, size in host.offered().items() if size == n) for n in (1, 2)
    )
    # As Nova does: first the allocation, then the bind.
    for name in (single,) if host.family[single] <= host.family[pair] else (single, pair):
        size = len(host.family[name])
        host.bind(name, instance=host.node.allocate(host.provider(name), GPU, size))
    host.publish()
    assert_equal_to_placement(host)


def test_capacity_is_that_of_offered_sets(sqlite_engine: sa.Engine, node: Node) -> None:
    host = make_set_host(sqlite_engine, node, kind=PLAIN, wanted={"4": 1, "2": 1, "1": 2})

    def count(size: int) -> tuple[int, int]:
        (found,) = compute_capacity(make_demands(size), read_states(host))
        return found.servers, found.losses.get(Predicate.WITHHELD, 0)

    assert [count(size) for size in SIZES] == [(2, 6), (1, 6), (0, 0), (1, 4), (0, 8)]


def test_set_that_is_not_offered_is_withheld_with_its_reason(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    host = make_set_host(sqlite_engine, node, kind=PLAIN)
    states = read_states(host)
    fit = evaluate_request(make_demands(4), states)
    found = {state.device: fit.failures(state)[0] for state in states}
    assert found.keys() == {f"hgx:{name}" for name in host.family}
    texts = {name: failure.text if failure else None for name, failure in found.items()}
    reason = "overlaps hgx:0, which is offered: until sets of 4 are short"
    assert texts["hgx:1"] == f"device set is not offered: {reason}"
    assert texts["hgx:0"] == "device set has another number of devices: 8, group 0 requests 4"


def test_set_with_a_gpu_in_mig_mode_is_withheld_with_its_reason(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    host = make_set_host(sqlite_engine, node, kind=PLAIN)
    reason = f"device {gpu_address('01')} is in MIG mode, in which it has no NVLink"
    host.withhold("01", reason)
    with_it = {name for name, units in host.family.items() if "01" in units}
    assert with_it
    assert not with_it & host.offered().keys()
    assert host.offered(), "the best of the others"
    states = {state.device: state for state in read_states(host)}
    for name in with_it:
        fit = evaluate_request(make_demands(len(host.family[name])), list(states.values()))
        failure = fit.failures(states[f"hgx:{name}"])[0]
        assert failure is not None
        assert failure.predicate is Predicate.WITHHELD
        assert failure.text == f"device set is not offered: {reason}"


def test_member_alone_is_explained_to_a_bind_only(sqlite_engine: sa.Engine, node: Node) -> None:
    host = make_set_host(sqlite_engine, node, kind=PLAIN)
    (row,) = rows.read(sqlite_engine, schema.deployables, address=gpu_address("01"))
    assert row["rp_uuid"] not in {state.uuid for state in read_states(host)}
    (state,) = read_states(host, [row["rp_uuid"]])
    (failure,) = evaluate_request(make_demands(1), [state]).failures(state)
    assert failure is not None
    assert failure.predicate is Predicate.IN_DEVICE_SETS


def test_owner_of_a_set_is_that_of_its_provider(sqlite_engine: sa.Engine, node: Node) -> None:
    host = make_set_host(sqlite_engine, node, kind=PLAIN)
    instance = host.bind("0", project_id="p1")
    host.publish()
    uuid = host.provider("0")
    with sqlite_engine.connect() as connection:
        holders = provider_states.find_holders(connection, [uuid])
        own = provider_states.find_own_holders(connection, "p1", {GPU})
    assert {(each.instance, each.project) for each in holders[uuid]} == {(instance, "p1")}
    assert own[uuid].total == 8
