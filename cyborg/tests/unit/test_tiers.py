# SPDX-License-Identifier: Apache-2.0
"""Tests of the tiers: the files named for the tier ``fast`` exist."""

from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine import tiers


@pytest.mark.static
def test_smoke_files_exist() -> None:
    folder = Path(__file__).parents[1]
    assert [name for name in tiers.SMOKE if not (folder / name).is_file()] == []
