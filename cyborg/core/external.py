# SPDX-License-Identifier: Apache-2.0
"""External drivers: parsing of their messages, and of the hardware that they report.

A driver is identified by its endpoint, the unix socket ``<name>.sock`` in the socket folder. So its
hello message has no name.

Each element of the reported hardware is a device with one deployable of the same address. An
element without a PCI address has no handles.
"""

import json
import os.path
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cyborg.core import codec, naming
from cyborg.core.address import PciAddress
from cyborg.core.errors import CyborgError, Invalid
from cyborg.core.inventory import capability, device_state
from cyborg.core.inventory.device import (
    MAX_NUMA_NODE,
    Ability,
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
    Health,
)
from cyborg.core.validation import check_integer, optional, string

# Name of the agent's own socket, reserved.
AGENT_SOCKET = "agent"

SUFFIX = ".sock"
# It becomes the name of a file in the folder of the sockets.
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
# Both or none of prepare and release: a handle that cannot be cleaned would never be free again.
_CALLS: Mapping[Ability, frozenset[str]] = {
    Ability.PREPARES: frozenset({"prepare", "release"}),
    Ability.PROGRAMS: frozenset({"program"}),
    Ability.MEASURES: frozenset({"health"}),
}
# Optional calls that a hello may list in ``abilities``.
OPTIONAL_CALLS = frozenset[str]().union(*_CALLS.values())


@dataclass(frozen=True, slots=True)
class Hello:
    """Registration of a driver. ``type`` is the default type of its hardware."""

    name: str
    type: str
    abilities: frozenset[Ability] = frozenset()


def is_driver_name(name: str) -> bool:
    """Return whether a driver name is valid: up to 40 of ``a-z``, ``0-9``, ``_`` and ``-``."""
    return bool(_NAME.fullmatch(name)) and name != AGENT_SOCKET


def socket_path(folder: str, name: str) -> str:
    """Return the path of the socket of a driver or of the agent."""
    return os.path.join(folder, f"{name}{SUFFIX}")


def decode(body: bytes) -> Any:
    """Parse JSON. Raise Invalid for malformed or too deeply nested JSON, and for NaN."""
    try:
        # Python accepts NaN and Infinity, which the message of a report must not have.
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise Invalid(f"the body is not JSON: {type(exc).__name__} {str(exc)[:100]}") from exc


@contextmanager
def _expecting(subject: str, example: str, field: str) -> Iterator[None]:
    """Raise Invalid if the block cannot read what ``example`` shows."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise Invalid(
            f"the {subject} is malformed ({type(exc).__name__} {str(exc)[:100]}): expected "
            f"{example}",
            field=field,
        ) from exc


def parse_hello(body: Any, folder: str) -> Hello:
    """Parse a hello. Raise Invalid if it is malformed."""
    example = '{"status": "READY", "endpoint": "<path>", "type": "<type>"}'
    with _expecting("hello", example, "hello"):
        status, endpoint, kind = (string(body[key]) for key in ("status", "endpoint", "type"))
        calls = [string(call) for call in codec.as_list(body.get("abilities", []))]
    if status != "READY":
        raise Invalid(f"the hello has status {status[:40]!r}: expected READY", field="status")
    # The agent only calls sockets in its own folder, whatever path a driver claims.
    name = os.path.basename(endpoint).removesuffix(SUFFIX)
    allowed = (f"{name}{SUFFIX}", socket_path(folder, name))
    if not is_driver_name(name) or endpoint not in allowed:
        raise Invalid(
            f"the hello has endpoint {endpoint[:120]!r}: expected "
            f"{socket_path(folder, '<name>')} with the driver's name",
            field="endpoint",
        )
    if not _KIND.fullmatch(kind):
        raise Invalid(
            f"the hello has type {kind[:40]!r}: expected a type such as CRYPTO", field="type"
        )
    return Hello(name, kind.upper(), _abilities(calls))


def parse_discovery(body: Any) -> str:
    """Return the ``discovery_id`` of the answer to POST /discovery.

    Raise Invalid if the answer is malformed.
    """
    example = '{"status": "IN-PROGRESS", "discovery_id": "<id>"}'
    with _expecting("answer", example, "discovery"):
        status, discovery_id = string(body["status"]), string(body["discovery_id"])
    if status != "IN-PROGRESS":
        raise Invalid(f"the status is {status[:40]!r}: expected IN-PROGRESS", field="status")
    return discovery_id[:255]


def parse_health(body: Any) -> dict[str, device_state.Measurement]:
    """Parse the answer to GET /health: ``{"health": {address: {"health", "reason"}}}``.

    Raise Invalid if it is malformed.
    """
    example = '{"health": {"<address>": {"health": "ok", "reason": null}}}'
    with _expecting("answer", example, "health"):
        return {
            string(address): device_state.Measurement(
                Health(entry["health"]), optional(string, entry.get("reason"))
            )
            for address, entry in body["health"].items()
        }


def _abilities(calls: list[str]) -> frozenset[Ability]:
    """Return the abilities that a driver's calls make up. Raise Invalid for a part of one."""
    named = frozenset(calls)
    if unknown := sorted(named - OPTIONAL_CALLS):
        raise Invalid(
            f"the hello has the unknown ability {unknown[0][:40]!r}: expected any of "
            f"{', '.join(sorted(OPTIONAL_CALLS))}",
            field="abilities",
        )
    for needed in _CALLS.values():
        if named & needed and not needed <= named:
            raise Invalid(
                f"the hello: ability {', '.join(named & needed)} requires "
                f"{', '.join(needed - named)}",
                field="abilities",
            )
    return frozenset(ability for ability, needed in _CALLS.items() if needed <= named)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


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
    number_by_address: dict[str, int] = {}
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
        # An address is that of one object: the schema of the conductor refuses a second one.
        for address in sorted({device.address} | handles):
            if address in number_by_address:
                raise Invalid(
                    f"{where}: duplicate address {address}, also in "
                    f"hardware[{number_by_address[address]}]",
                    field=where,
                )
            number_by_address[address] = number
        devices.append(device)
        if len(number_by_address) > MAX_ALL_HANDLES:
            raise Invalid(
                f"{where}: the answer has more than {MAX_ALL_HANDLES} devices and handles",
                field=where,
            )
    return tuple(devices)


def _device(body: Any, backend: str, kind: str) -> Device:
    """Return a device from the report of an external driver. Raise Invalid."""
    specs, status = body["acc_specs"], body.get("acc_status", {})
    kind = string(specs.get("device_type", kind)).upper()
    tree = capability.validate(specs.get("acc_capability", {}))
    device_uuid = _uuid(body.get("uuid"))
    address, serial, numa = (body.get(key) for key in ("address", "serial", "numa_node"))
    # One of them is the identity of the device.
    if address is None and device_uuid is None:
        raise Invalid("hardware has neither an address nor a uuid", field="address")
    pci = optional(lambda text: PciAddress.parse(string(text)), address)
    identity = str(pci) if pci is not None else str(device_uuid)
    remote = specs.get("remote", 0)
    if remote not in (0, 1):
        raise Invalid(f"remote is {str(remote)[:40]!r}: expected 0 or 1", field="remote")
    # A remote device is outside of this host, so that the host cannot attach it.
    local_pci = None if remote else pci
    board = {key: string(body[key]) for key in ("vendor_id", "product_id") if body.get(key)}
    deployable = Deployable(
        address=identity,
        resource_class=_CLASSES.get(kind) or naming.make_custom_name(kind),
        traits=capability.build_traits(kind, tree),
        handles=_handles(body, specs.get("num", 0), local_pci),
    )
    return Device(
        address=identity,
        type=DeviceType(kind) if kind in list(DeviceType) else DeviceType.OTHER,
        vendor=board.get("vendor_id", "unknown"),
        model=string(body.get("model") or board.get("product_id", "unknown")),
        backend=backend,
        std_board_info=board | ({"remote": "1"} if remote else {}),
        vendor_board_info=capability.to_board_info(tree)
        | ({"uuid": device_uuid} if device_uuid else {}),
        numa_node=None
        if numa in (None, NO_NODE)
        else check_integer("numa_node", numa, MAX_NUMA_NODE),
        serial=optional(string, serial),
        health=Health(body.get("health", Health.OK)),
        setup_required=_flag(status, "setup_required"),
        # Misspelt in the first version of the contract.
        reboot_required=_flag(status, "reboot_required") or _flag(status, "reboot_equired"),
        deployables=(deployable,),
    )


def _handles(body: Mapping[str, Any], num: Any, pci: PciAddress | None) -> tuple[AttachHandle, ...]:
    """Return ``num`` handles: the PCI functions of ``handles``, by default the device itself.

    ``pci`` is the address of the device if the host can attach it; otherwise return no handle.
    Raise Invalid.
    """
    num = check_integer("num", num, MAX_HANDLES)
    if pci is None:
        return ()
    handle_type = HandleType(body.get("attach_type", HandleType.PCI))
    if handle_type is HandleType.MDEV:
        raise Invalid("attach_type is MDEV: expected PCI, VFIO or TEST_PCI", field="attach_type")
    named = body.get("handles")
    if named is not None:
        if not isinstance(named, list):
            raise Invalid("handles must be a list of PCI addresses", field="handles")
        addresses = [PciAddress.parse(string(address)) for address in named]
    elif num <= 1:
        addresses = [pci] * num
    elif handle_type is HandleType.TEST_PCI:
        # Test handles are never attached: their addresses need not exist.
        addresses = [PciAddress(pci.domain, pci.bus, n // 8, n % 8) for n in range(num)]
    else:
        raise Invalid(
            f"num is {num}: expected {num} addresses of PCI functions in handles", field="handles"
        )
    if len(addresses) != num:
        raise Invalid(f"num is {num} but handles has {len(addresses)} addresses", field="handles")
    return tuple(
        AttachHandle(str(address), handle_type, address.attach_info()) for address in addresses
    )


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
