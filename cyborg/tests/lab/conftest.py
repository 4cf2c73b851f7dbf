# SPDX-License-Identifier: Apache-2.0
"""Skip the lab with a reason where it cannot run, or fail where it is required."""

import pytest

from cyborg.tests.fixtures.machine import prerequisites


# A hook, not a fixture: a fixture of a test module with the same name would replace it.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip a test on a machine that cannot boot a guest."""
    prerequisites.require("lab")
