# SPDX-License-Identifier: Apache-2.0
"""Changed compute nodes, and the hosts to which they may belong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.hosts import Identity
from cyborg.core.placement import ComputeNode, affected_hosts, changed_nodes, may_belong_to

UUID = "0b7a7e2a-5b0f-4b52-8f6b-7c7f6c0d1e55"
NODE = ComputeNode("compute-1", 5)


@pytest.mark.parametrize(
    ("after", "is_changed"),
    [
        ({UUID: NODE}, False),
        ({UUID: ComputeNode("compute-1", 6)}, False),
        ({}, True),
        ({UUID: ComputeNode("compute-1", 4)}, True),
        ({UUID: ComputeNode("compute-1.example", 5)}, True),
    ],
    ids=["same", "written", "missing", "made anew", "renamed"],
)
def test_changed_nodes_modified_node(after: dict[str, ComputeNode], is_changed: bool) -> None:
    assert (UUID in changed_nodes({UUID: NODE}, after)) is is_changed


def test_changed_nodes_new_node() -> None:
    assert changed_nodes({}, {UUID: NODE}) == {UUID: NODE}


@pytest.mark.parametrize(
    ("host", "identity", "expected"),
    [
        ("compute-1", Identity(), True),
        ("COMPUTE-1", Identity(), True),
        ("compute-2", Identity(), False),
        ("compute-2", Identity(names=("compute-1",)), True),
        ("compute-2", Identity(compute_id=UUID), True),
        ("compute-1", Identity(provider="compute-9"), False),
        ("compute-2", Identity(provider=UUID.upper()), True),
        ("compute-2", Identity(provider="compute-1"), True),
    ],
    ids=str,
)
def test_may_belong_to_host(host: str, identity: Identity, expected: bool) -> None:
    assert may_belong_to(host, identity, UUID, NODE) is expected


NAMES = st.sampled_from(
    ["c1", "C1", "c1.a", "c1.b", "c2", "c2.a", "10.0.0.1", "10.0.0.2", "localhost", "localhost.a"]
)
UUIDS = st.sampled_from([UUID, UUID.replace("0b", "1c"), UUID.replace("0b", "2d")])
IDENTITIES = st.builds(
    Identity,
    provider=st.none() | NAMES | UUIDS,
    compute_id=st.none() | UUIDS,
    names=st.lists(NAMES, max_size=3).map(tuple),
)


@given(
    st.dictionaries(UUIDS, st.builds(ComputeNode, NAMES, st.just(1))),
    st.dictionaries(NAMES, IDENTITIES),
)
def test_affected_hosts_matches_may_belong_to(
    nodes: dict[str, ComputeNode], identities: dict[str, Identity]
) -> None:
    expected = [
        host
        for host, identity in identities.items()
        if any(may_belong_to(host, identity, uuid, node) for uuid, node in nodes.items())
    ]
    assert affected_hosts(nodes, identities) == expected


def test_affected_hosts_run_time_is_not_quadratic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []

    def counted(host: str, identity: Identity, uuid: str, node: ComputeNode) -> bool:
        compared.append(host)
        return may_belong_to(host, identity, uuid, node)

    monkeypatch.setattr("cyborg.core.placement.may_belong_to", counted)
    nodes = {f"u{n}": ComputeNode(f"c{n}.example.org", 1) for n in range(500)}
    identities = {f"c{n}": Identity(names=(f"c{n}.example.org",)) for n in range(500)}
    assert len(affected_hosts(nodes, identities)) == 500
    assert len(compared) == 500
