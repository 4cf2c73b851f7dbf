# SPDX-License-Identifier: Apache-2.0
"""Errors of the servers that stand for an outage, as the driver and oslo.db raise them."""

import pymysql.err
import pytest
import sqlalchemy as sa
from oslo_db import exception as oslo

from cyborg.db.errors import to_unavailable


def raised(number: int, text: str) -> sa.exc.DBAPIError:
    """Return SQLAlchemy's form of an error of MariaDB or MySQL, which oslo.db passes on."""
    origin = pymysql.err.OperationalError(number, text)
    return sa.exc.OperationalError("UPDATE t SET a = 1", None, origin)


@pytest.mark.parametrize("wrap", [lambda error: error, oslo.DBError])
@pytest.mark.parametrize(
    ("number", "text", "message"),
    [
        (1040, "Too many connections", "the database does not answer"),
        (1047, "WSREP has not yet prepared node for application use", "does not answer"),
        (1290, "The MariaDB server is running with the --read-only option", "is read-only"),
        (1836, "Running in read-only mode", "is read-only"),
    ],
)
def test_outage_is_unavailable(number: int, text: str, message: str, wrap: object) -> None:
    assert callable(wrap)
    unavailable = to_unavailable(wrap(raised(number, text)))
    assert unavailable is not None
    assert message in unavailable.message


def test_bug_is_not_unavailable() -> None:
    assert to_unavailable(raised(1054, "Unknown column")) is None
