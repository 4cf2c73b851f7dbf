# SPDX-License-Identifier: Apache-2.0
"""The API over the real conductor, on SQLite."""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from cyborg.fixtures import keystone
from cyborg.fixtures.api import ApiBed
from cyborg.fixtures.options import make_conf


@pytest.fixture
def api(sqlite_engine: sa.Engine) -> ApiBed:
    """Return an API that takes everyone for an administrator."""
    conf = make_conf()
    conf.set_override("auth_strategy", "noauth")
    return ApiBed(conf, sqlite_engine)


@pytest.fixture
def fake_keystone() -> Iterator[keystone.FakeKeystone]:
    """Return a keystone on a loopback port."""
    with keystone.serving() as found:
        yield found
