# SPDX-License-Identifier: Apache-2.0
"""Execute the page about backup and restore, and compare its output."""

from pathlib import Path

import pytest

from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.machine.prerequisites import require
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.fixtures.pages.page_cloud import PageCloud, running

pytestmark = [pytest.mark.services, pytest.mark.matrix]

SERVERS = {"mysql": "MariaDB", "postgresql": "PostgreSQL"}


@pytest.mark.parametrize("kind", sample(SERVERS, "mysql", mark=pytest.mark.long))
def test_restored_database_is_repaired_as_on_the_page(
    tmp_path: Path, rabbit_url: str, kind: str
) -> None:
    require({"mysql": "mariadb-dump", "postgresql": "pg_dump"}[kind])
    others = [name for key, name in SERVERS.items() if key != kind]
    with (
        fresh_database(kind, tmp_path) as database,
        running(PageCloud("admin/backup", tmp_path, database, rabbit_url)) as cloud,
    ):
        cloud.run([f"{task} of {name}" for task in ("Backup", "Restore") for name in others])
