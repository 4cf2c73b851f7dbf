# SPDX-License-Identifier: Apache-2.0
"""Random boots and deletes on two HGX H100 hosts with two conductors; agents fail at times."""

import random
import sys
import threading
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.explain.predicates import Predicate
from cyborg.core.inventory.device_set import OfferMode
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.device_sets.boots import Boots, Fabrics
from cyborg.tests.fixtures.device_sets.host import SetHost
from cyborg.tests.fixtures.machine import tiers
from cyborg.tests.fixtures.machine.processes import wait_until

__all__ = ["node", "placement_adapter"]

USERS = 16
SEED = random.randrange(1 << 31)


@pytest.mark.parametrize("mode", tiers.sample(OfferMode, OfferMode.DISJOINT), ids=str)
def test_servers_get_whole_sets_and_leave_nothing(
    engine: sa.Engine, node: Node, placement_adapter: Any, mode: OfferMode
) -> None:
    wanted = {"8": 1, "4": 1, "2": 2, "1": 2}
    nodes = (node, Node(placement_adapter))
    hosts = [SetHost(engine, n, wanted=wanted, group="hgx", mode=mode) for n in nodes]
    fabrics = Fabrics(SEED)
    servers = max(3, tiers.scale(500) // USERS)
    with Boots(hosts, fabrics) as boots:
        users = [
            threading.Thread(target=boots.run_user, args=(SEED + n, servers)) for n in range(USERS)
        ]
        for user in users:
            user.start()
        for user in users:
            user.join()
        wait_until("every partition is inactive", lambda: not any(fabrics.active.values()))
        wait_until("no job is open", lambda: not rows.read(engine, schema.jobs, state="pending"))
    sys.stdout.write(f"seed {SEED}: {dict(boots.outcomes)}\n")
    assert fabrics.overlaps == []
    assert fabrics.activations > 0
    assert rows.read(engine, schema.arqs) == []
    assert not boots.owners_of_units()
    if mode is OfferMode.DISJOINT:
        # No boot failed because another server had one of its devices. A set that was released a
        # moment ago can be scheduled before Placement has it reserved: its bind waits, and may fail
        # only if the cleaning fails.
        taken = [text for text in boots.failures if str(Predicate.TAKEN.description) in text]
        assert taken == []
