# SPDX-License-Identifier: Apache-2.0
"""Classification of database errors: transient, database unavailable, or a bug.

The codes are MySQL's error numbers, PostgreSQL's SQLSTATEs (appendix A of its manual) and SQLite's
messages.
"""

import contextlib
import re
import sqlite3
from collections.abc import Iterator

import sqlalchemy as sa
from oslo_db import exception as oslo

from cyborg.core.errors import Unavailable

# Message of Unavailable if no connection to the database works.
NO_ANSWER = "the database does not answer"

# All exceptions that SQLAlchemy and oslo.db raise.
FAILURES = (oslo.DBError, sa.exc.SQLAlchemyError)

# Serialization failure, deadlock, lock not available.
_TRANSIENT_STATES = frozenset({"40001", "40P01", "55P03"})
# Connection exceptions, insufficient resources, operator intervention (shutdown, not yet started).
_DOWN_CLASSES = ("08", "53", "57P")
# Too many connections, of all or of this user. libpq has only a text.
_FULL_NUMBERS = frozenset({1040, 1203, 1226})
_FULL_STATE = "53300"
_FULL_TEXTS = ("too many clients", "too many connections", "remaining connection slots")
# The server is shutting down; a node of a Galera cluster has not joined it, or is cut off from it.
# 1180: "Got error N during COMMIT", of any cause, such as that the node was cut off then. The
# outcome of the commit is unknown.
_DOWN_NUMBERS = frozenset({1047, 1053, 1180})
# The server accepts no changes: a replica, or a primary that is being replaced.
_READ_ONLY_NUMBERS = frozenset({1290, 1836})
_READ_ONLY_STATE = "25006"
# The server cancelled a statement at its time limit: MariaDB, MySQL; PostgreSQL.
_SLOW_NUMBERS = frozenset({1969, 3024})
_SLOW_STATE = "57014"
# Access denied. The account may still be in creation, so a retry can help.
_DENIED_NUMBERS = frozenset({1044, 1045, 1698})
_DENIED_CLASS = "28"
# libpq has no SQLSTATE for errors before a session starts.
_DENIED_TEXTS = ("authentication failed", "pg_hba.conf", "permission denied", "role")
_MISSING_TABLE_NUMBER = 1146
_MISSING_TABLE_STATE = "42P01"


# Messages of SQLite, and of MySQL and MariaDB; PostgreSQL has a field for the name.
_DUPLICATE = re.compile(r"UNIQUE constraint failed: (.+)$|for key '([^']+)'")


def is_transient(error: BaseException) -> bool:
    """Return whether the same transaction may succeed when it is retried."""
    if isinstance(error, oslo.DBDeadlock | oslo.DBConsistencyError):
        return True
    return _state(error) in _TRANSIENT_STATES or "database is locked" in str(_origin(error))


def to_unavailable(error: BaseException) -> Unavailable | None:
    """Return the error for a caller if the database is unavailable, None for any other error."""
    if is_transient(error):
        return Unavailable("database is busy: too many concurrent changes to the same rows, retry")
    number, state = _number(error), _state(error)
    has_no_tables = number == _MISSING_TABLE_NUMBER or state == _MISSING_TABLE_STATE
    if has_no_tables or isinstance(error, oslo.DBNonExistentTable):
        return Unavailable("database has no tables: run 'cyborg-dbsync upgrade'")
    if isinstance(error, oslo.DBNonExistentDatabase):
        return Unavailable("database does not exist: check [database] connection")
    if _is_full(error):
        return Unavailable(
            "the database accepts no more connections: increase its maximum number of connections, "
            "or decrease [database] max_pool_size and max_overflow of the services"
        )
    if isinstance(error, oslo.DBConnectionError | sa.exc.TimeoutError | sa.exc.InterfaceError):
        return Unavailable(NO_ANSWER)
    # Before the next check: for psycopg2 it is an error of the class InternalError.
    if number in _READ_ONLY_NUMBERS or state == _READ_ONLY_STATE:
        return Unavailable("the database is read-only")
    # An error of another class, such as ProgrammingError, is a mistake in the statement.
    if not isinstance(_wrapped(error), sa.exc.OperationalError):
        return None
    if number in _SLOW_NUMBERS or state == _SLOW_STATE:
        return Unavailable("database statement timed out")
    if _is_access_denied(error):
        return Unavailable(
            "database authentication failed: check the user and password of [database] connection"
        )
    if _is_down(error):
        return Unavailable(NO_ANSWER)
    return None


def constraint_name(error: oslo.DBDuplicateEntry) -> str:
    """Return the name of the constraint that a duplicate key violates, or its columns.

    oslo.db takes ``columns`` from the message on SQLite, and guesses them from the name of the
    constraint on the other databases.
    """
    diagnostics = getattr(_origin(error), "diag", None)
    if name := getattr(diagnostics, "constraint_name", None):
        return str(name)
    match = _DUPLICATE.search(reason(error))
    return (match[1] or match[2]) if match else ", ".join(error.columns or ()) or "unknown"


def reason(error: BaseException) -> str:
    """Return the first line of the driver's message: for logs and operators, not for callers."""
    cause = error.__cause__ if isinstance(error, Unavailable) and error.__cause__ else error
    lines = str(_origin(cause) or cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__


@contextlib.contextmanager
def translate() -> Iterator[None]:
    """Convert errors that mean that the database is unavailable into errors.Unavailable."""
    try:
        yield
    except FAILURES as error:
        if (translated := to_unavailable(error)) is not None:
            raise translated from error
        raise


def _is_access_denied(error: BaseException) -> bool:
    number, state = _number(error), _state(error)
    text = str(_origin(error))
    if number is not None:
        return number in _DENIED_NUMBERS
    if state is not None:
        return state.startswith(_DENIED_CLASS)
    # SQLite has no accounts; its messages have names, which may contain one of these texts.
    return any(part in text for part in _DENIED_TEXTS) and not _is_sqlite(error)


def _is_full(error: BaseException) -> bool:
    number, state = _number(error), _state(error)
    if number is not None or state is not None:
        return number in _FULL_NUMBERS or state == _FULL_STATE
    return any(text in str(_origin(error)) for text in _FULL_TEXTS)


def _is_down(error: BaseException) -> bool:
    number, state = _number(error), _state(error)
    origin = _origin(error)
    if _is_sqlite(error):
        return "disk I/O error" in str(origin) or "disk is full" in str(origin)
    if number is not None:
        return number in _DOWN_NUMBERS or 2000 <= number < 3000  # client errors: no connection
    # libpq has no SQLSTATE while there is no session: then the server does not answer.
    return state is None or state.startswith(_DOWN_CLASSES)


def _is_sqlite(error: BaseException) -> bool:
    return isinstance(_origin(error), sqlite3.Error)


def _wrapped(error: BaseException) -> BaseException:
    """Return the error of SQLAlchemy that an error of oslo.db contains, or the error itself."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) else error


def _origin(error: BaseException) -> BaseException | None:
    """Return the driver's exception."""
    return getattr(_wrapped(error), "orig", None)


def _state(error: BaseException) -> str | None:
    return getattr(_origin(error), "pgcode", None)


def _number(error: BaseException) -> int | None:
    arguments = getattr(_origin(error), "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else None
