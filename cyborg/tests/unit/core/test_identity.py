# SPDX-License-Identifier: Apache-2.0
"""By which names a host may be known to Nova."""

from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import wire
from cyborg.core.errors import Invalid
from cyborg.core.identity import MAX_NAMES, Identity, matching, nearest, spellings

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
def test_spellings(names: list[str], expected: tuple[str, ...]) -> None:
    assert spellings(names) == expected


@pytest.mark.parametrize(
    ("names", "roots", "expected"),
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
def test_matching(names: list[str], roots: list[str], expected: tuple[str, ...]) -> None:
    assert matching(names, roots) == expected


@given(NAME, NAME)
def test_a_name_of_another_domain_is_never_ours(one: str, other: str) -> None:
    if "." in one and "." in other and one.casefold() != other.casefold():
        assert matching([one], [other]) == ()


@given(st.lists(NAME, max_size=4), st.lists(NAME, max_size=4))
def test_case_and_order_change_nothing(names: list[str], roots: list[str]) -> None:
    found = matching(names, roots)
    assert set(found) <= set(roots)
    assert matching([name.upper() for name in reversed(names)], reversed(roots)) == found
    for name in names:
        assert name in matching([*names, name], [*roots, name])


def test_the_nearest_names() -> None:
    roots = ["compute-1", "compute-2", "storage", "COMPUTE-10"]
    assert nearest("Compute-1", roots)[0] == "compute-1"
    assert nearest("compute1", roots, 1) == ("compute-1",)
    assert nearest("x", roots) == ()


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
def test_what_names_no_host_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(Invalid):
        Identity(**wrong)  # type: ignore[arg-type]


def test_an_identity_travels_and_counts_in_the_digest() -> None:
    known = Identity("cn1", str(uuid4()).upper(), ("cn1", "cn1.a"))
    assert wire.load_identity(wire.dump_identity(known)) == known
    assert wire.load_identity({}) == Identity()
    assert wire.digest([], []) == wire.digest([], [], Identity())
    digests = {wire.digest([], [], one) for one in (Identity(), Identity("cn1"), known)}
    assert len(digests) == 3
