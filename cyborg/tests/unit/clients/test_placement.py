# SPDX-License-Identifier: Apache-2.0
import json
from typing import Any
from uuid import uuid4

import pytest
from keystoneauth1 import exceptions as ks

from cyborg.clients import placement
from cyborg.clients.placement import Placement
from cyborg.core.errors import Conflict, InUse, Invalid, Misconfigured, TimedOut, Unavailable
from cyborg.fixtures.embedded import Node, node, placement_adapter
from cyborg.fixtures.options import make_conf

__all__ = ["node", "placement_adapter"]

INVENTORY = {"CUSTOM_P": {"total": 2, "reserved": 2}}


def made(node: Node) -> str:
    uuid = str(uuid4())
    node.placement.ensure_classes(["CUSTOM_P"])
    generation = node.placement.create(uuid, f"{node.name}_{uuid}", node.uuid)
    node.placement.set_inventories(uuid, generation, INVENTORY)
    return uuid


def test_a_provider_is_made_read_and_deleted(node: Node) -> None:
    assert node.placement.find("no-such-host") is None
    assert node.placement.get(str(uuid4())) is None
    uuid = made(node)
    known = node.placement.get(uuid)
    assert known is not None
    assert known.parent_uuid == node.uuid
    assert set(node.placement.tree(node.uuid)) == {node.uuid, uuid}
    assert node.placement.inventories(uuid)["CUSTOM_P"]["reserved"] == 2
    node.placement.ensure_traits(["CUSTOM_T"])
    node.placement.set_traits(uuid, known.generation, ["CUSTOM_T"])
    assert node.placement.traits(uuid) == {"CUSTOM_T"}
    for _ in range(2):
        node.placement.delete(uuid)
    assert node.placement.inventories(uuid) == {}
    assert node.placement.traits(uuid) == frozenset()


def test_names_are_quoted(node: Node) -> None:
    odd = str(uuid4())
    node.placement.create(odd, f"{node.name}&in_tree=x y/ü", None)
    found = node.placement.find(f"{node.name}&in_tree=x y/ü")
    assert found is not None
    assert found.uuid == odd


def test_refusals_have_kinds(node: Node) -> None:
    uuid = made(node)
    with pytest.raises(Conflict) as stale:
        node.placement.set_inventories(uuid, 0, INVENTORY)
    assert not isinstance(stale.value, InUse)
    known = node.placement.get(uuid)
    assert known is not None
    node.placement.set_inventories(uuid, known.generation, {"CUSTOM_P": {"total": 2}})
    node.allocate(uuid, "CUSTOM_P")
    known = node.placement.get(uuid)
    assert known is not None
    with pytest.raises(InUse):
        node.placement.delete(uuid)
    with pytest.raises(InUse):
        node.placement.set_inventories(uuid, known.generation, {})
    with pytest.raises(InUse):
        node.placement.delete(node.uuid)
    with pytest.raises(Invalid):
        node.placement.create("no-uuid", "x", None)
    with pytest.raises(Conflict):
        node.placement.create(str(uuid4()), node.name, None)


class Answer:
    """What an adapter returns."""

    def __init__(self, status: int, body: Any) -> None:
        self.status_code = status
        self.text = body if isinstance(body, str) else json.dumps(body)

    def json(self) -> Any:
        return json.loads(self.text)


class Scripted:
    """An adapter that gives these answers one after another."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    def request(self, path: str, verb: str, **more: Any) -> Answer:
        self.calls.append((verb, path, more))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def version(most: str) -> Answer:
    return Answer(200, {"versions": [{"id": "v1.0", "max_version": most, "min_version": "1.0"}]})


EMPTY = Answer(200, {"resource_providers": []})


@pytest.mark.parametrize(("most", "used"), [("1.26", "1.26"), ("1.39", "1.39"), ("1.99", "1.39")])
def test_the_best_common_microversion_is_used(most: str, used: str) -> None:
    adapter = Scripted(version(most), EMPTY, EMPTY)
    client = Placement(adapter, 7.0)
    client.find("a")
    client.find("b")
    assert [more.get("microversion") for _, _, more in adapter.calls] == [None, used, used]
    assert {more["timeout"] for _, _, more in adapter.calls} == {7.0}


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (version("1.25"), Unavailable),
        (Answer(200, "<html>"), Unavailable),
        (Answer(200, {}), Unavailable),
        (Answer(503, "down"), Unavailable),
        (Answer(401, "who"), Unavailable),
        (ks.ConnectFailure("refused"), Unavailable),
        (ks.ConnectTimeout("slow"), TimedOut),
        (ks.EndpointNotFound("none"), Unavailable),
    ],
)
def test_what_is_away_or_no_placement_is_unavailable(answer: Any, kind: type[Exception]) -> None:
    client = Placement(Scripted(answer, version("1.39"), EMPTY))
    with pytest.raises(kind):
        client.find("a")
    assert client.find("a") is None


def test_names_are_ensured_once_until_placement_forgets_them() -> None:
    ok, bad = Answer(204, ""), Answer(400, {"errors": [{"detail": "No such trait"}]})
    adapter = Scripted(version("1.39"), ok, bad, version("1.39"), ok)
    client = Placement(adapter)
    for _ in range(2):
        client.ensure_traits(["CUSTOM_A"])
    with pytest.raises(Invalid, match="No such trait"):
        client.set_traits("u", 0, ["CUSTOM_A"])
    client.ensure_traits(["CUSTOM_A"])
    assert [path for _, path, _ in adapter.calls].count("/traits/CUSTOM_A") == 2


def test_a_section_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(Misconfigured, match=r"\[placement\] auth_type"):
        placement.make(make_conf())
    with pytest.raises(Misconfigured, match=r"\[placement\]"):
        placement.make(make_conf(placement={"auth_type": "no-such-plugin"}))
    assert placement.make(make_conf(placement={"endpoint_override": "http://127.0.0.1:1"}))


def test_who_has_allocations_and_whose_they_are(node: Node) -> None:
    uuid = made(node)
    assert node.placement.allocations(uuid) == {}
    assert node.placement.allocations(str(uuid4())) is None
    known = node.placement.get(uuid)
    assert known is not None
    node.placement.set_inventories(uuid, known.generation, {"CUSTOM_P": {"total": 2}})
    consumer = node.allocate(uuid, "CUSTOM_P")
    assert node.placement.allocations(uuid) == {consumer: {"CUSTOM_P": 1}}
    assert node.placement.consumer_project(consumer) == "p"
    assert node.placement.consumer_project(str(uuid4())) is None
    assert node.client.delete(f"/allocations/{consumer}").status_code == 204
    assert node.placement.allocations(uuid) == {}
    assert node.placement.consumer_project(consumer) is None


def test_questions_about_allocations_fail_as_others_do() -> None:
    away = Placement(Scripted(version("1.39"), Answer(503, "no"), ks.ConnectTimeout("slow")))
    with pytest.raises(Unavailable, match="503 to GET /resource_providers/u/allocations"):
        away.allocations("u")
    with pytest.raises(TimedOut):
        away.consumer_project("u")
