# SPDX-License-Identifier: Apache-2.0
"""Skip the lab with a reason where it cannot run, or fail where it is required."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine import prerequisites

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Give each test the time that the boot of an emulated host takes on a slow machine."""
    for item in items:
        if item.path.parent == FOLDER and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(3600))


# A hook, not a fixture: a fixture of a test module with the same name would replace it.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip a test on a machine that cannot boot a guest."""
    prerequisites.require("lab")
