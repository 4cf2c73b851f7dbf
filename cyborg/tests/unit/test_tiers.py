# SPDX-License-Identifier: Apache-2.0
"""Tests of the tiers: the files of the tier ``fast`` exist, and each tier repeats something."""

from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine import tiers


@pytest.mark.static
def test_smoke_files_exist() -> None:
    folder = Path(__file__).parents[1]
    assert [name for name in tiers.SMOKE if not (folder / name).is_file()] == []


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_each_tier_repeats_at_least_once(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiers._SELECTED, "tier", tier)
    assert tiers.scale(1) == 1
    assert tiers.scale(160) in (10, 20, 160)
