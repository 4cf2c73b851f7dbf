# SPDX-License-Identifier: Apache-2.0
"""Time limits of a database connection: a connection that receives no data fails with an error.

Without time limits, a network that drops packets, or a stopped server process, blocks the waiting
thread until the kernel ends the connection, which takes minutes to hours. The limits, from the
shortest to the longest:

::

    lock          a row lock that another transaction holds       set in the server
    connect       the TCP connection, and each step of the login
    server        one statement                                   set in the server
    statement     an answer of which no further byte arrives      set in the client
    transaction   an open transaction without a statement         set in the server

A working server reaches its limits first, rolls back and keeps the connection. The client's limits
are for a server or a network that does not work. With the last limit the server releases the locks
of a client that has disappeared. ``driver_waits`` sets the limits in the client.
"""

from dataclasses import dataclass

import sqlalchemy as sa

MAX_CONNECT_SECONDS = 5.0
MIN_TRANSACTION_SECONDS = 15.0

_KEEPALIVE = {
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
}


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits derived from one configured value, all in seconds."""

    statement: float

    @property
    def connect(self) -> float:
        """Return the limit of the TCP connection and of each step of the login."""
        return min(MAX_CONNECT_SECONDS, self.statement * 2 / 3)

    @property
    def lock(self) -> float:
        """Return how long a statement waits for a row lock before the transaction is retried."""
        return self.statement / 2

    @property
    def server(self) -> float:
        """Return the limit of one statement in the server."""
        return self.statement * 0.9

    @property
    def transaction(self) -> float:
        """Return how long a transaction may stay open between two statements."""
        return max(MIN_TRANSACTION_SECONDS, 1.5 * self.statement)


def keep_alive(url: sa.URL) -> sa.URL:
    """Return a PostgreSQL URL with TCP keep-alive, to detect a lost peer within seconds.

    Parameters that the URL already has do not change.
    """
    missing = {name: value for name, value in _KEEPALIVE.items() if name not in url.query}
    return url.update_query_dict(missing)


def limit_url(url: sa.URL, limits: Timeouts) -> sa.URL:
    """Return a PostgreSQL URL with the timeouts of connections, statements and locks.

    Values that the URL already has take precedence: ``connect_timeout``, ``tcp_user_timeout``, and
    each setting in ``options``.
    """
    settings = {
        "lock_timeout": limits.lock,
        "statement_timeout": limits.server,
        "idle_in_transaction_session_timeout": limits.transaction,
    }
    flags = [f"-c {name}={_milliseconds(value)}" for name, value in settings.items()]
    query = {"options": " ".join([*flags, str(url.query.get("options", ""))]).strip()}
    if "tcp_user_timeout" not in url.query:
        query["tcp_user_timeout"] = str(_milliseconds(limits.statement))
    return url.update_query_dict(query)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
