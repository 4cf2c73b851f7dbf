# SPDX-License-Identifier: Apache-2.0
"""A functional test that does not end fails after five minutes.

The few that need more on a busy machine have a mark with their own limit.
"""

from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine import tiers

FOLDER = Path(__file__).parent
# Seconds; a test of the tier ``extended`` may do eight times as much.
LIMIT, EXTENDED_LIMIT = 300, 900
# The first of these tests starts keystone: 30 s on a machine without other work, and 180 s on one
# with ten processes for each processor.
KEYSTONE_LIMIT = 900


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Limit the time of the tests of this folder."""
    clouds = [item for item in items if "keystone_cloud" in getattr(item, "fixturenames", [])]
    tiers.limit_time(config, clouds, FOLDER, KEYSTONE_LIMIT, KEYSTONE_LIMIT)
    tiers.limit_time(config, items, FOLDER, LIMIT, EXTENDED_LIMIT)
