# SPDX-License-Identifier: Apache-2.0
"""Fixtures: the API with the real conductor on SQLite, and a fake keystone."""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from cyborg.testing import fake_keystone as keystone
from cyborg.tests.fixtures.clouds.api import ApiEnv
from cyborg.tests.fixtures.machine.options import make_conf


@pytest.fixture
def api(sqlite_engine: sa.Engine) -> ApiEnv:
    """Return an API with auth_strategy noauth: every caller is an administrator."""
    conf = make_conf()
    conf.set_override("auth_strategy", "noauth")
    return ApiEnv(conf, sqlite_engine)


@pytest.fixture
def fake_keystone() -> Iterator[keystone.FakeKeystone]:
    """Return a fake keystone on a loopback port."""
    with keystone.serve_keystone() as server:
        yield server
