# SPDX-License-Identifier: Apache-2.0
"""Clouds of four hosts for the tests of rollouts."""

import pytest
import sqlalchemy as sa

from cyborg.tests.fixtures.hosts.rollouts import FAKE, HOSTS, OTHER, Cloud


@pytest.fixture
def cloud(engine: sa.Engine) -> Cloud:
    return Cloud(engine, HOSTS)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> Cloud:
    """A cloud on one database, for what no database does its own way."""
    return Cloud(sqlite_engine, HOSTS, (FAKE, OTHER))
