# SPDX-License-Identifier: Apache-2.0
from typing import Any, cast

from cyborg.clients.placement import ProviderSummary
from cyborg.conductor.placement.reconciler import order_by_depth
from cyborg.core.placement import Provider
from cyborg.db.providers.write import LeasedProviderRow


def rows(*uuids: str) -> list[LeasedProviderRow]:
    return [cast(LeasedProviderRow, {"uuid": uuid}) for uuid in uuids]


def provider(uuid: str, parent: str) -> Provider:
    return Provider(uuid, uuid, parent, {}, frozenset())


def test_order_by_depth_has_parents_first_and_removed_children_first() -> None:
    tree = {
        uuid: ProviderSummary(uuid, uuid, parent, 0, "root")
        for uuid, parent in (("old", "root"), ("older", "old"))
    }
    desired = {"part": provider("part", "card"), "card": provider("card", "root")}
    order = order_by_depth(rows("old", "part", "older", "card"), tree, desired)
    assert [row["uuid"] for row in order] == ["card", "part", "older", "old"]


def test_order_by_depth_with_a_loop_of_parents_ends() -> None:
    desired: dict[str, Any] = {"a": provider("a", "b"), "b": provider("b", "a")}
    assert len(order_by_depth(rows("a", "b"), {}, desired)) == 2
