# SPDX-License-Identifier: Apache-2.0
import json
from typing import Any
from uuid import uuid4

import pytest
from keystoneauth1 import adapter, session
from keystoneauth1 import exceptions as ks

from cyborg.clients import placement
from cyborg.clients.placement import Placement
from cyborg.core.errors import Conflict, InUse, Invalid, Misconfigured, TimedOut, Unavailable
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.options import make_conf

__all__ = ["node", "placement_adapter"]

INVENTORY = {"CUSTOM_P": {"total": 2, "reserved": 2}}


def create_provider(node: Node) -> str:
    uuid = str(uuid4())
    node.placement.ensure_classes(["CUSTOM_P"])
    generation = node.placement.create(uuid, f"{node.name}_{uuid}", node.uuid)
    node.placement.set_inventories(uuid, generation, INVENTORY)
    return uuid


def test_provider_is_created_read_and_deleted(node: Node) -> None:
    assert node.placement.find("no-such-host") is None
    assert node.placement.get(str(uuid4())) is None
    uuid = create_provider(node)
    provider = node.placement.get(uuid)
    assert provider is not None
    assert provider.parent_uuid == node.uuid
    assert set(node.placement.tree(node.uuid)) == {node.uuid, uuid}
    assert node.placement.inventories(uuid)["CUSTOM_P"]["reserved"] == 2
    node.placement.ensure_traits(["CUSTOM_T"])
    node.placement.set_traits(uuid, provider.generation, ["CUSTOM_T"])
    assert node.placement.traits(uuid) == {"CUSTOM_T"}
    for _ in range(2):
        node.placement.delete(uuid)
    assert node.placement.inventories(uuid) == {}
    assert node.placement.traits(uuid) == frozenset()


def test_find_quotes_the_name(node: Node) -> None:
    uuid = str(uuid4())
    node.placement.create(uuid, f"{node.name}&in_tree=x y/ü", None)
    provider = node.placement.find(f"{node.name}&in_tree=x y/ü")
    assert provider is not None
    assert provider.uuid == uuid


def test_errors_have_specific_classes(node: Node) -> None:
    uuid = create_provider(node)
    with pytest.raises(Conflict) as stale:
        node.placement.set_inventories(uuid, 0, INVENTORY)
    assert not isinstance(stale.value, InUse)
    provider = node.placement.get(uuid)
    assert provider is not None
    node.placement.set_inventories(uuid, provider.generation, {"CUSTOM_P": {"total": 2}})
    node.allocate(uuid, "CUSTOM_P")
    provider = node.placement.get(uuid)
    assert provider is not None
    with pytest.raises(InUse):
        node.placement.delete(uuid)
    with pytest.raises(InUse):
        node.placement.set_inventories(uuid, provider.generation, {})
    with pytest.raises(InUse):
        node.placement.delete(node.uuid)
    with pytest.raises(Invalid):
        node.placement.create("no-uuid", "x", None)
    with pytest.raises(Conflict):
        node.placement.create(str(uuid4()), node.name, None)


class FakeResponse:
    """Response of a fake adapter."""

    def __init__(self, status: int, body: Any) -> None:
        self.status_code = status
        self.text = body if isinstance(body, str) else json.dumps(body)

    def json(self) -> Any:
        return json.loads(self.text)


class FakeAdapter(adapter.Adapter):
    """Fake adapter that returns these responses one after another."""

    def __init__(self, *answers: FakeResponse | Exception) -> None:
        super().__init__(session.Session())
        self.answers = list(answers)
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    def request(self, path: str, verb: str, **options: Any) -> Any:  # type: ignore[override]
        self.calls.append((verb, path, options))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def version(maximum: str) -> FakeResponse:
    return FakeResponse(
        200, {"versions": [{"id": "v1.0", "max_version": maximum, "min_version": "1.0"}]}
    )


EMPTY = FakeResponse(200, {"resource_providers": []})


MICROVERSIONS = [("1.26", "1.26"), ("1.39", "1.39"), ("1.99", "1.39")]


@pytest.mark.parametrize(("maximum", "expected"), MICROVERSIONS)
def test_highest_common_microversion_is_used(maximum: str, expected: str) -> None:
    fake = FakeAdapter(version(maximum), EMPTY, EMPTY)
    client = Placement(fake, 7.0)
    client.find("a")
    client.find("b")
    assert [options.get("microversion") for _, _, options in fake.calls] == [
        None,
        expected,
        expected,
    ]
    assert {options["timeout"] for _, _, options in fake.calls} == {7.0}


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (version("1.25"), Unavailable),
        (FakeResponse(200, "<html>"), Unavailable),
        (FakeResponse(200, {}), Unavailable),
        (FakeResponse(503, "down"), Unavailable),
        (FakeResponse(401, "who"), Unavailable),
        (ks.DiscoveryFailure("no versions"), Unavailable),
        (ks.ConnectTimeout("slow"), TimedOut),
        (ks.EndpointNotFound("none"), Unavailable),
    ],
)
def test_failed_negotiation_raises_and_is_repeated(answer: Any, kind: type[Exception]) -> None:
    client = Placement(FakeAdapter(answer, version("1.39"), EMPTY))
    with pytest.raises(kind):
        client.find("a")
    assert client.find("a") is None


def test_ensure_traits_is_cached_until_an_error() -> None:
    ok, rejected = (
        FakeResponse(204, ""),
        FakeResponse(400, {"errors": [{"detail": "No such trait"}]}),
    )
    fake = FakeAdapter(version("1.39"), ok, rejected, version("1.39"), ok)
    client = Placement(fake)
    for _ in range(2):
        client.ensure_traits(["CUSTOM_A"])
    with pytest.raises(Invalid, match="No such trait"):
        client.set_traits("u", 0, ["CUSTOM_A"])
    client.ensure_traits(["CUSTOM_A"])
    assert [path for _, path, _ in fake.calls].count("/traits/CUSTOM_A") == 2


def test_make_with_an_unusable_section_is_rejected() -> None:
    with pytest.raises(Misconfigured, match=r"\[placement\] auth_type"):
        placement.make(make_conf())
    with pytest.raises(Misconfigured, match=r"\[placement\]"):
        placement.make(make_conf(placement={"auth_type": "no-such-plugin"}))
    assert placement.make(make_conf(placement={"endpoint_override": "http://127.0.0.1:1"}))


def test_allocations_of_a_provider_and_of_a_consumer(node: Node) -> None:
    uuid = create_provider(node)
    assert node.placement.allocations(uuid) == {}
    assert node.placement.allocations(str(uuid4())) is None
    provider = node.placement.get(uuid)
    assert provider is not None
    node.placement.set_inventories(uuid, provider.generation, {"CUSTOM_P": {"total": 2}})
    consumer = node.allocate(uuid, "CUSTOM_P")
    assert node.placement.allocations(uuid) == {consumer: {"CUSTOM_P": 1}}
    assert node.placement.allocations_of(consumer) == ("p", {uuid: 1})
    assert node.placement.allocations_of(str(uuid4())) == (None, {})
    assert node.client.delete(f"/allocations/{consumer}").status_code == 204
    assert node.placement.allocations(uuid) == {}
    assert node.placement.allocations_of(consumer) == (None, {})


def test_allocation_queries_raise_the_usual_errors() -> None:
    client = Placement(
        FakeAdapter(version("1.39"), FakeResponse(503, "no"), ks.ConnectTimeout("slow"))
    )
    with pytest.raises(Unavailable, match="503 to GET /resource_providers/u/allocations"):
        client.allocations("u")
    with pytest.raises(TimedOut):
        client.allocations_of("u")
