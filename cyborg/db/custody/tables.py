# SPDX-License-Identifier: Apache-2.0
"""The tables of custody logs; ``cyborg.db.schema`` has all tables."""

import sqlalchemy as sa

from cyborg.db.clock import utcnow
from cyborg.db.columns import Json, Moment, table, uuid_column

# Events of the custody logs: ``core.custody``. A row is inserted, and sealed once: sequence and
# hash are None until a conductor has put the record into the chain of its device.
custody_records = table(
    "custody_records",
    uuid_column(),
    # No foreign key: the log of a device outlives the device.
    sa.Column("device_uuid", sa.String(36), nullable=False),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("event", sa.String(32), nullable=False),
    sa.Column("recorded_at", Moment, nullable=False),
    sa.Column("details", Json, nullable=False),
    sa.Column("sequence", sa.BigInteger),
    sa.Column("hash", sa.String(64)),
    # The signature of the conductor that wrote the record, until the record is in the chain.
    sa.Column("signature", sa.String(80)),
    sa.UniqueConstraint("device_uuid", "sequence"),
    # Finds the records to seal, in the order of their ids.
    sa.Index(None, "sequence", "id"),
    # Finds the hosts, and the devices of a host, for the audit.
    sa.Index(None, "host", "device_uuid"),
)

_ENDS = ("", "base_", "checked_")

# The ends of each chain: ``core.custody.chain``.
custody_heads = table(
    "custody_heads",
    sa.Column("device_uuid", sa.String(36), nullable=False, unique=True),
    sa.Column("host", sa.String(255), nullable=False, index=True),
    # The last record, the last one that was removed after its retention, and where the next audit
    # continues.
    *(sa.Column(f"{end}sequence", sa.BigInteger, nullable=False, default=0) for end in _ENDS),
    *(sa.Column(f"{end}hash", sa.String(64), nullable=False) for end in _ENDS),
    # Of the first two, and of the third: ``core.custody.keys``.
    *(sa.Column(f"{end}signature", sa.String(80)) for end in ("", "checked_")),
    # The times of the first record, the last audit, and the last notification of the last record.
    sa.Column("oldest_at", Moment, index=True),
    sa.Column("checked_at", Moment, nullable=False, default=utcnow()),
    sa.Column("anchored_at", Moment, nullable=False, default=utcnow(), index=True),
)
