# SPDX-License-Identifier: Apache-2.0
"""Rules of the generic driver: matching, precedence and syntax errors."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.inventory.device import DeviceType
from cyborg.drivers.base import InvalidOption
from cyborg.drivers.kernel.nvme import ERASE
from cyborg.drivers.pci.rules import KEYS, Rule, matching_rule, parse
from cyborg.drivers.sysfs import PciFunction

HEX4 = st.integers(0, 0xFFFF).map(lambda n: f"{n:04x}")
HEX6 = st.integers(0, 0xFFFFFF).map(lambda n: f"{n:06x}")
FUNCTIONS = st.builds(
    PciFunction,
    address=st.builds(
        "{:04x}:{:02x}:{:02x}.{:x}".format,
        *(st.integers(0, top) for top in (0xFFFF, 0xFF, 0x1F, 7)),
    ),
    vendor=HEX4,
    product=HEX4,
    class_code=HEX6,
)
QAT = PciFunction("0000:3d:00.0", "8086", "37c8", "0b4000")


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("vendor=8086", True),
        ("vendor=0x8086", True),
        ("vendor=10de", False),
        ("vendor=10de|8086", True),
        ("vendor=!10de", True),
        ("vendor=!8086", False),
        ("product=37c8|37c9", True),
        ("product=37C8", True),
        ("product=37c8|!37c8", False),
        ("class=0b", True),
        ("class=0b40*", True),
        ("class=0b4000", True),
        ("class=0b4001", False),
        ("class=03|12", False),
        ("address=0000:3d:00.0", True),
        ("address=0000:3d:*", True),
        ("address=*:3D:*", True),
        ("address=0000:3e:*", False),
        ("address=!0000:3d:*", False),
        ("address=0000:3[c-e]:*", True),
        ("address=*", True),
        (" vendor = 8086 , class = 0b ", True),
        ("vendor=8086,class=03", False),
    ],
)
def test_rule_matches_function(text: str, fits: bool) -> None:
    assert parse(text).matches(QAT) is fits


@pytest.mark.parametrize(
    ("text", "fits", "fits_unknown"),
    [
        ("subsystem_vendor=1028", True, False),
        ("subsystem_vendor=0x1028|8086", True, False),
        ("subsystem_vendor=8086", False, False),
        ("subsystem_vendor=!1028", False, True),
        ("subsystem_vendor=!8086", True, True),
        ("subsystem_product=1F9B", True, False),
        ("subsystem_product=1f9b,subsystem_vendor=8086", False, False),
        ("numa_node=1", True, False),
        ("numa_node=0|1", True, False),
        ("numa_node=0", False, False),
        ("numa_node=!0", True, True),
        ("numa_node=!1", False, True),
    ],
)
def test_rule_matches_what_may_be_unknown(text: str, fits: bool, fits_unknown: bool) -> None:
    card = replace(QAT, subsystem_vendor="1028", subsystem_product="1f9b", numa_node=1)
    assert parse(text).matches(card) is fits
    assert parse(text).matches(QAT) is fits_unknown


def test_parse_result_keys() -> None:
    rule = parse(
        "class=12,type=fpga,resource_class=CUSTOM_X,traits=CUSTOM_A|HW_GPU_API_VULKAN,action=offer"
    )
    assert (rule.type, rule.resource_class) == (DeviceType.FPGA, "CUSTOM_X")
    assert rule.traits == {"CUSTOM_A", "HW_GPU_API_VULKAN"}
    assert rule.skip is False


def test_matching_rule_first_match_applies() -> None:
    rules = [
        parse("product=37c9,type=NIC"),
        parse("address=0000:3e:*,action=skip"),
        parse("vendor=8086,type=QAT"),
        parse("address=*,type=OTHER"),
    ]
    assert matching_rule(rules, QAT) is rules[2]
    assert matching_rule([parse("vendor=8086,action=skip"), *rules], QAT) is None
    assert matching_rule(rules[:2], QAT) is None
    assert matching_rule([], QAT) is None


@pytest.mark.parametrize(
    ("text", "rejected_text", "expected"),
    [
        ("", "", "key=value"),
        ("vendor", "vendor", "key=value"),
        ("vendor=", "vendor=", "key=value"),
        ("=8086", "=8086", "key=value"),
        ("vendr=8086", "vendr=8086", "a key of vendor, product"),
        ("vendor=8086,", "", "key=value"),
        ("vendor=80", "vendor=80", "four hexadecimal digits"),
        ("vendor=8086|", "vendor=8086|", "four hexadecimal digits"),
        ("vendor=8086|intel", "vendor=8086|intel", "four hexadecimal digits"),
        ("product=!!37c8", "product=!!37c8", "four hexadecimal digits"),
        ("class=0b4000f", "class=0b4000f", "one to six hexadecimal digits"),
        ("class=*", "class=*", "one to six hexadecimal digits"),
        ("address=/etc", "address=/etc", "a pattern of PCI addresses"),
        ("vendor=8086,vendor=10de", "vendor=10de", "once in a rule"),
        ("type=GPU", "type=GPU", "at least one of vendor"),
        ("vendor=8086,type=TOASTER", "type=TOASTER", "one of GPU, FPGA"),
        ("vendor=8086,resource_class=gpu", "resource_class=gpu", "one of FPGA, PGPU, VGPU"),
        ("vendor=8086,traits=CUSTOM_A|b", "traits=CUSTOM_A|b", "standard traits or CUSTOM_NAME"),
        ("vendor=8086,action=burn", "action=burn", "one of offer, skip"),
        ("vendor=144d,erase=purge", "erase=purge", "the driver generic does not erase devices"),
    ],
)
def test_parse_invalid_rule_raises(text: str, rejected_text: str, expected: str) -> None:
    with pytest.raises(InvalidOption) as raised:
        parse(text)
    assert raised.value.found == rejected_text
    assert expected in raised.value.expected


@given(st.text(max_size=60))
def test_parse_any_text_returns_rule_or_raises(text: str) -> None:
    with contextlib.suppress(InvalidOption):
        assert isinstance(parse(text), Rule)


@given(FUNCTIONS)
def test_rule_of_own_values_matches_and_negation_does_not(function: PciFunction) -> None:
    facts = {
        "vendor": function.vendor,
        "product": function.product,
        "class": function.class_code,
        "address": function.address,
    }
    assert parse(",".join(f"{k}={v}" for k, v in facts.items())).matches(function)
    for key, value in facts.items():
        assert not parse(f"{key}=!{value}").matches(function)


@given(FUNCTIONS, FUNCTIONS)
def test_rule_or_its_negation_matches_any_function(
    function: PciFunction, other_function: PciFunction
) -> None:
    for key, value in (("vendor", function.vendor), ("class", function.class_code[:2])):
        positive, negative = parse(f"{key}={value}"), parse(f"{key}=!{value}")
        assert positive.matches(other_function) is not negative.matches(other_function)


@given(FUNCTIONS, st.lists(st.sampled_from(["vendor=8086", "class=03", "address=*"]), max_size=4))
def test_matching_rule_leading_skip_returns_none(function: PciFunction, texts: list[str]) -> None:
    rules = [parse("address=*,action=skip"), *map(parse, texts)]
    assert matching_rule(rules, function) is None


def test_parse_kernel_driver_names_are_validated() -> None:
    assert parse("address=*").kernel_drivers == frozenset()
    assert parse("address=*,kernel_driver=vfio-pci| nvidia").kernel_drivers == {
        "vfio-pci",
        "nvidia",
    }
    for wrong in ("a/b", "|", "!nvidia"):
        with pytest.raises(InvalidOption, match="names of kernel drivers"):
            parse(f"address=*,kernel_driver={wrong}")


def test_parse_erase_keeps_the_order_of_preference() -> None:
    keys = (*KEYS, ERASE)
    assert parse("address=*", keys).erase == ()
    assert parse("address=*,erase=block | purge|block", keys).erase == ("block", "purge")
    for wrong in ("shred", "!purge", "purge|", "PURGE"):
        with pytest.raises(InvalidOption, match="purge, clear, sanitize, crypto, block"):
            parse(f"address=*,erase={wrong}", keys)
    with pytest.raises(InvalidOption, match="at least one of vendor"):
        parse("erase=purge", keys)
    with pytest.raises(InvalidOption, match="kernel_driver, active_port, erase"):
        parse("address=*,colour=red", keys)


GPU = PciFunction("0000:6e:00.0", "10de", "2235", "030200")


@pytest.mark.parametrize(
    ("text", "gpu", "gpu_vf", "qat_vf"),
    [
        ("address=*", True, False, True),
        ("address=*,functions=whole", True, False, False),
        ("address=*,functions=vf", False, True, True),
        ("address=*,functions=all", True, True, True),
        ("address=*,action=skip", True, True, True),
        ("address=*,action=skip,functions=whole", True, False, False),
    ],
)
def test_virtual_functions_of_gpus_are_matched_only_if_named(
    text: str, gpu: bool, gpu_vf: bool, qat_vf: bool
) -> None:
    rule = parse(text)
    virtual = replace(GPU, address="0000:6e:00.4", physfn=GPU.address)
    assert rule.matches(GPU) is gpu
    assert rule.matches(virtual) is gpu_vf
    assert rule.matches(replace(QAT, physfn="0000:3d:00.1")) is qat_vf


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vendor=10de,functions=pf", "one of whole, vf, all"),
        ("functions=vf", "at least one of vendor, "),
        ("vendor=10de,functions=all,resource_class=PGPU", "one for functions=vf"),
    ],
)
def test_parse_invalid_scope_raises(text: str, expected: str) -> None:
    with pytest.raises(InvalidOption, match=expected):
        parse(text)
