# SPDX-License-Identifier: Apache-2.0
"""Builders of the tables and columns of the schema, with the types that all databases support."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from cyborg.core import log
from cyborg.db.clock import utcnow

metadata = sa.MetaData(
    naming_convention={
        # Names of our own: a migration can drop a constraint only by its name, and each database
        # would give another one.
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# With microseconds: two heartbeats of one agent may arrive within a second.
Moment = sa.DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
# MySQL's TEXT ends at 64 KiB, which a profile of 32 groups can exceed.
Text = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
Json = sa.JSON()


def table(name: str, *columns: Any) -> sa.Table:
    """Return a table with a row id, these columns, and the times of creation and last change."""
    return sa.Table(
        name,
        metadata,
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        *columns,
        sa.Column("created_at", Moment, nullable=False, default=utcnow()),
        sa.Column("updated_at", Moment, onupdate=utcnow()),
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
        # Names that differ only in case are different, as on the other databases.
        mysql_collate="utf8mb4_bin",
        # No id is given twice: the order of the ids is that of creation.
        sqlite_autoincrement=True,
    )


def uuid_column(**options: Any) -> sa.Column[str]:
    """Return the column with the unique uuid of a row."""
    return sa.Column("uuid", sa.String(36), nullable=False, unique=True, **options)


def foreign_key(
    name: str, target: str, ondelete: str = "CASCADE", **options: Any
) -> sa.Column[int]:
    """Return an indexed column that refers to the row id of another table."""
    # With an index: a delete in the other table would read this whole table otherwise.
    return sa.Column(name, sa.ForeignKey(f"{target}.id", ondelete=ondelete), index=True, **options)


def work_table(name: str, *columns: Any) -> sa.Table:
    """Return a table of work with retries: a state, a lease, and the time of the next attempt."""
    return table(
        name,
        uuid_column(),
        sa.Column("kind", sa.String(64), nullable=False),
        *columns,
        sa.Column("state", sa.String(32), nullable=False, default="pending"),
        sa.Column("attempts", sa.Integer, nullable=False, default=0),
        sa.Column("next_try_at", Moment, nullable=False, default=utcnow()),
        sa.Column("owner", sa.String(255)),
        sa.Column("lease_until", Moment),
        sa.Column("error", Text),
        # The trace of the request that caused the work: ``core.log``.
        sa.Column("trace_context", sa.String(log.LENGTH)),
        sa.Index(None, "state", "next_try_at"),
    )
