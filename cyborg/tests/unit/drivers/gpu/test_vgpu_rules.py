# SPDX-License-Identifier: Apache-2.0
"""Rules of vgpu_types, and the form of the attributes."""

import pytest

from cyborg.drivers.base import InvalidOption
from cyborg.drivers.gpu.vgpu import deployable_address, parse, plan_card, trait_of
from cyborg.drivers.kernel.nvml import GpuFacts
from cyborg.drivers.kernel.vgpu import VgpuFunction, find_type, parse_types


def test_parse_rule_keeps_types_without_product_line_and_parameters() -> None:
    rule = parse(
        "vendor=10de,product=2335,type=NVIDIA H200X-1-18C|H200X-70C,resource_class=CUSTOM_X,"
        "traits=CUSTOM_A,max_per_card=7,vgpu_params=disable_vnc=1|enable_uvm=0"
    )
    assert rule.types == ("H200X-1-18C", "H200X-70C")
    assert (rule.resource_class, rule.traits) == ("CUSTOM_X", frozenset({"CUSTOM_A"}))
    assert (rule.max_per_card, rule.parameters) == (7, "disable_vnc=1, enable_uvm=0")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("address=*", "the name of a type in creatable_vgpu_types"),
        ("address=*,type=", "the name of a type"),
        ("address=*,type=A\tB", "the name of a type"),
        ("address=*,type=A|NVIDIA A", "the name of a type"),
        ("type=H200X-70C", "a key that matches cards"),
        ("address=*,functions=vf,type=A", "no functions: the rule selects physical functions"),
        ("address=*,type=A,max_per_card=0", "a number from 1 to 999"),
        ("address=*,type=A,type=B", "type only once"),
        ("address=*,type=A,action=skip", "no action in a rule"),
        ("address=*,type=A,vgpu_params=x", "name=value"),
        ("address=*,type=A,vgpu_params=a=1\nb=2", "name=value"),
        ("parent=mtty,type=A", "key=value with a key of"),
    ],
)
def test_parse_malformed_rule_is_an_invalid_option(rule: str, expected: str) -> None:
    with pytest.raises(InvalidOption, match=expected):
        parse(rule)


def test_parse_types_ignores_the_heading_and_malformed_lines() -> None:
    text = (
        "ID    : vGPU Name\n1414  : NVIDIA H200X-1-18C\n1428 : NVIDIA H200X-141C\n: x\nfoo\n9 :\n"
    )
    assert parse_types(text) == {"NVIDIA H200X-1-18C": 1414, "NVIDIA H200X-141C": 1428}
    assert parse_types("") == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NVIDIA A-1C", 1), ("A-1C", 1), ("A-2C", None), ("NVIDIA", None), ("GRID B-1C", 3)],
)
def test_find_type_by_name_with_or_without_product_line(name: str, expected: int | None) -> None:
    types = {"NVIDIA A-1C": 1, "NVIDIA B-1C": 2, "GRID B-1C": 3}
    assert find_type(types, name) == expected


def test_find_type_with_an_ambiguous_name_returns_nothing() -> None:
    assert find_type({"NVIDIA B-1C": 2, "GRID B-1C": 3}, "B-1C") is None


def test_names_of_deployables_and_traits_are_made_from_the_type() -> None:
    assert deployable_address("0000:41:00.0", "H200X-1-18C") == "0000:41:00.0-H200X-1-18C"
    assert deployable_address("0000:41:00.0", "A/B+C") == "0000:41:00.0-A_B_C"
    assert trait_of("H200X-1-18C") == "CUSTOM_VGPU_H200X_1_18C"


def test_plan_card_rounds_the_share_of_another_type_up() -> None:
    """Where three of another type fit, one of them takes the place of two of four."""
    functions = [
        VgpuFunction(f"0000:41:00.{n}", 7 if n == 1 else 0, {"NVIDIA A-4C": 4}, registered=True)
        for n in range(1, 6)
    ]
    facts = GpuFacts(max_vgpus={"A-4C": 4, "A-3C": 3}, vgpu_names={"7": "A-3C"})
    plan = plan_card(("A-4C",), None, functions, {}, facts)
    assert list(plan.handles) == ["0000:41:00.2", "0000:41:00.3"]
