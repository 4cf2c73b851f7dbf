# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profile of the core tests: no deadline, as a busy machine would miss it."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "core", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("core")
