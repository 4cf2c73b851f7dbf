# SPDX-License-Identifier: Apache-2.0
"""Names by which Nova may know a host."""

from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import Invalid
from cyborg.core.hosts import MAX_NAMES, Identity, closest_names, matching_nodes, name_variants
from cyborg.core.inventory import report

LABEL = st.text("abcAB01-", min_size=1, max_size=4)
NAME = st.lists(LABEL, min_size=1, max_size=3).map(".".join)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ()),
        (["CN1"], ("cn1",)),
        (["cn1.Example.com"], ("cn1.example.com", "cn1")),
        (["cn1", "cn1.example.com", "CN1"], ("cn1", "cn1.example.com")),
        (["10.0.0.5"], ("10.0.0.5",)),
        (["fe80::1.5"], ("fe80::1.5",)),
        (["localhost", "localhost.localdomain", "vm"], ("vm",)),
        (["Straße"], ("strasse",)),
    ],
    ids=str,
)
def test_name_variants(names: list[str], expected: tuple[str, ...]) -> None:
    assert name_variants(names) == expected


@pytest.mark.parametrize(
    ("names", "nodes", "expected"),
    [
        (["cn1"], ["CN1", "cn2"], ("CN1",)),
        (["cn1.a"], ["cn1", "cn2"], ("cn1",)),
        (["CN1"], ["cn1.example.com"], ("cn1.example.com",)),
        (["cn1", "cn1.b"], ["cn1.a"], ()),
        (["cn1", "cn1.b"], ["cn1.a", "cn1.b"], ("cn1.b",)),
        (["cn1"], ["cn1.a", "cn1.b"], ("cn1.a", "cn1.b")),
        (["cn1", "cn1.a"], ["CN1", "cn1.a"], ("CN1", "cn1.a")),
        (["10.0.0.5"], ["10", "10.0.0.6"], ()),
        (["localhost"], ["localhost"], ()),
        (["cn1"], [], ()),
        (["cn1"], ["cn10", "cn"], ()),
    ],
    ids=str,
)
def test_matching_nodes(names: list[str], nodes: list[str], expected: tuple[str, ...]) -> None:
    assert matching_nodes(names, nodes) == expected


@given(NAME, NAME)
def test_matching_nodes_other_domain_does_not_match(left: str, right: str) -> None:
    if "." in left and "." in right and left.casefold() != right.casefold():
        assert matching_nodes([left], [right]) == ()


@given(st.lists(NAME, max_size=4), st.lists(NAME, max_size=4))
def test_matching_nodes_ignores_case_and_order(names: list[str], nodes: list[str]) -> None:
    matches = matching_nodes(names, nodes)
    assert set(matches) <= set(nodes)
    assert matching_nodes([name.upper() for name in reversed(names)], reversed(nodes)) == matches
    for name in names:
        assert name in matching_nodes([*names, name], [*nodes, name])


def test_closest_names() -> None:
    nodes = ["compute-1", "compute-2", "storage", "COMPUTE-10"]
    assert closest_names("Compute-1", nodes)[0] == "compute-1"
    assert closest_names("compute1", nodes, 1) == ("compute-1",)
    assert closest_names("x", nodes) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"compute_id": "not-a-uuid"},
        {"provider": ""},
        {"provider": "a\nb"},
        {"names": ("h" * 256,)},
        {"names": ("n",) * (MAX_NAMES + 1)},
        {"names": ("\ud800",)},
    ],
    ids=ascii,
)
def test_identity_invalid_name_is_rejected(wrong: dict[str, str]) -> None:
    with pytest.raises(Invalid):
        Identity(**wrong)  # type: ignore[arg-type]


def test_identity_round_trip_and_digest() -> None:
    original = Identity("cn1", str(uuid4()).upper(), ("cn1", "cn1.a"))
    assert Identity.from_dict(original.to_dict()) == original
    assert Identity.from_dict({}) == Identity()
    assert report.digest([], []) == report.digest([], [], Identity())
    digests = {
        report.digest([], [], identity) for identity in (Identity(), Identity("cn1"), original)
    }
    assert len(digests) == 3
