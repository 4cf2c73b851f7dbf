# SPDX-License-Identifier: Apache-2.0
"""Owners of the PCI functions that the guests of a host have.

An agent asks before it offers or withholds such a function. It sends the functions that it found,
and the answer has no uuid. A sender that uses the name of another host learns which functions of
that host have an owner, and, for an instance whose uuid it knows, whether this is the owner.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from cyborg.core.address import PciAddress
from cyborg.core.errors import Invalid
from cyborg.core.inventory.device import HandleType
from cyborg.core.inventory.guest_functions import MAX_FUNCTIONS, FunctionOwner
from cyborg.core.text import describe
from cyborg.core.validation import check_text, parse_uuid
from cyborg.db.handles import write as attach_handles
from cyborg.db.handles.write import OwnedHandleRow
from cyborg.db.unit_of_work import UnitOfWork


class FunctionOwners:
    """Look-up of the ARQs that own PCI functions."""

    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    def find(self, host: str, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the owner of each function; see ``rpc.contract``. Raise Invalid."""
        host = check_text("host", host)
        pairs = _parse(functions)

        def read(tx: sa.Connection) -> list[OwnedHandleRow]:
            return attach_handles.owned(tx, host)

        instances = _list_instances(self._uow.run(read))
        return {"owners": [_owner(instances, instance, at) for instance, at in pairs]}


def _list_instances(rows: Sequence[OwnedHandleRow]) -> dict[str, str | None]:
    """Return the instance of each function that an ARQ needs, None if it is of no guest.

    No guest may have the parent of a mediated device, or the physical function of a virtual one.
    """
    instances: dict[str, str | None] = {}
    for row in rows:
        if row["type"] in (HandleType.PCI, HandleType.MDEV):
            instances |= {row["device"]: None}
        if row["type"] == HandleType.MDEV:
            instances |= {_address_of(row): None}
    # A function that is offered as a whole has the address of its card.
    functions = [row for row in rows if row["type"] == HandleType.PCI]
    return instances | {_address_of(row): row["instance_uuid"] for row in functions}


def _owner(
    instances: Mapping[str, str | None], instance: str, address: str
) -> FunctionOwner | None:
    if address not in instances:
        return None
    is_same = instances[address] == instance
    return FunctionOwner.INSTANCE if is_same else FunctionOwner.OTHER


def _parse(functions: Any) -> list[tuple[str, str]]:
    """Return the instance and the address of each function. Raise Invalid."""
    if not isinstance(functions, list) or len(functions) > MAX_FUNCTIONS:
        raise Invalid(
            f"functions: expected a list of at most {MAX_FUNCTIONS} objects", field="functions"
        )
    found = []
    for item in functions:
        if not isinstance(item, dict) or not isinstance(address := item.get("address"), str):
            raise Invalid(
                f"functions: found {describe(item)}; expected an object with instance and address",
                field="functions",
            )
        instance = parse_uuid(item.get("instance"), "functions.instance")
        found.append((instance, str(PciAddress.parse(address))))
    return found


def _address_of(row: OwnedHandleRow) -> str:
    """Return the address of the PCI function of a handle; for a mediated device, of its parent.

    The address of a handle is that of its function, except for some external drivers.
    """
    info = row["info"]
    text = "{}:{}:{}.{}".format(*(info.get(k) for k in ("domain", "bus", "device", "function")))
    try:
        return str(PciAddress.parse(text))
    except Invalid:
        return row["address"]
