# SPDX-License-Identifier: Apache-2.0
"""Plans of device sets lock providers in the order of those that mark them stale."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotEnded
from datetime import datetime

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.core.inventory.device_set import SetKind
from cyborg.db import schema
from cyborg.db.device_sets import offers as store
from cyborg.db.providers import write
from cyborg.db.providers.write import mark_stale_existing
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.device_sets.saved import make_set_host

__all__ = ["node", "placement_adapter"]


def test_plan_and_change_of_the_same_sets_do_not_deadlock(engine: sa.Engine, node: Node) -> None:
    """The plan ends a withdrawal, and offers another set; a claim or report changes both."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer")
    host, now = make_set_host(engine, node, kind=SetKind.PCIE), timeutils.utcnow()
    providers = sorted(map(host.provider, host.family))
    offered, withdrawn = providers[0], providers[-1]
    (row,) = rows.read(engine, schema.providers, uuid=withdrawn)

    def change() -> int:
        with engine.begin() as tx:
            return mark_stale_existing(tx, [offered, withdrawn], now)

    with ThreadPoolExecutor(1) as pool:
        with engine.begin() as tx:
            store.lock_sets(tx, node.name)
            ended = store.lock_current(tx, {withdrawn: row["revision"]}, providers)
            assert ended == {withdrawn}
            waiting = pool.submit(change)
            with pytest.raises(NotEnded):
                waiting.result(0.5)
            assert mark_stale_existing(tx, [offered], now) == 1
        assert waiting.result(10.0) == 2
    found = {row["uuid"]: row["revision"] for row in rows.read(engine, schema.providers)}
    assert found[withdrawn] == row["revision"] + 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(write.mark_others_stale, id="report"),
        pytest.param(lambda tx, host, now: write.mark_stale_of_hosts(tx, [host], now), id="down"),
        pytest.param(
            lambda tx, host, now: write.mark_removed(tx, host, now, evict=True), id="removal"
        ),
        pytest.param(
            lambda tx, host, now: write.schedule_verification_of_hosts(tx, [host], now),
            id="restart",
        ),
        pytest.param(
            lambda tx, host, now: write.schedule_verification_of_settled(tx, [host], now),
            id="compute-node",
        ),
    ],
)
def test_plan_and_change_of_all_providers_of_a_host_do_not_deadlock(
    engine: sa.Engine, node: Node, change: Callable[[sa.Connection, str, datetime], int]
) -> None:
    """The ids of the rows are in another order than their uuids."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer")
    make_set_host(engine, node, kind=SetKind.PCIE)
    now = timeutils.utcnow()
    with engine.begin() as tx:
        tx.execute(sa.update(schema.providers).values(stale_since=None))
    found = rows.read(engine, schema.providers, host=node.name)
    by_id = [row["uuid"] for row in sorted(found, key=lambda row: row["id"])]
    first, *others = sorted(by_id)
    if by_id[0] == first:  # by chance: the uuids are random
        last_id = max(row["id"] for row in found) + 1
        with engine.begin() as tx:
            tx.execute(sa.update(schema.providers).filter_by(uuid=first).values(id=last_id))

    def run() -> int:
        with engine.begin() as tx:
            return change(tx, node.name, now)

    with ThreadPoolExecutor(1) as pool:
        with engine.begin() as tx:
            store.lock_sets(tx, node.name)
            assert store.lock_current(tx, {first: 0}) == frozenset()
            waiting = pool.submit(run)
            with pytest.raises(NotEnded):
                waiting.result(0.5)
            # As a lock of all of them in one statement that has got only the first one so far.
            assert store.lock_current(tx, dict.fromkeys(others, 0)) == frozenset()
        assert waiting.result(10.0) == len(found)
