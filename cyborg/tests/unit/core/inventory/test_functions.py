# SPDX-License-Identifier: Apache-2.0
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import naming
from cyborg.core.errors import Invalid
from cyborg.core.inventory import capability, functions
from cyborg.core.inventory.functions import Function, HandleUsage

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
def holdings(draw: st.DrawFn) -> HandleUsage:
    total = draw(st.integers(0, 16))
    used = draw(st.integers(0, total))
    free = draw(st.integers(0, total - used))
    return HandleUsage(draw(_CLASSES), total, used, free, json.dumps(draw(_TREES)))


def summarize(*usages: HandleUsage, within: str | None = None) -> dict[str, tuple[int, int, int]]:
    return {
        f.name: (f.total, f.used, f.free) for f in functions.summarize_functions(usages, within)
    }


def test_summarize_functions_contract_example() -> None:
    assert summarize(HandleUsage(CRYPTO, 2, 0, 2, EXAMPLE)) == {
        "crypto": (2, 0, 2),
        "crypto.ipsec": (2, 0, 2),
        "crypto.ipsec.aes": (1, 0, 1),
        "crypto.ipsec.aes.3des": (1, 0, 1),
    }
    # Its tree speaks of two, but there is one that anybody could have.
    assert set(summarize(HandleUsage(CRYPTO, 1, 0, 1, EXAMPLE)).values()) == {(1, 0, 1)}


def test_summarize_functions_used_handle_counts_for_every_function() -> None:
    assert summarize(HandleUsage(CRYPTO, 2, 1, 1, EXAMPLE)) == {
        "crypto": (2, 1, 1),
        "crypto.ipsec": (2, 1, 1),
        "crypto.ipsec.aes": (1, 1, 0),
        "crypto.ipsec.aes.3des": (1, 1, 0),
    }


def test_summarize_functions_cordoned_device_counts_in_total_only() -> None:
    assert summarize(HandleUsage(CRYPTO, 2, 1, 0, '{"ipsec":1}')) == {
        "crypto": (2, 1, 0),
        "crypto.ipsec": (2, 1, 0),
    }


def test_summarize_functions_adds_devices_by_name() -> None:
    usages = (
        HandleUsage("CUSTOM_NVME", 1, 1, 0),
        HandleUsage("CUSTOM_NVME", 1, 0, 1),
        HandleUsage("FPGA", 4, 0, 4, '{"gzip":{"num":3}}'),
        HandleUsage("FPGA", 4, 0, 4, '{"gzip":true,"lz4":false}'),
    )
    assert functions.summarize_functions(usages) == (
        Function("fpga", 8, 0, 8),
        Function("fpga.gzip", 7, 0, 7),
        Function("nvme", 2, 1, 1),
    )


@pytest.mark.parametrize(
    ("tree", "expected"),
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
def test_summarize_functions_malformed_trees(tree: str, expected: list[str]) -> None:
    assert list(summarize(HandleUsage(CRYPTO, 1, 0, 1, tree))) == expected


def test_summarize_functions_normalised_keys_are_one_function() -> None:
    tree = '{"AES":{"num":1},"aes":{"num":3},"none":{"num":0}}'
    counts = summarize(HandleUsage(CRYPTO, 4, 1, 3, tree))
    assert counts["crypto.aes"] == (3, 1, 2)
    assert counts["crypto.none"] == (0, 0, 0)


@given(st.lists(holdings(), max_size=5))
def test_summarize_functions_invariants(usages: list[HandleUsage]) -> None:
    functions = summarize(*usages)
    assert list(functions) == sorted(functions)
    for name, (total, used, free) in functions.items():
        assert used >= 0
        assert free >= 0
        assert used + free <= total
        root, dot, _ = name.rpartition(".")
        if dot:
            assert functions[root][0] >= total, "a part has no more than the whole"
            assert functions[root][1] >= used
    # Nothing is told of more than there is.
    for place in range(3):
        whole = sum((usage.total, usage.used, usage.free)[place] for usage in usages)
        top_level = [counts for name, counts in functions.items() if "." not in name]
        assert sum(counts[place] for counts in top_level) <= whole


@given(holdings(), st.integers(1, 9))
def test_summarize_functions_more_devices_never_reduce_counts(
    usage: HandleUsage, more: int
) -> None:
    before, after = summarize(usage), summarize(*[usage] * more)
    assert after == {name: tuple(n * more for n in counts) for name, counts in before.items()}


@given(holdings())
def test_each_function_has_a_trait_and_a_valid_name(usage: HandleUsage) -> None:
    counts = summarize(usage)
    traits = capability.build_traits(next(iter(counts)), capability.decode_tree(usage.tree))
    assert {
        naming.make_custom_name(name.replace(".", "_")) for name in counts if "." in name
    } == traits
    for name in counts:
        assert functions.parse_name(name.upper()) == name
        inner = summarize(usage, within=name)
        assert inner.keys() == {n for n in counts if n == name or n.startswith(f"{name}.")}
        assert inner.items() <= counts.items()
    assert functions.names_of(usage.resource_class, usage.tree) == counts.keys()


def test_summarize_functions_within_matches_whole_elements() -> None:
    usage = HandleUsage(CRYPTO, 1, 0, 1, '{"ipsec":{"aes":1},"ipsec2":1}')
    assert list(summarize(usage, within="crypto.ipsec")) == ["crypto.ipsec", "crypto.ipsec.aes"]
    assert summarize(usage, within="crypto.ip") == summarize(usage, within="ipsec") == {}


def test_no_name_of_a_function_is_too_long() -> None:
    key = "a" * 100
    for length in range(1, 200):
        tree = json.dumps({"aes": {key: {"b" * length: 1}}})
        names = functions.names_of(CRYPTO, tree)
        assert all(functions.parse_name(name) == name for name in names)
    assert names == {"crypto"}


@pytest.mark.parametrize(
    "text",
    ["", ".", "a.", ".a", "a..b", "a b", "a%", "a-b", "é", "a\n", "*", "x" * 256, 7 * "\x00"],
)
def test_parse_name_invalid_is_rejected(text: Any) -> None:
    with pytest.raises(Invalid, match=r"^function: invalid name ") as caught:
        functions.parse_name(text)
    assert caught.value.details["field"] == "function"


def test_parse_name_valid() -> None:
    assert functions.parse_name("Crypto.IPSEC.3des") == "crypto.ipsec.3des"
    assert len(functions.parse_name("x" * 255)) == 255
