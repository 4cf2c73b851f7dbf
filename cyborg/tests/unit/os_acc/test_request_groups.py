# SPDX-License-Identifier: Apache-2.0
"""Request groups of contexts and profiles, and the answer of a real Placement to them."""

from typing import Any
from urllib.parse import parse_qsl, urlencode
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg import os_acc
from cyborg.core.binding.profile import Group, parse_groups
from cyborg.core.contexts import context as device_contexts
from cyborg.core.errors import Invalid
from cyborg.core.naming import OWNER_TRAIT
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.hosts import strategies
from cyborg.tests.unit.os_acc.samples import ARQ, INSTANCE, OTHER_ARQ, make_context

__all__ = ["node", "placement_adapter"]

PORT = "1c2b3a49-5867-4a5b-8c9d-0e1f2a3b4c88"


def test_request_groups_have_names_and_values_of_the_groups() -> None:
    first, second = os_acc.to_request_groups(make_context())
    assert first == os_acc.RequestGroup(
        "device_profile_0",
        {"FPGA": 1},
        required=frozenset({"CUSTOM_GZIP", OWNER_TRAIT}),
        forbidden=frozenset(),
    )
    assert second == os_acc.RequestGroup(
        "device_profile_1",
        {"CUSTOM_QAT": 2, "PGPU": 1},
        required=frozenset({"CUSTOM_B", OWNER_TRAIT}),
        forbidden=frozenset({"CUSTOM_A"}),
    )


def test_request_groups_of_a_port_have_its_uuid() -> None:
    groups = os_acc.to_request_groups(make_context(), PORT.upper())
    names = [group.name for group in groups]
    assert names == [f"device_profile_0{PORT}", f"device_profile_1{PORT}"]


# One group, because all of them together may exceed the limit of a profile.
@pytest.mark.slow
@given(st.tuples(strategies.groups()))
def test_request_groups_keep_each_resource_and_trait(groups: tuple[Group, ...]) -> None:
    result = os_acc.to_request_groups({"groups": [group.to_dict() for group in groups]})
    assert [(g.resources, g.required, g.forbidden) for g in result] == [
        (group.resources, group.required | {OWNER_TRAIT}, group.forbidden) for group in groups
    ]


def test_query_of_one_group_has_no_policy() -> None:
    (group,) = os_acc.to_request_groups({"groups": [{"resources:FPGA": "1"}]})
    assert os_acc.build_query([group]) == {
        "resourcesdevice_profile_0": "FPGA:1",
        "requireddevice_profile_0": "OWNER_CYBORG",
    }


def test_query_of_two_groups_allows_the_same_provider() -> None:
    assert os_acc.build_query(os_acc.to_request_groups(make_context())) == {
        "resourcesdevice_profile_0": "FPGA:1",
        "requireddevice_profile_0": "CUSTOM_GZIP,OWNER_CYBORG",
        "resourcesdevice_profile_1": "CUSTOM_QAT:2,PGPU:1",
        "requireddevice_profile_1": "CUSTOM_B,OWNER_CYBORG,!CUSTOM_A",
        "group_policy": "none",
    }


@pytest.mark.parametrize(
    ("context", "field"),
    [
        (None, "context"),
        ([make_context()], "context"),
        ({}, "groups"),
        (make_context(groups=[]), "groups"),
        (make_context(groups=[{"resources:FPGA": "0"}]), "groups[0]['resources:FPGA']"),
        (make_context(groups=[{"trait:CUSTOM_A": "required"}]), "groups[0]"),
        (
            make_context(groups=[{"resources:FPGA": 1, "trait:A&b=": "required"}]),
            "groups[0]['trait:A&b=']",
        ),
        (
            make_context(groups=[{"resources:FPGA": 1, "trait:OWNER_CYBORG": "forbidden"}]),
            "groups[0]['trait:OWNER_CYBORG']",
        ),
    ],
)
def test_request_groups_of_malformed_context_name_the_field(context: Any, field: str) -> None:
    with pytest.raises(Invalid) as error:
        os_acc.to_request_groups(context)
    assert error.value.details["field"] == field


@pytest.mark.parametrize("port", ["", "x", 7])
def test_request_groups_of_malformed_port_name_the_field(port: Any) -> None:
    with pytest.raises(Invalid) as error:
        os_acc.to_request_groups(make_context(), port)
    assert error.value.details["field"] == "port_uuid"


def add_card(node: Node, resource_class: str, *traits: str) -> str:
    """Create the provider of a card below a compute node; return its uuid."""
    uuid = str(uuid4())
    body = {"uuid": uuid, "name": f"card-{uuid}", "parent_provider_uuid": node.uuid}
    assert node.client.post("/resource_providers", json=body).status_code == 200
    for name in (resource_class, *traits):
        if name.startswith("CUSTOM_"):
            kind = "resource_classes" if name == resource_class else "traits"
            assert node.client.put(f"/{kind}/{name}").status_code in (201, 204)
    inventories = {resource_class: {"total": 2}}
    for resource, values in (("inventories", inventories), ("traits", [*traits])):
        path = f"/resource_providers/{uuid}/{resource}"
        generation = node.client.get(path).json()["resource_provider_generation"]
        content = {"resource_provider_generation": generation, resource: values}
        answer = node.client.put(path, json=content)
        assert answer.status_code == 200, answer.text
    return uuid


def test_mappings_of_placement_are_the_parameters_of_the_bind(node: Node) -> None:
    """The query, the names of the groups and the form of the mappings are those of Placement."""
    add_card(node, "FPGA", "CUSTOM_GZIP")  # not of Cyborg
    add_card(node, "FPGA", "CUSTOM_GZIP", "CUSTOM_A", OWNER_TRAIT)
    fpga = add_card(node, "FPGA", "CUSTOM_GZIP", OWNER_TRAIT)
    gpu = add_card(node, "PGPU", OWNER_TRAIT)
    context = make_context(
        groups=[
            {
                "resources:FPGA": "1",
                "trait:CUSTOM_GZIP": "required",
                "trait:CUSTOM_A": "forbidden",
            },
            {"resources:PGPU": "1"},
        ],
        arqs=make_context()["arqs"][:2],
    )
    query = os_acc.build_query(os_acc.to_request_groups(context))
    query |= {f"in_tree{group.name}": node.uuid for group in os_acc.to_request_groups(context)}
    answer = node.client.get(f"/allocation_candidates?{urlencode(query)}")
    assert answer.status_code == 200, answer.text
    (candidate,) = answer.json()["allocation_requests"]
    parameters = os_acc.parse(
        context, node.name, INSTANCE, candidate["mappings"], providers=[fpga, gpu]
    )
    assert parameters == (
        os_acc.BindParameters(ARQ, node.name, fpga, INSTANCE),
        os_acc.BindParameters(OTHER_ARQ, node.name, gpu, INSTANCE),
    )


def test_query_of_a_context_without_traits_is_one_of_placement(node: Node) -> None:
    """The query of the API and that of the library are the same, and offer devices of Cyborg."""
    add_card(node, "FPGA")  # not of Cyborg
    fpga = add_card(node, "FPGA", OWNER_TRAIT)
    body = [{"resources:FPGA": "1"}]
    groups = os_acc.to_request_groups({"groups": body})
    query = device_contexts.build_query(parse_groups(body))
    assert dict(parse_qsl(query)) == os_acc.build_query(groups)
    answer = node.client.get(f"/allocation_candidates?{query}&in_tree{groups[0].name}={node.uuid}")
    assert answer.status_code == 200, answer.text
    assert device_contexts.parse_candidates(answer.json(), 1) == [{"0": [fpga]}]
