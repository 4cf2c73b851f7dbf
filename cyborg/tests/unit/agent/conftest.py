# SPDX-License-Identifier: Apache-2.0
"""A host whose jobs are tested, and one whose backends change."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cyborg.fixtures.agent_jobs import Host
from cyborg.fixtures.converging import Begin, Changing, Wisher
from cyborg.fixtures.drivers import LONG


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Give a host, and see that nothing of it is left."""
    host = Host(tmp_path)
    yield host
    host.hand.free_all()
    host.jobs.stop()
    assert host.jobs.join(LONG)


@pytest.fixture
def wisher() -> Wisher:
    """Give what wants something of the host."""
    return Wisher()


@pytest.fixture
def begin(tmp_path: Path, wisher: Wisher) -> Iterator[Begin]:
    """Start a life of the agent; the one before it has ended by then."""
    lives: list[Changing] = []

    def start(text: str = "", **more: Any) -> Changing:
        if lives:
            lives.pop().stop()
        lives.append(Changing(tmp_path, wisher, text, **more))
        return lives[0].start()

    yield start
    for life in lives:
        life.stop()
