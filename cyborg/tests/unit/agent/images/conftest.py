# SPDX-License-Identifier: Apache-2.0
"""A served double of Glance, and the spool of a store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cyborg.testing.fake_glance import FakeGlance, serve_glance


@pytest.fixture
def glance() -> Iterator[FakeGlance]:
    with serve_glance(FakeGlance()) as served:
        yield served


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"
