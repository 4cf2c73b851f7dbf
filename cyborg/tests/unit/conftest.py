# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profile of the unit tests: no deadline, as a busy machine would miss it.

A unit test that does not end fails after five minutes.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cyborg.tests.fixtures.machine import tiers

FOLDER = Path(__file__).parent
LIMIT = pytest.mark.timeout(300)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limit the time of the tests of this folder."""
    for item in items:
        if item.path.is_relative_to(FOLDER) and item.get_closest_marker("timeout") is None:
            item.add_marker(LIMIT)


def pytest_configure() -> None:
    """Load the profile."""
    settings.register_profile(
        "unit",
        deadline=None,
        max_examples=tiers.scale(100),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("unit")
