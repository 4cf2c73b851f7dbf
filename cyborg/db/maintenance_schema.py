# SPDX-License-Identifier: Apache-2.0
"""The table of the maintenance windows of devices; ``cyborg.db.schema`` has all tables."""

import sqlalchemy as sa

from cyborg.db.columns import Moment, table

device_maintenances = table(
    "device_maintenances",
    # No foreign key: a window continues if the device is removed and returns meanwhile.
    sa.Column("device_uuid", sa.String(36), nullable=False, unique=True),
    sa.Column("until", Moment, nullable=False, index=True),
    # The status of the device after the window.
    sa.Column("next_status", sa.String(32), nullable=False),
    # ``core.inventory.maintenance.SuccessorMode``; None if contexts get no successors.
    sa.Column("successor", sa.String(32)),
    # The user who set it, None without authentication.
    sa.Column("user_id", sa.String(255)),
)
