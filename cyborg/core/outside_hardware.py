# SPDX-License-Identifier: Apache-2.0
"""The hardware of a driver in a process of its own: from the contract's words to devices.

One piece of hardware is a device with one deployable of its address. What has no address can be
shown and not given away: it has no handles.
"""

import uuid
from collections.abc import Mapping
from typing import Any

from cyborg.core import capability
from cyborg.core.address import PciAddress
from cyborg.core.device import (
    MAX_NODE,
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
    Health,
)
from cyborg.core.errors import CyborgError, Invalid
from cyborg.core.names import custom
from cyborg.core.plain import string

MAX_HARDWARE = 256  # in one answer
MAX_HANDLES = 256  # of one device
MAX_ALL_HANDLES = 4096  # of one answer: a report has them all in one message
NO_NODE = -1  # what sysfs says of a device that is on no NUMA node
_CLASSES = {"FPGA": "FPGA", "GPU": "PGPU"}  # the standard ones that are whole devices


def load(body: Any, backend: str, kind: str) -> tuple[Device, ...]:
    """Read the answer to GET /hardware. Raises Invalid, naming the first piece that is wrong.

    ``kind`` is the type of what tells none. All or nothing: an answer that is wrong in one place
    is not believed in another.
    """
    if not isinstance(body, Mapping) or not isinstance(body.get("hardware"), list):
        raise Invalid('the answer is malformed: expected {"hardware": [...]}', field="hardware")
    pieces = body["hardware"]
    if len(pieces) > MAX_HARDWARE:
        raise Invalid(
            f"the answer has {len(pieces)} pieces of hardware, at most {MAX_HARDWARE} fit",
            field="hardware",
        )
    devices: list[Device] = []
    taken: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        where = f"hardware[{number}]"
        try:
            device = _device(piece, backend, kind)
        except CyborgError as bad:
            raise Invalid(f"{where}: {bad.message}", field=where) from bad
        except (KeyError, TypeError, ValueError, AttributeError) as bad:
            raise Invalid(f"{where}: {type(bad).__name__} {str(bad)[:200]}", field=where) from bad
        handles = {handle.address for part in device.deployables for handle in part.handles}
        for address in sorted({device.address} | handles):
            if address in taken:
                raise Invalid(
                    f"{where} has the address {address} of hardware[{taken[address]}]", field=where
                )
            taken[address] = number
        devices.append(device)
        if len(taken) > MAX_ALL_HANDLES:
            raise Invalid(
                f"{where}: the answer has more than {MAX_ALL_HANDLES} handles", field=where
            )
    return tuple(devices)


def _device(body: Any, backend: str, kind: str) -> Device:
    specs, status = body["acc_specs"], body.get("acc_status", {})
    kind = string(specs.get("device_type", kind)).upper()
    tree = capability.check(specs.get("acc_capability", {}))
    number = _uuid(body.get("uuid"))
    address, serial, numa = (body.get(key) for key in ("address", "serial", "numa_node"))
    if address is None and number is None:
        raise Invalid("it has neither an address nor a uuid", field="address")
    place = None if address is None else PciAddress.parse(string(address))
    here = str(place) if place is not None else str(number)
    remote = specs.get("remote", 0)
    if remote not in (0, 1):
        raise Invalid(f"remote is {str(remote)[:40]!r}: expected 0 or 1", field="remote")
    board = {key: string(body[key]) for key in ("vendor_id", "product_id") if body.get(key)}
    part = Deployable(
        address=here,
        resource_class=_CLASSES.get(kind) or custom(kind),
        traits=capability.traits(kind, tree),
        handles=_handles(body, specs.get("num", 0), None if remote else place),
    )
    return Device(
        address=here,
        type=DeviceType(kind) if kind in list(DeviceType) else DeviceType.OTHER,
        vendor=board.get("vendor_id", "unknown"),
        model=string(body.get("model") or board.get("product_id", "unknown")),
        backend=backend,
        std_board_info=board | ({"remote": "1"} if remote else {}),
        vendor_board_info=capability.facts(tree) | ({"uuid": number} if number else {}),
        numa_node=None if numa in (None, NO_NODE) else _number("numa_node", numa, MAX_NODE),
        serial=None if serial is None else string(serial),
        health=Health(body.get("health", Health.OK)),
        setup_required=_flag(status, "setup_required"),
        # As the contract was first written down.
        reboot_required=_flag(status, "reboot_required") or _flag(status, "reboot_equired"),
        deployables=(part,),
    )


def _handles(
    body: Mapping[str, Any], num: Any, place: PciAddress | None
) -> tuple[AttachHandle, ...]:
    """Return as many handles as ``num``: those that are named, or the function itself."""
    num = _number("num", num, MAX_HANDLES)
    if place is None:
        return ()
    form = HandleType(body.get("attach_type", HandleType.PCI))
    if form is HandleType.MDEV:
        raise Invalid("attach_type is MDEV: expected PCI or TEST_PCI", field="attach_type")
    named = body.get("handles")
    if named is not None:
        if not isinstance(named, list):
            raise Invalid("handles is no list of PCI addresses", field="handles")
        found = [PciAddress.parse(string(one)) for one in named]
    elif num <= 1:
        found = [place] * num
    elif form is HandleType.TEST_PCI:
        # Nobody attaches these: their places may be made up.
        found = [PciAddress(place.domain, place.bus, n // 8, n % 8) for n in range(num)]
    else:
        raise Invalid(f"num is {num}: its functions must be named in handles", field="handles")
    if len(found) != num:
        raise Invalid(f"num is {num} and handles names {len(found)}", field="handles")
    return tuple(AttachHandle(str(one), form, one.attach_info()) for one in found)


def _uuid(value: Any) -> str | None:
    try:
        return None if value is None else str(uuid.UUID(string(value)))
    except ValueError as bad:
        raise Invalid(f"{str(value)[:40]!r} is no uuid", field="uuid") from bad


def _number(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise Invalid(f"{name} is {str(value)[:40]!r}: expected 0 to {most}", field=name)
    return value


def _flag(status: Mapping[str, Any], name: str) -> bool:
    value = status.get(name, False)
    if not isinstance(value, bool):
        raise Invalid(f"{name} is {str(value)[:40]!r}: expected true or false", field=name)
    return value
