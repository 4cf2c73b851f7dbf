# SPDX-License-Identifier: Apache-2.0
"""What OpenStack Cyborg selects, as rules of drivers."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.drivers.registry import COUNTERPARTS
from cyborg.core.migration import device_rules
from cyborg.core.migration.device_rules import convert_specs
from cyborg.drivers.pci import rules
from cyborg.drivers.sysfs import PciFunction

PCI = "resource_class=CUSTOM_PCI"


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ({"vendor_id": "8086", "product_id": "0b2b"}, f"vendor=8086,product=0b2b,{PCI}"),
        ({"vendor_id": "0x10DE", "product_id": "*"}, f"vendor=10de,{PCI}"),
        ({"address": "0000:0a:00.*"}, f"address=0000:0a:00.*,{PCI}"),
        ({"address": "*:0c:*.*"}, f"address=*:0c:*.*,{PCI}"),
        ({"address": "0000:0B:00.0"}, f"address=0000:0b:00.0,{PCI}"),
        ({"address": ":1:.2"}, f"address=*:01:*.2,{PCI}"),
        ({"address": "0a:00"}, f"address=*:0a:00.*,{PCI}"),
        (
            {"address": {"domain": ".*", "bus": "02", "slot": "01", "function": "[0-2]"}},
            f"address=*:02:01.[012],{PCI}",
        ),
        ({"address": {"bus": "0[ab]"}}, f"address=*:0a:*.*|*:0b:*.*,{PCI}"),
        ({"vendor_id": "8086", "address": {}}, f"vendor=8086,{PCI}"),
    ],
)
def test_device_specification_becomes_a_rule(spec: dict[str, Any], rule: str) -> None:
    found = convert_specs("generic", [json.dumps(spec)])
    assert (found.rules, found.by_hand, found.remarks) == ([rule], [], [])


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("no JSON", "is not JSON: write [generic] devices = RULE"),
        ("[1]", "is not an object: write [generic] devices = RULE"),
        ('{"devname": "eth0"}', "write [nic] devices = address=ADDRESS with the PCI address of"),
        ('{"vendor_id": "x"}', "write [generic] devices = RULE with four hexadecimal digits"),
        ('{"vendor_id": 5}', "write [generic] devices = RULE with four hexadecimal digits"),
        ("{}", "write [generic] devices = address=* if that is meant"),
        ('{"address": "0a*:*:00.0"}', "write [generic] devices = address=PATTERN"),
        ('{"address": "1:2:3:4.0"}', "write [generic] devices = address=PATTERN"),
        ('{"address": "0000:0a:00.9"}', "write [generic] devices = address=PATTERN"),
        ('{"address": {"bus": "["}}', "write [generic] devices = address=PATTERN"),
        ('{"address": {"bus": "x"}}', "write [generic] devices = address=PATTERN"),
        ('{"address": {"bus": "[0-9]"}}', "write [generic] devices = address=PATTERN"),
        ('{"address": {"device": "0"}}', "write [generic] devices = address=PATTERN"),
    ],
)
def test_specification_without_rule_names_the_line_to_write(value: str, line: str) -> None:
    found = convert_specs("generic", [value])
    assert found.rules == []
    (note,) = found.by_hand
    assert line in note


def test_list_of_specifications_and_unused_keys() -> None:
    found = convert_specs(
        "generic", ['[{"vendor_id": "8086", "tags": "x"}, {"vendor_id": "1af4"}]']
    )
    assert found.rules == [f"vendor=8086,{PCI}", f"vendor=1af4,{PCI}"]
    assert found.remarks == ['tags of {"vendor_id": "8086", "tags": "x"} had no effect']


@pytest.mark.parametrize(
    ("methods", "erase"),
    [
        ({}, ""),
        ({"clear_action": "auto", "clear_strategy": "crypto"}, ",erase=crypto"),
        ({"clear_action": "sanitize"}, ",erase=sanitize"),
        ({"clear_action": "sanitize", "clear_strategy": "block"}, ",erase=block"),
        ({"clear_action": "zero"}, None),
        ({"clear_action": ["zero"]}, None),
    ],
)
def test_erasure_of_drives(methods: dict[str, Any], erase: str | None) -> None:
    found = convert_specs("nvme", [json.dumps({"vendor_id": "1c5f", **methods})])
    if erase is None:
        assert "write [nvme] devices = RULE, with erase=overwrite" in found.by_hand[0]
    else:
        rule = f"vendor=1c5f,resource_class=CUSTOM_SSD,functions=whole{erase}"
        assert found.rules == [rule]


def test_types_of_mediated_devices_need_addresses() -> None:
    taken: set[str] = set()
    found = device_rules.convert_mdev_type("nvidia-35", ["0000:84:00.0"], taken)
    assert found.rules == ["address=0000:84:00.0,type=nvidia-35"]
    again = device_rules.convert_mdev_type("nvidia-36", ["0000:84:00.0", "84:00.0"], taken)
    assert (again.rules, len(again.by_hand)) == ([], 2)
    none = device_rules.convert_mdev_type("nvidia-37", [], taken)
    assert none.rules == []
    assert none.by_hand == [
        "nvidia-37 has no device_addresses: write [gpu] mdev_types = address=ADDRESS,type=nvidia-37"
    ]


def test_networks_and_functions_of_cards() -> None:
    found = device_rules.convert_networks(["physnet1:eth2|eth3", "physnet2:eth2", "PHYSNET1:e"])
    assert found.rules == ["physnet1:eth2,physnet1:eth3"]
    assert len(found.by_hand) == 2
    lines = device_rules.convert_functions(["GTPv1:eth3|eth2", ":eth4"]).by_hand
    assert len(lines) == 3
    assert "write [nic] devices = address=ADDRESS,traits=CUSTOM_GTPV1" in lines[0]


def test_rules_of_drivers_select_either_cards_or_virtual_functions() -> None:
    assert COUNTERPARTS.keys() - device_rules.DRIVER_RULES.keys() == {
        *("fake_driver", "nvmf_spdk_driver", "pci_driver")
    }
    for text in itertools.chain.from_iterable(device_rules.DRIVER_RULES.values()):
        assert rules.parse(text).scope in ("whole", "vf"), text


@pytest.mark.parametrize(
    ("card", "texts"),
    [
        (
            PciFunction("0000:84:00.0", "10de", "2236", "030200"),
            [
                *device_rules.DRIVER_RULES["nvidia_gpu_driver"],
                *convert_specs("generic", ['{"vendor_id": "10de", "product_id": "2236"}']).rules,
                *convert_specs("generic", ['{"address": "0000:84:00.*"}']).rules,
            ],
        ),
        (
            PciFunction("0000:84:00.0", "1c5f", "0540", "010802"),
            convert_specs("nvme", ['{"vendor_id": "1c5f"}', '{"address": "*:84:*.*"}']).rules,
        ),
    ],
)
def test_rules_for_whole_cards_match_no_virtual_function(
    card: PciFunction, texts: list[str]
) -> None:
    function = replace(card, address="0000:84:00.4", physfn=card.address)
    for text in texts:
        rule = rules.parse(text)
        assert rule.matches(card), text
        assert not rule.matches(function), text


@given(st.lists(st.text(max_size=30), max_size=3), st.sampled_from(["generic", "nvme"]))
def test_any_text_has_a_rule_or_a_line_to_write(values: list[str], backend: str) -> None:
    found = convert_specs(backend, values)
    assert len(found.rules) + len(found.by_hand) >= len(
        [value for value in values if value.strip() != "[]"]
    )
