# SPDX-License-Identifier: Apache-2.0
"""Execute the last sections of the operator's day: a driver update, quotas, audit and upgrade."""

from pathlib import Path

import pytest

from cyborg.tests.fixtures.pages.operators_day import PREPARATION, first_sections, page_cloud

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.matrix]


def test_operators_day_from_a_driver_update_on_matches_output(
    tmp_path: Path, rabbit_url: str
) -> None:
    with page_cloud(tmp_path, rabbit_url) as cloud:
        cloud.run(first_sections(), PREPARATION)
