# SPDX-License-Identifier: Apache-2.0
"""Device profiles of OpenStack Cyborg find devices of this service in a real Placement.

``test_import`` repeats it with a database that a release has made.
"""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.cmd.dbsync_import import import_database
from cyborg.db.reference import reader
from cyborg.tests.fixtures.databases import former, former_profiles
from cyborg.tests.fixtures.databases.placement import placement_adapter

__all__ = ["placement_adapter"]

pytestmark = pytest.mark.matrix


def test_imported_profiles_are_served_with_reference_traits(
    sqlite_engine: sa.Engine, placement_adapter: Any
) -> None:
    source = former.make_source()
    with source.begin() as tx:
        for name, text in former_profiles.make_profiles().items():
            former.add(tx, reader.profiles, name, None, text)
    with source.connect() as connection:
        report = import_database(connection, sqlite_engine, lambda *_: None, dry_run=False)
    source.dispose()
    assert set(report.unserved) == set(former_profiles.CARDS)
    assert "CUSTOM_CRYPTO" in report.unserved["qat"]["CUSTOM_QAT"]
    former_profiles.check_served_with_reference_traits(sqlite_engine, placement_adapter)
