# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profile of the unit tests: no deadline, as a busy machine would miss it."""

from hypothesis import HealthCheck, settings

from cyborg.tests.fixtures.machine import tiers


def pytest_configure() -> None:
    """Load the profile."""
    settings.register_profile(
        "unit",
        deadline=None,
        max_examples=tiers.scale(100),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("unit")
