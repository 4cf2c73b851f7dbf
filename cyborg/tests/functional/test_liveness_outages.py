# SPDX-License-Identifier: Apache-2.0
"""Stopped conductors and a broker that is cut off cordon no host.

Real processes, MariaDB, Placement, and a RabbitMQ behind a relay that can be cut.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from cyborg.tests.fixtures.hosts.watched_cloud import GRACE, LIMIT, WatchedCloud, watched_cloud
from cyborg.tests.fixtures.machine.processes import wait_until

pytestmark = [pytest.mark.services, pytest.mark.matrix]


def stop_conductors(env: WatchedCloud, seconds: float) -> None:
    """Stop all conductors for some time, as on a host that hangs."""
    pids = [env.cloud.daemons[name].pid for name in env.cloud.conductors]
    for pid in pids:
        os.killpg(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        os.killpg(pid, signal.SIGCONT)


def test_outages_of_conductors_and_broker_cordon_no_host(rabbit_url: str, tmp_path: Path) -> None:
    with watched_cloud(tmp_path, rabbit_url) as env:
        # For longer than the limit for agents.
        stop_conductors(env, 2 * LIMIT)
        env.watch(2 * LIMIT)

        env.wire.cut()
        env.watch(2 * LIMIT)
        env.wire.restore()
        env.watch(LIMIT + GRACE)

        def up() -> bool:
            return all(service["state"] == "up" for service in env.services().values())

        wait_until("the agents speak", up)
        env.watch(LIMIT)
        env.check_undisturbed()
