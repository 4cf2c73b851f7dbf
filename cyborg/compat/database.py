# SPDX-License-Identifier: Apache-2.0
"""Less work in the drivers of databases: column descriptions of PyMySQL, pools of SQLite."""

import functools
from typing import Any

import sqlalchemy as sa

# Number of column descriptions that are kept; the statements of a service have some hundreds.
MAX_COLUMNS = 4096


def cache_column_descriptions() -> None:
    """Let PyMySQL parse equal descriptions of columns once in this process. Idempotent.

    The server describes each column of each answer, with the names of its table and of its
    database: more bytes than most rows have. The object of a parsed description never changes.
    """
    # A late import: other databases need no PyMySQL.
    from pymysql import connections

    module: Any = connections
    if not hasattr(module.FieldDescriptorPacket, "cache_info"):
        module.FieldDescriptorPacket = functools.lru_cache(MAX_COLUMNS)(
            module.FieldDescriptorPacket
        )


def keep_connections(engine: sa.Engine) -> None:
    """Make an engine of oslo.db keep its connections, as SQLAlchemy does by default.

    oslo.db opens a connection for each transaction with SQLite, and sets its pragmas: a tenth of
    the time of Placement's requests. The listeners of the old pool, which set them, are kept.
    """
    old = engine.pool
    engine.pool = sa.QueuePool(old._creator, _dispatch=old.dispatch, dialect=engine.dialect)
