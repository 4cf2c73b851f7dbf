# SPDX-License-Identifier: Apache-2.0
"""The scan of deleted servers, with a real Placement and each kind of database."""

import logging
from datetime import timedelta
from uuid import uuid4

import pytest
from oslo_utils import timeutils

from cyborg.clients.nova import Nova
from cyborg.conductor.orphans import watcher
from cyborg.conductor.orphans.watcher import DeletionScan
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.machine.log_lines import texts_of
from cyborg.tests.unit.conductor.orphans.test_watcher import Env, env, node, placement_adapter

__all__ = ["env", "node", "placement_adapter"]


@pytest.mark.parametrize("allowed", [True, False])
def test_deleted_instance_is_released_without_notifications(
    env: Env, allowed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The server of a member with a port, whose ARQ Nova does not delete."""
    card = env.add_card()
    stays, orphan = env.add_bound_arq(card), env.add_bound_arq(card)
    env.serve(stays)
    instance = env.instance(orphan)
    env.deallocate(orphan)
    env.fake.deleted = {instance, *(str(uuid4()) for _ in range(3))}
    env.fake.is_admin = allowed
    now = [timeutils.utcnow()]
    uow, nova = UnitOfWork(env.engine), Nova(env.fake.adapter(), 5.0)
    scans = [DeletionScan(uow, nova, env.watcher.check, lambda: now[0]) for _ in range(2)]
    with count_statements(env.engine) as statements:
        assert [scan.run_once() for scan in scans] == [4 * allowed, 0], "one conductor scans"
    assert len(env.fake.requested_paths) == 1 + allowed, "a page, and an empty one"
    assert env.run(0.0) == allowed
    assert len(env.fake.requested_paths) == 1 + 3 * allowed, "servers without ARQs cost no query"
    left = [row["uuid"] for row in rows.read(env.engine, schema.arqs)]
    assert left == ([stays] if allowed else [stays, orphan])
    assert ("cannot list the servers of all projects" in caplog.text) is not allowed
    now[0] += timedelta(seconds=watcher.SCAN_INTERVAL)
    assert scans[1].run_once() == 4 * allowed, "the other one goes on"
    assert env.run(0.0) == 0
    assert len(statements) <= 8


def test_user_without_the_permission_is_named_once_until_it_has_it(
    env: Env, caplog: pytest.LogCaptureFixture
) -> None:
    now = [timeutils.utcnow()]
    scan = DeletionScan(
        UnitOfWork(env.engine), Nova(env.fake.adapter(), 5.0), env.watcher.check, lambda: now[0]
    )

    def count_warnings(is_admin: bool, status: int = 200) -> int:
        caplog.clear()
        env.fake.is_admin, env.fake.status = is_admin, status
        now[0] += timedelta(seconds=watcher.SCAN_INTERVAL)
        scan.run_once()
        return len(texts_of(caplog.records, logging.WARNING))

    answers = [(False, 200), (False, 200), (True, 503), (False, 200), (True, 200), (False, 200)]
    assert [count_warnings(*answer) for answer in answers] == [1, 0, 1, 0, 0, 1]
