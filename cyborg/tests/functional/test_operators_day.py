# SPDX-License-Identifier: Apache-2.0
"""Execute the operator's day of the administration guide up to a replaced card.

``test_operators_day_changes.py`` executes the other sections.
"""

from pathlib import Path

import pytest

from cyborg.tests.fixtures.pages.operators_day import CHANGES, page_cloud

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.matrix]


def test_operators_day_until_a_card_is_replaced_matches_output(
    tmp_path: Path, rabbit_url: str
) -> None:
    with page_cloud(tmp_path, rabbit_url) as cloud:
        cloud.run(CHANGES)
