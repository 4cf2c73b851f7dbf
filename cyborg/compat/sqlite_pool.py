# SPDX-License-Identifier: Apache-2.0
"""The pool of an oslo.db engine on a SQLite file."""

import sqlalchemy as sa


def keep_connections(engine: sa.Engine) -> None:
    """Make an engine of oslo.db keep its connections, as SQLAlchemy does by default.

    oslo.db opens a connection for each transaction with SQLite, and sets its pragmas: a tenth of
    the time of Placement's requests. The listeners of the old pool, which set them, are kept.
    """
    old = engine.pool
    engine.pool = sa.QueuePool(old._creator, _dispatch=old.dispatch, dialect=engine.dialect)
