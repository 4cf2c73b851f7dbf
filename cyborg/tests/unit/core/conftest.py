# SPDX-License-Identifier: Apache-2.0
"""How the property tests of core run: without a deadline, which a busy machine would miss."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "core", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("core")
