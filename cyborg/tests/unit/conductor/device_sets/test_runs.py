# SPDX-License-Identifier: Apache-2.0
"""Changes at any point of a publisher's run: the offers follow them without the sweep of groups."""

from typing import Any

import sqlalchemy as sa

from cyborg.tests.fixtures.databases.placement import placement_adapter
from cyborg.tests.fixtures.device_sets.group import FREE, Group

__all__ = ["placement_adapter"]


def test_devices_that_are_clean_before_any_transaction_of_a_run_are_planned(
    sqlite_engine: sa.Engine, placement_adapter: Any
) -> None:
    group = Group(sqlite_engine, placement_adapter)
    point = number = 0
    while point <= number:
        # The second server has a pair of the host that was whole until the first one got the other.
        first, second = group.boot(2), group.boot(2)
        assert first[0] is not second[0]
        group.delete(*first)
        group.finish_jobs()
        group.publish()
        group.delete(*second)
        group.transactions.start({point: group.finish_jobs})
        group.publish()
        number = group.transactions.passed
        group.transactions.start({})
        group.finish_jobs()
        group.publish()
        assert group.sizes() == FREE, f"clean before transaction {point} of {number}"
        point += 1
    # The lease, the plan, the read, and the record with the next lease.
    assert number >= 4
