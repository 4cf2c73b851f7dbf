# SPDX-License-Identifier: Apache-2.0
import json
from typing import Any

import os_resource_classes
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import capability, names, service
from cyborg.core.errors import Invalid
from cyborg.core.service import Function, Holding

EXAMPLE = '{"num":2,"ipsec":{"aes":{"3des":50,"num":1}}}'
CRYPTO = "CUSTOM_CRYPTO"

_KEYS = st.sampled_from(["aes", "AES", "ipsec", "gzip-v2", "gzip.v2", "a", "num_1", "é1"])
_NODES = st.recursive(
    st.sampled_from([None, False, True, 0, 50, "", "fast"]),
    lambda inner: st.builds(
        lambda below, num: below | ({} if num is None else {"num": num}),
        st.dictionaries(_KEYS, inner, max_size=3),
        st.none() | st.integers(0, 9),
    ),
    max_leaves=8,
)
_TREES = st.dictionaries(_KEYS, _NODES, max_size=3)
_CLASSES = st.sampled_from(["CUSTOM_CRYPTO", "CUSTOM_GPU", "PGPU", "FPGA", "CUSTOM_NVME"])


@st.composite
def holdings(draw: st.DrawFn) -> Holding:
    total = draw(st.integers(0, 16))
    used = draw(st.integers(0, total))
    free = draw(st.integers(0, total - used))
    return Holding(draw(_CLASSES), total, used, free, json.dumps(draw(_TREES)))


def shown(*some: Holding, within: str | None = None) -> dict[str, tuple[int, int, int]]:
    return {f.name: (f.total, f.used, f.free) for f in service.functions(some, within)}


def test_the_example_of_the_contract() -> None:
    assert shown(Holding(CRYPTO, 2, 0, 2, EXAMPLE)) == {
        "crypto": (2, 0, 2),
        "crypto.ipsec": (2, 0, 2),
        "crypto.ipsec.aes": (1, 0, 1),
        "crypto.ipsec.aes.3des": (1, 0, 1),
    }
    # Its tree speaks of two, but there is one that anybody could have.
    assert set(shown(Holding(CRYPTO, 1, 0, 1, EXAMPLE)).values()) == {(1, 0, 1)}


def test_a_use_is_one_of_every_function() -> None:
    assert shown(Holding(CRYPTO, 2, 1, 1, EXAMPLE)) == {
        "crypto": (2, 1, 1),
        "crypto.ipsec": (2, 1, 1),
        "crypto.ipsec.aes": (1, 1, 0),
        "crypto.ipsec.aes.3des": (1, 1, 0),
    }


def test_what_is_closed_is_in_the_total_alone() -> None:
    assert shown(Holding(CRYPTO, 2, 1, 0, '{"ipsec":1}')) == {
        "crypto": (2, 1, 0),
        "crypto.ipsec": (2, 1, 0),
    }


def test_devices_come_together_by_the_name() -> None:
    some = (
        Holding("CUSTOM_NVME", 1, 1, 0),
        Holding("CUSTOM_NVME", 1, 0, 1),
        Holding("FPGA", 4, 0, 4, '{"gzip":{"num":3}}'),
        Holding("FPGA", 4, 0, 4, '{"gzip":true,"lz4":false}'),
    )
    assert service.functions(some) == (
        Function("fpga", 8, 0, 8),
        Function("fpga.gzip", 7, 0, 7),
        Function("nvme", 2, 1, 1),
    )


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ("", ["crypto"]),
        ("no json", ["crypto"]),
        ("[1]", ["crypto"]),
        # What would be refused at the door, but another driver's fact went round it.
        ('{"a":[1],"b":1}', ["crypto"]),
        ('{"num":-1,"b":1}', ["crypto"]),
        ('{"a":{"a":{"a":{"a":{"a":{"a":{"a":1}}}}}}}', ["crypto"]),
        (json.dumps({f"a{n}": 1 for n in range(129)}), ["crypto"]),
        ('{"AES-GCM":1,"..x":1}', ["crypto", "crypto.aes_gcm", "crypto.x"]),
        ('{"num":{"deep":1}}', ["crypto", "crypto.num", "crypto.num.deep"]),
    ],
)
def test_trees(tree: str, found: list[str]) -> None:
    assert list(shown(Holding(CRYPTO, 1, 0, 1, tree))) == found


def test_two_spellings_are_one_function() -> None:
    tree = '{"AES":{"num":1},"aes":{"num":3},"none":{"num":0}}'
    found = shown(Holding(CRYPTO, 4, 1, 3, tree))
    assert found["crypto.aes"] == (3, 1, 2)
    assert found["crypto.none"] == (0, 0, 0)


@given(st.lists(holdings(), max_size=5))
def test_what_always_holds(some: list[Holding]) -> None:
    found = shown(*some)
    assert list(found) == sorted(found)
    for name, (total, used, free) in found.items():
        assert used >= 0
        assert free >= 0
        assert used + free <= total
        root, dot, _ = name.rpartition(".")
        if dot:
            assert found[root][0] >= total, "a part has no more than the whole"
            assert found[root][1] >= used
    # Nothing is told of more than there is.
    for place in range(3):
        whole = sum((one.total, one.used, one.free)[place] for one in some)
        roots = [counts for name, counts in found.items() if "." not in name]
        assert sum(counts[place] for counts in roots) <= whole


@given(holdings(), st.integers(1, 9))
def test_a_device_more_takes_nothing_away(one: Holding, more: int) -> None:
    before, after = shown(one), shown(*[one] * more)
    assert after == {name: tuple(n * more for n in counts) for name, counts in before.items()}


@given(holdings())
def test_a_function_is_a_trait_and_has_its_classes(one: Holding) -> None:
    found = shown(one)
    traits = capability.traits(next(iter(found)), capability.read(one.tree))
    assert {names.custom(name.replace(".", "_")) for name in found if "." in name} == traits
    for name in found:
        assert one.resource_class in service.classes(name)
        assert service.parse(name.upper()) == name
        assert service.offers(one.resource_class, one.tree, name)
        inner = shown(one, within=name)
        assert inner.keys() == {n for n in found if n == name or n.startswith(f"{name}.")}
        assert inner.items() <= found.items()
    assert not service.offers(one.resource_class, one.tree, "crypto.no")


def test_a_prefix_ends_at_a_dot() -> None:
    one = Holding(CRYPTO, 1, 0, 1, '{"ipsec":{"aes":1},"ipsec2":1}')
    assert list(shown(one, within="crypto.ipsec")) == ["crypto.ipsec", "crypto.ipsec.aes"]
    assert shown(one, within="crypto.ip") == shown(one, within="ipsec") == {}


def test_a_class_of_its_own_has_the_name_of_a_standard_one() -> None:
    assert service.classes("gpu.cuda") == {"PGPU", "CUSTOM_GPU"}
    assert service.classes("fpga") == {"FPGA", "CUSTOM_FPGA"}
    assert service.classes("nvme") == {"CUSTOM_NVME"}
    for name in os_resource_classes.STANDARDS:
        (root,) = shown(Holding(name, 1, 0, 1))
        assert name in service.classes(root)


@pytest.mark.parametrize(
    "text",
    ["", ".", "a.", ".a", "a..b", "a b", "a%", "a-b", "é", "a\n", "*", "x" * 256, 7 * "\x00"],
)
def test_what_is_no_name(text: Any) -> None:
    with pytest.raises(Invalid, match=r"^function: .* is the name of none") as caught:
        service.parse(text)
    assert caught.value.details["field"] == "function"


def test_names() -> None:
    assert service.parse("Crypto.IPSEC.3des") == "crypto.ipsec.3des"
    assert len(service.parse("x" * 255)) == 255
