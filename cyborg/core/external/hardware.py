# SPDX-License-Identifier: Apache-2.0
"""Parsing of the hardware that an external driver reports, into devices.

Each element of the answer is a device with one deployable of the same address. An element without a
PCI address has no handles.
"""

import uuid
from collections.abc import Mapping
from typing import Any

from cyborg.core.address import PciAddress
from cyborg.core.errors import CyborgError, Invalid
from cyborg.core.inventory import capability
from cyborg.core.inventory.device import (
    MAX_NUMA_NODE,
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
    Health,
)
from cyborg.core.naming import make_custom_name
from cyborg.core.validation import check_integer, string

MAX_HARDWARE = 256  # in one answer
MAX_HANDLES = 256  # of one device
MAX_ALL_HANDLES = 4096  # in one answer: a report has all of them in one message
NO_NODE = -1  # value in sysfs for a device without a NUMA node
_CLASSES = {"FPGA": "FPGA", "GPU": "PGPU"}  # standard classes of whole devices


def load_devices(body: Any, backend: str, kind: str) -> tuple[Device, ...]:
    """Parse the answer to GET /hardware. Raise Invalid for the first malformed element.

    ``kind`` is the default device type.
    """
    # One error refuses the whole answer: its other pieces are not trusted either.
    if not isinstance(body, Mapping) or not isinstance(body.get("hardware"), list):
        raise Invalid('the answer is malformed: expected {"hardware": [...]}', field="hardware")
    pieces = body["hardware"]
    if len(pieces) > MAX_HARDWARE:
        raise Invalid(
            f"hardware has {len(pieces)} elements, at most {MAX_HARDWARE} are allowed",
            field="hardware",
        )
    devices: list[Device] = []
    numbers: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        where = f"hardware[{number}]"
        try:
            device = _device(piece, backend, kind)
        except CyborgError as exc:
            raise Invalid(f"{where}: {exc.message}", field=where) from exc
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise Invalid(f"{where}: {type(exc).__name__} {str(exc)[:200]}", field=where) from exc
        handles = {
            handle.address for deployable in device.deployables for handle in deployable.handles
        }
        for address in sorted({device.address} | handles):
            if address in numbers:
                raise Invalid(
                    f"{where}: duplicate address {address}, also in hardware[{numbers[address]}]",
                    field=where,
                )
            numbers[address] = number
        devices.append(device)
        if len(numbers) > MAX_ALL_HANDLES:
            raise Invalid(
                f"{where}: the answer has more than {MAX_ALL_HANDLES} handles", field=where
            )
    return tuple(devices)


def _device(body: Any, backend: str, kind: str) -> Device:
    specs, status = body["acc_specs"], body.get("acc_status", {})
    kind = string(specs.get("device_type", kind)).upper()
    tree = capability.validate(specs.get("acc_capability", {}))
    number = _uuid(body.get("uuid"))
    address, serial, numa = (body.get(key) for key in ("address", "serial", "numa_node"))
    if address is None and number is None:
        raise Invalid("hardware has neither an address nor a uuid", field="address")
    pci = None if address is None else PciAddress.parse(string(address))
    identity = str(pci) if pci is not None else str(number)
    remote = specs.get("remote", 0)
    if remote not in (0, 1):
        raise Invalid(f"remote is {str(remote)[:40]!r}: expected 0 or 1", field="remote")
    board = {key: string(body[key]) for key in ("vendor_id", "product_id") if body.get(key)}
    deployable = Deployable(
        address=identity,
        resource_class=_CLASSES.get(kind) or make_custom_name(kind),
        traits=capability.build_traits(kind, tree),
        handles=_handles(body, specs.get("num", 0), None if remote else pci),
    )
    return Device(
        address=identity,
        type=DeviceType(kind) if kind in list(DeviceType) else DeviceType.OTHER,
        vendor=board.get("vendor_id", "unknown"),
        model=string(body.get("model") or board.get("product_id", "unknown")),
        backend=backend,
        std_board_info=board | ({"remote": "1"} if remote else {}),
        vendor_board_info=capability.to_board_info(tree) | ({"uuid": number} if number else {}),
        numa_node=None
        if numa in (None, NO_NODE)
        else check_integer("numa_node", numa, MAX_NUMA_NODE),
        serial=None if serial is None else string(serial),
        health=Health(body.get("health", Health.OK)),
        setup_required=_flag(status, "setup_required"),
        # Misspelt in the first version of the contract.
        reboot_required=_flag(status, "reboot_required") or _flag(status, "reboot_equired"),
        deployables=(deployable,),
    )


def _handles(body: Mapping[str, Any], num: Any, pci: PciAddress | None) -> tuple[AttachHandle, ...]:
    """Return ``num`` handles: the PCI functions of ``handles``, by default the device itself."""
    num = check_integer("num", num, MAX_HANDLES)
    if pci is None:
        return ()
    form = HandleType(body.get("attach_type", HandleType.PCI))
    if form is HandleType.MDEV:
        raise Invalid("attach_type is MDEV: expected PCI or TEST_PCI", field="attach_type")
    named = body.get("handles")
    if named is not None:
        if not isinstance(named, list):
            raise Invalid("handles must be a list of PCI addresses", field="handles")
        found = [PciAddress.parse(string(address)) for address in named]
    elif num <= 1:
        found = [pci] * num
    elif form is HandleType.TEST_PCI:
        # Test handles are never attached: their addresses need not exist.
        found = [PciAddress(pci.domain, pci.bus, n // 8, n % 8) for n in range(num)]
    else:
        raise Invalid(
            f"num is {num}: expected {num} addresses of PCI functions in handles", field="handles"
        )
    if len(found) != num:
        raise Invalid(f"num is {num} but handles has {len(found)} addresses", field="handles")
    return tuple(AttachHandle(str(address), form, address.attach_info()) for address in found)


def _uuid(value: Any) -> str | None:
    try:
        return None if value is None else str(uuid.UUID(string(value)))
    except ValueError as exc:
        raise Invalid(f"{str(value)[:40]!r} is not a uuid", field="uuid") from exc


def _flag(status: Mapping[str, Any], name: str) -> bool:
    value = status.get(name, False)
    if not isinstance(value, bool):
        raise Invalid(f"{name} is {str(value)[:40]!r}: expected true or false", field=name)
    return value
