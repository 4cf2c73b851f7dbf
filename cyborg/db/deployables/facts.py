# SPDX-License-Identifier: Apache-2.0
"""The facts that decide whether the handles of a deployable can be allocated, as columns.

The names are those of ``core.inventory.device_state.DeviceFacts``, which has the rule. ``COLUMNS``
and ``CONDITIONS`` are of ``deployables`` joined with ``devices``; ``HOST_DOWN``, of ``services``,
is the only fact of another table.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_set import UNRESERVED, OfferState
from cyborg.core.inventory.device_state import ENABLED
from cyborg.db.deployables.read import RESTORE_FAILED
from cyborg.db.schema import deployables, devices, services

Column = sa.ColumnElement[Any]


class DeviceFactsColumns(TypedDict):
    """The facts of a deployable without ``host_down``."""

    status: str
    health: str
    setup_required: bool
    reboot_required: bool
    failing: bool
    deliverable: bool
    cordoned: bool
    programming: bool
    draining: bool
    restore_failed: bool
    withheld: bool


_PROGRAMMING = deployables.c.job_id.is_not(None)
_DRAINING = sa.or_(deployables.c.draining, devices.c.draining)
# A new set has no offer yet.
_WITHHELD = sa.and_(
    deployables.c.set_size.is_not(None),
    sa.func.coalesce(deployables.c.offer, OfferState.WITHHELD).not_in(sorted(UNRESERVED)),
)
_COMPUTED = {
    "programming": _PROGRAMMING,
    "draining": _DRAINING,
    "restore_failed": RESTORE_FAILED,
    "withheld": _WITHHELD,
}
HOST_DOWN = services.c.down_since.is_not(None)

# The column of each fact.
COLUMNS: Mapping[str, Column] = {
    name: _COMPUTED[name].label(name) if name in _COMPUTED else devices.c[name]
    for name in DeviceFactsColumns.__annotations__
}

# The condition of each fact that makes the deployable unschedulable: ``evaluate`` in SQL.
CONDITIONS: Mapping[str, sa.ColumnElement[bool]] = {
    "status": devices.c.status != ENABLED,
    "health": devices.c.health == Health.UNHEALTHY,
    "setup_required": devices.c.setup_required,
    "reboot_required": devices.c.reboot_required,
    "failing": devices.c.failing,
    "deliverable": sa.not_(devices.c.deliverable),
    "cordoned": devices.c.cordoned,
    **_COMPUTED,
}


def columns(*omitted: str) -> list[Column]:
    """Return the columns of all facts but those that a statement gets in another way."""
    return [column for name, column in COLUMNS.items() if name not in omitted]


def conditions(*omitted: str) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of all facts but those that a statement does not take into account."""
    return [condition for name, condition in CONDITIONS.items() if name not in omitted]
