# SPDX-License-Identifier: Apache-2.0
"""The lab is skipped with a reason where it cannot be, and fails there when it is required."""

import os

import pytest

from cyborg.fixtures import guest


@pytest.fixture(scope="session", autouse=True)
def lab() -> None:
    """Boot nothing on a machine that cannot."""
    if why := guest.missing():
        if os.environ.get("CYBORG_TEST_REQUIRE_SERVICES") == "1":
            pytest.fail(why)
        pytest.skip(why)
