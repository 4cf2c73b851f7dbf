# SPDX-License-Identifier: Apache-2.0
"""A host whose jobs are tested."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cyborg.fixtures.agent_jobs import Host
from cyborg.fixtures.drivers import LONG


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Give a host, and see that nothing of it is left."""
    host = Host(tmp_path)
    yield host
    host.hand.free_all()
    host.jobs.stop()
    assert host.jobs.join(LONG)
