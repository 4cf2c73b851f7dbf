# SPDX-License-Identifier: Apache-2.0
"""Hosts for the tests of jobs and of the reconciler."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cyborg.tests.fixtures.hosts.agent_jobs import Host
from cyborg.tests.fixtures.hosts.reconciler_host import ConductorDouble, ReconcilerHost, StartHost
from cyborg.tests.fixtures.hosts.scripted_driver import LONG


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Give a host, and see that nothing of it is left."""
    host = Host(tmp_path)
    yield host
    host.script.unblock_all()
    host.jobs.stop()
    assert host.jobs.join(LONG)


@pytest.fixture
def conductor() -> ConductorDouble:
    """Return a conductor with a desired state."""
    return ConductorDouble()


@pytest.fixture
def start_host(tmp_path: Path, conductor: ConductorDouble) -> Iterator[StartHost]:
    """Return a function that starts an agent and stops the previous one."""
    hosts: list[ReconcilerHost] = []

    def start(text: str = "", **more: Any) -> ReconcilerHost:
        if hosts:
            hosts.pop().stop()
        hosts.append(ReconcilerHost(tmp_path, conductor, text, **more))
        return hosts[0].start()

    yield start
    for host in hosts:
        host.stop()
