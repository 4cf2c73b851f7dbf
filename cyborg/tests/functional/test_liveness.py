# SPDX-License-Identifier: Apache-2.0
"""A killed agent cordons its host until it returns.

Real processes, MariaDB, Placement and RabbitMQ. ``test_liveness_outages.py`` has the outages of
other daemons, which cordon nothing.
"""

import time
from pathlib import Path

import pytest

from cyborg.tests.fixtures.hosts.watched_cloud import HANDLES, LIMIT, ONE, OTHER, watched_cloud
from cyborg.tests.fixtures.machine.processes import wait_until

LONG = 120.0

# test_alarm.py kills an agent in the default tier.
pytestmark = [pytest.mark.services, pytest.mark.matrix]


def test_host_is_cordoned_when_its_agent_is_killed(rabbit_url: str, tmp_path: Path) -> None:
    with watched_cloud(tmp_path, rabbit_url) as env:
        began = time.monotonic()  # before the kill: a busy machine lengthens the time only
        env.cloud.daemons[f"agent-{ONE}"].kill()
        wait_until("the host is closed", lambda: env.reserved(ONE) == HANDLES, LONG)
        assert time.monotonic() - began >= LIMIT - 1
        assert env.reserved(OTHER) == 0
        services = env.services()
        assert services[ONE]["state"] == "down"
        assert services[ONE]["down_since"] is not None
        assert services[OTHER]["down_since"] is None
        assert env.closings() == 1

        env.cloud.agent(ONE)
        wait_until("the host is open", env.open)
        assert env.services()[ONE]["down_since"] is None
        assert env.closings() == 1
