# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profile of the unit tests: no deadline, as a busy machine would miss it.

A unit test that does not end fails after 100 s, so a run tells about it within two minutes.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cyborg.tests.fixtures.machine import tiers

FOLDER = Path(__file__).parent
# Seconds.
LIMIT = 100
# A test that repeats something repeats it eight times as often in this tier.
EXTENDED_LIMIT = 300


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Limit the time of the tests of this folder."""
    tiers.limit_time(config, items, FOLDER, LIMIT, EXTENDED_LIMIT)


def pytest_configure() -> None:
    """Load the profile."""
    settings.register_profile(
        "unit",
        deadline=None,
        max_examples=tiers.scale(100),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("unit")
