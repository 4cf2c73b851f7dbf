# SPDX-License-Identifier: Apache-2.0
"""Devices in the format of ``GET /hardware`` of the internal contract, and its keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cyborg.core.errors import Invalid
from cyborg.core.inventory import capability
from cyborg.core.inventory.device import Device
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.core.validation import string

NOT_OFFERED = "not_offered"
"""The reason why a device or deployable is not offered."""


@dataclass(frozen=True, slots=True)
class ObservedDeployable:
    """A deployable as the agent observes it."""

    resource_class: str
    handles: frozenset[str]


@dataclass(frozen=True, slots=True)
class ObservedDevice:
    """A device as the agent observes it.

    ``deployables`` are by address; None from an agent that does not send them.
    """

    backend: str
    deployables: Mapping[str, ObservedDeployable] | None


@dataclass(frozen=True, slots=True)
class Hardware:
    """Answer of an agent: devices by address, and the errors of backends that are not ready.

    The errors are by backend name; the error of a backend in its first discovery is None.
    """

    devices: Mapping[str, ObservedDevice] = field(default_factory=dict)
    failed_backends: Mapping[str, str | None] = field(default_factory=dict)


def dump_device(device: Device, uuid: str | None = None) -> dict[str, Any]:
    """Return a device in the format of the contract; the agent does not know its ``uuid``.

    ``num`` is the number of handles. The capability tree is empty if the driver reports none.
    """
    return {
        "uuid": uuid,
        **_dump_hardware(
            {
                "num": sum(len(deployable.handles) for deployable in device.deployables),
                "type": str(device.type),
                "vendor": device.vendor,
                "std_board_info": device.std_board_info,
                "vendor_board_info": device.vendor_board_info,
                "setup_required": device.setup_required,
                "reboot_required": device.reboot_required,
                "address": device.address,
                "driver": device.backend,
                "numa_node": device.numa_node,
                "health": str(device.health),
                "serial": device.serial,
            }
        ),
        "deployables": [
            {
                "address": deployable.address,
                "resource_class": deployable.resource_class,
                "handles": [handle.address for handle in deployable.handles],
            }
            for deployable in device.deployables
        ],
    }


def dump_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a database row of a device in the format of the contract.

    In addition to its own columns the row has host, driver (None if the agent no longer has the
    backend), backend and num. An unknown type or health of a newer release is not changed.
    """
    return {
        "uuid": row["uuid"],
        "host": row["host"],
        "backend": row["backend"],
        **_dump_hardware(row),
        "not_offered": row.get("vendor_board_info", {}).get(NOT_OFFERED),
    }


def _dump_hardware(facts: Mapping[str, Any]) -> dict[str, Any]:
    board = facts["std_board_info"]
    return {
        "acc_specs": {
            "remote": int(board.get("remote") == "1"),
            "num": facts["num"],
            "device_type": facts["type"],
            "acc_capability": capability.from_board_info(facts.get("vendor_board_info", {})),
        },
        "acc_status": {
            "setup_required": facts["setup_required"],
            "reboot_required": facts["reboot_required"],
        },
        "address": facts["address"],
        "driver": facts["driver"],
        "vendor_id": board.get("vendor_id", facts["vendor"]),
        "product_id": board.get("product_id"),
        "numa_node": facts["numa_node"],
        "health": facts["health"],
        "serial": facts["serial"],
    }


def dump_answer(devices: Sequence[Device], states: Sequence[BackendState]) -> dict[str, Any]:
    """Return an agent's answer to ``GET /hardware``."""
    return {
        "hardware": [dump_device(device) for device in devices],
        "backends": [state.without_details().to_dict() for state in states],
    }


def load_answer(body: Any) -> Hardware:
    """Parse the answer of an agent of this or the previous release. Raise Invalid."""
    try:
        states = [BackendState.load_without_details(state) for state in body.get("backends", ())]
        return Hardware(
            {string(device["address"]): _load_device(device) for device in body["hardware"]},
            {s.name: s.error for s in states if s.status is not BackendStatus.READY},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise Invalid(f"malformed hardware: {type(exc).__name__} {exc}", field="hardware") from exc


def _load_device(body: Mapping[str, Any]) -> ObservedDevice:
    bodies = body.get("deployables")
    if bodies is None:
        return ObservedDevice(string(body["driver"]), None)
    deployables = {
        string(deployable["address"]): ObservedDeployable(
            string(deployable["resource_class"]),
            frozenset(string(h) for h in deployable["handles"]),
        )
        for deployable in bodies
    }
    return ObservedDevice(string(body["driver"]), deployables)
