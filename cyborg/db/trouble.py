# SPDX-License-Identifier: Apache-2.0
"""What a failure of the database means to a caller: try again, the database is away, or a fault.

The codes are MySQL's error numbers, PostgreSQL's SQLSTATEs (appendix A of its manual) and SQLite's
messages.
"""

import contextlib
import sqlite3
from collections.abc import Iterator

import sqlalchemy as sa
from oslo_db import exception as oslo

from cyborg.core.errors import Unavailable

FAILURES = (oslo.DBError, sa.exc.SQLAlchemyError)
"""Everything that the database, its driver, SQLAlchemy and oslo.db raise."""

# Serialization failure, deadlock, lock not available.
_TRY_AGAIN_STATES = frozenset({"40001", "40P01", "55P03"})
# Connection exceptions, insufficient resources, operator intervention (shutdown, not yet started).
_AWAY_CLASSES = ("08", "53", "57P")
# Too many connections, of all or of this user; the server is shutting down.
_AWAY_NUMBERS = frozenset({1040, 1053, 1203, 1226})
# No right to enter the server or the database: it may be on its way.
_SHUT_NUMBERS = frozenset({1044, 1045, 1698})
_SHUT_CLASS = "28"
# libpq gives no state to what fails before a session has begun.
_SHUT_WORDS = ("authentication failed", "pg_hba.conf", "permission denied", "role")
_MISSING_TABLE_NUMBER = 1146
_MISSING_TABLE_STATE = "42P01"


def is_transient(error: BaseException) -> bool:
    """Tell whether the same transaction may succeed when it is run again."""
    if isinstance(error, oslo.DBDeadlock | oslo.DBConsistencyError):
        return True
    return _state(error) in _TRY_AGAIN_STATES or "database is locked" in str(_origin(error))


def unavailable(error: BaseException) -> Unavailable | None:
    """Return what to tell a caller when the database cannot serve, or None for any other fault."""
    if is_transient(error):
        return Unavailable("the database is busy: too many changes to the same rows at once")
    if _no_tables(error):
        return Unavailable("the database has no tables yet: run 'cyborg-dbsync upgrade'")
    if isinstance(error, oslo.DBNonExistentDatabase):
        return Unavailable("the database that [database] connection names does not exist")
    if isinstance(error, oslo.DBConnectionError | sa.exc.TimeoutError | sa.exc.InterfaceError):
        return Unavailable("the database does not answer")
    if not isinstance(_wrapped(error), sa.exc.OperationalError):
        return None
    if _is_shut(error):
        return Unavailable("the database does not let us in")
    if _is_away(error):
        return Unavailable("the database does not answer")
    return None


def reason(error: BaseException) -> str:
    """Return the driver's own words, in one line: for logs and operators, not for callers."""
    cause = error.__cause__ if isinstance(error, Unavailable) and error.__cause__ else error
    lines = str(_origin(cause) or cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn failures that mean "the database cannot serve" into errors.Unavailable."""
    try:
        yield
    except FAILURES as error:
        if (told := unavailable(error)) is not None:
            raise told from error
        raise


def _no_tables(error: BaseException) -> bool:
    return (
        isinstance(error, oslo.DBNonExistentTable)
        or _number(error) == _MISSING_TABLE_NUMBER
        or _state(error) == _MISSING_TABLE_STATE
    )


def _is_shut(error: BaseException) -> bool:
    number, state, origin = _number(error), _state(error), _origin(error)
    if number is not None:
        return number in _SHUT_NUMBERS
    if state is not None:
        return state.startswith(_SHUT_CLASS)
    return any(words in str(origin) for words in _SHUT_WORDS) and not _is_sqlite(error)


def _is_away(error: BaseException) -> bool:
    number, state, origin = _number(error), _state(error), _origin(error)
    if _is_sqlite(error):
        return "disk I/O error" in str(origin) or "disk is full" in str(origin)
    if number is not None:
        return number in _AWAY_NUMBERS or 2000 <= number < 3000  # the client's own: no connection
    return state is None or state.startswith(_AWAY_CLASSES)


def _is_sqlite(error: BaseException) -> bool:
    return isinstance(_origin(error), sqlite3.Error)


def _wrapped(error: BaseException) -> BaseException:
    """Return SQLAlchemy's error within oslo.db's, or the error itself."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) else error


def _origin(error: BaseException) -> BaseException | None:
    """Return the driver's own error."""
    return getattr(_wrapped(error), "orig", None)


def _state(error: BaseException) -> str | None:
    return getattr(_origin(error), "pgcode", None)


def _number(error: BaseException) -> int | None:
    arguments = getattr(_origin(error), "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else None
