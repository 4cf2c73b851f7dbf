# SPDX-License-Identifier: Apache-2.0
"""Read hardware: the devices that the hosts last reported, in the format of the hardware API."""

from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.core.inventory.report import dump_row
from cyborg.db import joins
from cyborg.db.listing import Listing, columns_of
from cyborg.db.schema import attach_handles, backends, deployables, devices, services


class HardwareRow(TypedDict):
    """A device in the format of ``core.inventory.report.dump_row``.

    ``host_down`` is True if the host's agent is marked down.
    """

    uuid: str
    host: str
    backend: str
    acc_specs: dict[str, Any]
    acc_status: dict[str, Any]
    address: str
    driver: str | None
    vendor_id: str
    product_id: str | None
    numa_node: int | None
    health: str
    serial: str | None
    not_offered: str | None
    host_down: bool


_NUM = (
    sa.select(sa.func.count())
    .select_from(
        attach_handles.join(deployables, deployables.c.id == attach_handles.c.deployable_id)
    )
    .where(
        deployables.c.device_id == devices.c.id,
        sa.not_(attach_handles.c.draining),
        sa.not_(deployables.c.draining),
    )
    .correlate(devices)
    .scalar_subquery()
    .label("num")
)
_FROM = devices.outerjoin(services, joins.AGENT_OF_DEVICE).outerjoin(
    backends, joins.BACKEND_OF_DEVICE
)
_FACTS = (
    *("uuid", "host", "address", "type", "vendor", "backend", "std_board_info", "numa_node"),
    *("serial", "health", "setup_required", "reboot_required", "vendor_board_info"),
)
_DOWN = services.c.down_since.is_not(None).label("host_down")
SORTABLE = columns_of(devices, "uuid", "host", "address", "numa_node", "health", "serial")


def _of_driver(name: str) -> sa.ColumnElement[bool]:
    """Return the condition on the name of a driver or of a backend."""
    return sa.or_(backends.c.driver == name, devices.c.backend == name)


def _complete(connection: sa.Connection, rows: list[dict[str, Any]]) -> list[HardwareRow]:
    return [cast(HardwareRow, {**dump_row(row), "host_down": row["host_down"]}) for row in rows]


HARDWARE = Listing(
    row=HardwareRow,
    table=devices,
    source=_FROM,
    columns=[*(devices.c[name] for name in _FACTS), backends.c.driver, _NUM, _DOWN],
    sortable=SORTABLE,
    filters={"host": devices.c.host, "driver": _of_driver},
    # Not NOT, for which MariaDB would read the whole index of this column.
    conditions=[devices.c.draining.is_not(sa.true())],
    ids_first=True,
    joined=frozenset({"driver"}),
    complete=_complete,
)
find = HARDWARE.find
