# SPDX-License-Identifier: Apache-2.0
"""Random boots and deletes on two HGX hosts by many users, while everything but the users fails.

Agents and conductors are killed, and Fabric Manager is restarted. ``CYBORG_TEST_CHAOS_SEED`` sets
the random seed.
"""

import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cyborg.core.explain.predicates import Predicate
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.device_sets.boots import SIZES
from cyborg.tests.fixtures.device_sets.hgx_cloud import (
    HOSTS,
    BootFailed,
    HgxCloud,
    NotAllocated,
    Server,
    Servers,
    run_hgx_cloud,
)
from cyborg.tests.fixtures.machine import tiers
from cyborg.tests.fixtures.machine.processes import wait_until

USERS = 16
SEED = int(os.environ.get("CYBORG_TEST_CHAOS_SEED", "0")) or random.randrange(1, 2**31)
# Seconds in which a user tries to find a candidate.
PATIENCE = 10.0

pytestmark = [pytest.mark.services, pytest.mark.requires("compiler"), pytest.mark.long]


@pytest.fixture
def cloud(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[HgxCloud]:
    options: dict[str, dict[str, Any]] = {
        "rpc": {"timeout": 5},
        "conductor": {
            "down_heartbeats": 6,
            "lease_timeout": 5,
            "jobs_interval": 1,
            "placement_verify_interval": 10,
            # Each restart of Fabric Manager fails some prepare jobs.
            "device_cordon_after": 0,
        },
    }
    with run_hgx_cloud(tmp_path_factory.mktemp("chaos"), rabbit_url, options=options) as cloud:
        yield cloud


class Faults:
    """Kills and restarts at random."""

    def __init__(self, cloud: HgxCloud, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._cloud = cloud
        self._random = random.Random(seed)
        self._stopped = threading.Event()

    def run(self) -> None:
        """Inject faults one after the other until ``stop``; all is repaired then."""
        while True:
            faults = [self._agent, self._conductor, self._fabric]
            self._random.shuffle(faults)
            for fault in faults:
                if self._stopped.wait(self._random.uniform(0.5, 3)):
                    return
                fault(self._random.uniform(0, 2))
                self.counts[fault.__name__.strip("_")] += 1

    def stop(self) -> None:
        """Make ``run`` return after the current fault."""
        self._stopped.set()

    def _agent(self, seconds: float) -> None:
        host = self._random.choice(HOSTS)
        self._cloud.daemons[f"agent-{host}"].kill()
        time.sleep(seconds)
        self._cloud.agent(host)

    def _conductor(self, seconds: float) -> None:
        name = self._random.choice(self._cloud.conductors)
        self._cloud.daemons[name].kill()
        time.sleep(seconds)
        self._cloud.conductor(name)

    def _fabric(self, seconds: float) -> None:
        fabric = self._cloud.hgx[self._random.choice(HOSTS)].fabric
        fabric.stop()
        time.sleep(seconds)
        fabric.start(restart=True)


class User:
    """Boots and deletes servers at random."""

    def __init__(self, servers: Servers, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self._servers = servers
        self._random = random.Random(seed)
        self._running: list[Server] = []

    def run(self, boots: int) -> None:
        """Try so many boots, with deletes in between, then delete the rest."""
        for _ in range(boots):
            self._boot(self._random.choice(SIZES))
            if len(self._running) > 1 or self._random.random() < 0.5:
                self._delete()
        while self._running:
            self._delete()

    def _boot(self, size: int) -> None:
        # Not wait_until: without a candidate the user gives up, which is no failure.
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if providers := self._servers.cloud.candidates(size):
                try:
                    server = self._servers.boot(size, self._random.choice(providers))
                except NotAllocated:
                    pass  # Nova tries another candidate
                except BootFailed as exc:
                    self.failures.append(str(exc))
                    self.outcomes["failed"] += 1
                    return
                else:
                    self.outcomes[f"{size} GPUs"] += 1
                    self._running.append(server)
                    return
            time.sleep(0.3)
        self.outcomes["no candidate"] += 1

    def _delete(self) -> None:
        if self._running:
            index = self._random.randrange(len(self._running))
            self._servers.delete(self._running.pop(index))


def test_users_get_whole_partitions_while_services_fail(cloud: HgxCloud) -> None:
    wait_until("sets are offered", lambda: all(cloud.offered().values()))
    boots = max(2, tiers.scale(500) // USERS)
    servers = Servers(cloud)
    users = [User(servers, SEED + number) for number in range(USERS)]
    faults = Faults(cloud, SEED)
    with ThreadPoolExecutor(USERS + 1) as pool:
        injection = pool.submit(faults.run)
        try:
            for work in [pool.submit(user.run, boots) for user in users]:
                work.result()
        finally:
            faults.stop()
        injection.result()
    outcomes = sum((user.outcomes for user in users), Counter[str]())
    failures = [text for user in users for text in user.failures]
    sys.stdout.write(f"seed {SEED}: {dict(outcomes)}, {dict(faults.counts)}, {failures}\n")
    try:
        wait_until("no partition is active", lambda: not any(cloud.active().values()), 120)
        wait_until("every GPU is clean", lambda: not cloud.find_used())
        wait_until(
            "no job is open", lambda: not rows.read(cloud.engine, schema.jobs, state="pending")
        )
        for host in cloud.hgx.values():
            assert host.fabric.values("refused") + host.fabric.values("cut") == []
        assert servers.violations == []
        # Nova would not know of an ARQ either if it got no answer to its creation.
        lost = {row["state"] for row in rows.read(cloud.engine, schema.arqs)} - {"Initial"}
        assert lost == set()
        for size in set(SIZES):
            # A size that no server has got lately is offered again within five minutes.
            wait_until(f"a set of {size} is offered", lambda n=size: cloud.candidates(n), 360)  # type: ignore[misc]
        assert [text for text in failures if str(Predicate.TAKEN.description) in text] == []
        assert sum(outcomes.values()) == USERS * boots
        assert any(name.endswith("GPUs") for name in outcomes)
    except BaseException:
        sys.stderr.write(f"seed {SEED}\n")
        raise
