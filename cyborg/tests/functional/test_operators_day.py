# SPDX-License-Identifier: Apache-2.0
"""Execute the operator's day of the administration guide and compare its output."""

from pathlib import Path

import pytest

from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.pages.page_cloud import PageCloud, running

pytestmark = [pytest.mark.services, pytest.mark.slow]


def test_operators_day_matches_output(tmp_path: Path, rabbit_url: str) -> None:
    with (
        fresh_database("mysql", tmp_path) as database,
        running(PageCloud("admin/operators_day", tmp_path, database, rabbit_url)) as cloud,
    ):
        cloud.run()
