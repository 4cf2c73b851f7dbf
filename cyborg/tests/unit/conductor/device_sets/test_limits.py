# SPDX-License-Identifier: Apache-2.0
"""Limits of projects: a set of n devices is n units."""

import pytest
import sqlalchemy as sa

from cyborg.core.errors import OverLimit
from cyborg.core.inventory.device_set import SetKind
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.device_sets.host import GPU
from cyborg.tests.fixtures.device_sets.saved import make_set_host
from cyborg.tests.unit.conductor.binding.test_limits import PROJECT, make_arqs

__all__ = ["node", "placement_adapter"]


def test_limit_counts_each_device_of_a_set(sqlite_engine: sa.Engine, node: Node) -> None:
    host = make_set_host(sqlite_engine, node, kind=SetKind.PCIE)
    host.arqs = make_arqs(sqlite_engine, {GPU: "3"}, owner=PROJECT)
    rows.insert_profile(sqlite_engine, "pair", [{f"resources:{GPU}": "2"}])
    created = host.arqs.create("pair", PROJECT, PROJECT)
    host.bind_arqs("3", [arq["uuid"] for arq in created["arqs"]], node.uuid)
    assert len(host.owners()) == 2
    with pytest.raises(OverLimit):
        host.arqs.create("pair", PROJECT, PROJECT)
    host.delete(node.uuid)
    host.arqs.create("pair", PROJECT, PROJECT)
