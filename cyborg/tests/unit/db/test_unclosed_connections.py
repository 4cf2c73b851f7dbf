# SPDX-License-Identifier: Apache-2.0
"""The tests find SQLite connections that nothing closes."""

import sqlite3
import warnings
from contextlib import closing

import pytest
import sqlalchemy as sa


def test_collected_open_connection_raises_a_warning_with_its_test() -> None:
    connection = sqlite3.connect(":memory:")
    with pytest.warns(ResourceWarning, match=r"opened in .*warning_with_its_test.* was not closed"):
        connection.__del__()  # type: ignore[attr-defined]
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


def test_collected_open_connection_of_an_engine_raises_a_warning() -> None:
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        opened = connection.connection.driver_connection
    assert opened is not None
    with pytest.warns(ResourceWarning, match="was not closed"):
        opened.__del__()
    engine.dispose()


def test_closed_connection_raises_no_warning() -> None:
    with warnings.catch_warnings(), closing(sqlite3.connect(":memory:")) as connection:
        warnings.simplefilter("error")
        connection.close()
        connection.__del__()  # type: ignore[attr-defined]
