# SPDX-License-Identifier: Apache-2.0
"""Answer agents which PCI functions of their host have an owner.

An agent asks for the owners of PCI functions before it offers or withholds a function that a guest
may have. It sends the functions that it found, and the answer has no uuid. A sender that uses the
name of another host learns which functions of that host have an owner, and, for an instance whose
uuid it knows, whether this is the owner.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cyborg.core.address import PciAddress
from cyborg.core.errors import Invalid
from cyborg.core.inventory.device import FUNCTION_TYPES, HandleType
from cyborg.core.inventory.functions import MAX_FUNCTIONS, FunctionOwner
from cyborg.core.text import describe
from cyborg.core.validation import check_text, parse_uuid
from cyborg.db.handles import write as attach_handles
from cyborg.db.unit_of_work import UnitOfWork


@dataclass(frozen=True)
class FunctionOwners:
    """Look-up of the ARQs that own PCI functions."""

    uow: UnitOfWork

    def find(self, host: str, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the owner of each function; see ``rpc.contract``. Raise Invalid."""
        host = check_text("host", host)
        pairs = _parse(functions)

        instances = _list_instances(self.uow.run(lambda tx: attach_handles.owned(tx, host)))
        return {"owners": [_owner(instances, instance, address) for instance, address in pairs]}


def _list_instances(rows: Sequence[attach_handles.OwnedHandleRow]) -> dict[str, str | None]:
    """Return the instance of each function that an ARQ needs, None if it is of no guest.

    No guest may have the parent of a mediated device, or the physical function of a virtual one.
    """
    instances: dict[str, str | None] = {}
    for row in rows:
        if row["type"] in (HandleType.MDEV, *FUNCTION_TYPES):
            instances[row["device"]] = None
        if row["type"] == HandleType.MDEV:
            instances[_address_of(row)] = None
    # Last: the address of a function that is offered as a whole is that of its card, for which
    # there is None above.
    functions = [row for row in rows if row["type"] in FUNCTION_TYPES]
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
    pairs = []
    for item in functions:
        if not isinstance(item, dict) or not isinstance(address := item.get("address"), str):
            raise Invalid(
                f"functions: found {describe(item)}; expected an object with instance and address",
                field="functions",
            )
        instance = parse_uuid(item.get("instance"), "functions.instance")
        pairs.append((instance, str(PciAddress.parse(address))))
    return pairs


def _address_of(row: attach_handles.OwnedHandleRow) -> str:
    """Return the address of the PCI function of a handle; for a mediated device, of its parent.

    The address of a handle is that of its function, except for some external drivers.
    """
    try:
        return str(PciAddress.parse_attach_info(row["info"]))
    except Invalid:
        return row["address"]
