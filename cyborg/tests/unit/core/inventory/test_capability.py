# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import Invalid
from cyborg.core.inventory import capability
from cyborg.core.inventory.device import Device, DeviceType
from cyborg.core.naming import is_trait

EXAMPLE = {"num": 2, "ipsec": {"aes": {"3des": 50, "num": 1}}}


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth > 1 else {"a": 1}


def test_build_traits_contract_example() -> None:
    assert capability.build_traits("CRYPTO", capability.validate(EXAMPLE)) == {
        "CUSTOM_CRYPTO_IPSEC",
        "CUSTOM_CRYPTO_IPSEC_AES",
        "CUSTOM_CRYPTO_IPSEC_AES_3DES",
    }


def test_build_traits_missing_function_gives_no_trait() -> None:
    tree = {"gzip": True, "lz4": False, "zstd": 0, "lzma": None, "num": 3}
    assert capability.build_traits("comp", tree) == {"CUSTOM_COMP_GZIP"}


def test_normalise_key() -> None:
    tree = {"AES-GCM": {"x4.2": 1}, "2 Gb/s": True}
    assert capability.build_traits("my type", tree) == {
        "CUSTOM_MY_TYPE_AES_GCM",
        "CUSTOM_MY_TYPE_AES_GCM_X4_2",
        "CUSTOM_MY_TYPE_2_GB_S",
    }
    assert set(capability.function_limits(tree)) == {
        (),
        ("aes_gcm",),
        ("aes_gcm", "x4_2"),
        ("2_gb_s",),
    }


def test_function_limits_by_num() -> None:
    assert capability.function_limits(EXAMPLE) == {
        (): 2,
        ("ipsec",): 2,
        ("ipsec", "aes"): 1,
        ("ipsec", "aes", "3des"): 1,
    }
    # What stands below has no more than what it stands in.
    assert capability.function_limits({"a": {"num": 1, "b": {"num": 5}}, "c": 0}) == {
        (): capability.UNLIMITED,
        ("a",): 1,
        ("a", "b"): 1,
    }


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (nested(7), r"a/a/a/a/a/a is deeper than 6 levels"),
        ({"a": "x" * 20480}, r"it has 20488 bytes, at most 16384 \(16 KiB\) are allowed"),
        ({"ipsec": {"   ": 1}}, r"ipsec/   : '   ' has no letter or digit"),
        ({"": 1}, "has no letter or digit"),
        ([], "expected an object, found list"),
        ({"a": [1]}, "a is a list; expected an object"),
        ({"a": {"num": -1}}, "a/num is '-1': expected an integer of at least 0"),
        ({"num": True}, "num is 'True': expected an integer of at least 0"),
        ({"a": float("inf")}, "it is not JSON"),
    ],
)
def test_validate_malformed_tree_is_rejected(tree: Any, message: str) -> None:
    with pytest.raises(Invalid, match=f"^acc_capability: .*{message}") as caught:
        capability.validate(tree)
    assert caught.value.details["field"] == "acc_capability"


def test_validate_tree_at_limits_is_accepted() -> None:
    assert capability.validate(nested(6))
    # In bytes of UTF-8, and not of escapes.
    assert capability.validate({"a": "é" * ((capability.MAX_BYTES - 8) // 2)})


def test_build_traits_too_many_is_rejected() -> None:
    with pytest.raises(Invalid, match="has 129 traits, at most 128"):
        capability.build_traits("X", {f"a{n}": 1 for n in range(129)})


_KEYS = st.text(min_size=1, max_size=9).filter(
    lambda key: any(c.isascii() and c.isalnum() for c in key)
)
_LEAVES = st.none() | st.booleans() | st.integers(0) | st.text(max_size=9)
_TREES = st.recursive(
    _LEAVES, lambda inner: st.dictionaries(_KEYS, inner, max_size=4), max_leaves=9
)


@given(st.dictionaries(_KEYS.filter(lambda key: key != "num"), _TREES, max_size=4))
def test_board_info_round_trip(tree: dict[str, Any]) -> None:
    try:
        capability.validate(tree)
    except Invalid:
        return
    board = Device(
        "a", DeviceType.OTHER, "v", "m", "b", vendor_board_info=capability.to_board_info(tree)
    )
    assert capability.from_board_info(board.vendor_board_info) == tree
    assert all(is_trait(name) for name in capability.build_traits("OTHER", tree))


def test_to_board_info_large_tree_is_split() -> None:
    tree = {"a": "é" * 8000}
    board = Device(
        "a", DeviceType.OTHER, "v", "m", "b", vendor_board_info=capability.to_board_info(tree)
    )
    assert len(board.vendor_board_info) == 13
    assert capability.from_board_info(board.vendor_board_info) == tree


@pytest.mark.parametrize("text", ["no json", "[1]", "[" * 9999])
def test_from_board_info_foreign_text_gives_empty_tree(text: str) -> None:
    assert capability.from_board_info({capability.INFO_KEY: text}) == {}
