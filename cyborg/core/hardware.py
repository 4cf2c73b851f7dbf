# SPDX-License-Identifier: Apache-2.0
"""A device in the words of the internal contract's ``GET /hardware``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cyborg.core import capability
from cyborg.core.device import Device
from cyborg.core.errors import Invalid
from cyborg.core.plain import string
from cyborg.core.report import BackendState, BackendStatus
from cyborg.core.wire import dump_backend, load_backend


@dataclass(frozen=True, slots=True)
class Part:
    """A deployable as the agent sees it."""

    resource_class: str
    handles: frozenset[str]


@dataclass(frozen=True, slots=True)
class Seen:
    """A device as the agent sees it; ``parts`` by address, None from an agent that tells none."""

    backend: str
    parts: Mapping[str, Part] | None


@dataclass(frozen=True, slots=True)
class Hardware:
    """What an agent sees: devices by address, and backends that cannot see, each with its error.

    A backend that is looking for the first time cannot see yet and has no error.
    """

    devices: Mapping[str, Seen] = field(default_factory=dict)
    silent: Mapping[str, str | None] = field(default_factory=dict)


def describe(device: Device, uuid: str | None = None) -> dict[str, Any]:
    """Return what the contract calls hardware; ``uuid`` is known to the conductor alone.

    ``num`` counts what can be given away. The capability tree is what the device's driver told,
    empty if it told none.
    """
    return {
        "uuid": uuid,
        **_words(
            {
                "num": sum(len(part.handles) for part in device.deployables),
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
                "address": part.address,
                "resource_class": part.resource_class,
                "handles": [handle.address for handle in part.handles],
            }
            for part in device.deployables
        ],
    }


def record(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the contract calls hardware, of a device as the database has it.

    Beside its facts the row has host, driver (None once its agent has the backend no longer),
    backend and num. A type or health that a newer release wrote is passed on as it is.
    """
    return {"uuid": row["uuid"], "host": row["host"], "backend": row["backend"], **_words(row)}


def _words(facts: Mapping[str, Any]) -> dict[str, Any]:
    board = facts["std_board_info"]
    return {
        "acc_specs": {
            "remote": int(board.get("remote") == "1"),
            "num": facts["num"],
            "device_type": facts["type"],
            "acc_capability": capability.of_facts(facts.get("vendor_board_info", {})),
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


def answer(devices: Sequence[Device], states: Sequence[BackendState]) -> dict[str, Any]:
    """Return what an agent answers when it is asked for its hardware."""
    return {
        "hardware": [describe(device) for device in devices],
        "backends": [dump_backend(state) for state in states],
    }


def load(body: Any) -> Hardware:
    """Read what an agent answered, of this release or the one before. Raises Invalid."""
    try:
        states = [load_backend(one) for one in body.get("backends", ())]
        return Hardware(
            {string(one["address"]): _seen(one) for one in body["hardware"]},
            {s.name: s.error for s in states if s.status is not BackendStatus.READY},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as bad:
        raise Invalid(f"malformed hardware: {type(bad).__name__} {bad}", field="hardware") from bad


def _seen(body: Mapping[str, Any]) -> Seen:
    told = body.get("deployables")
    if told is None:
        return Seen(string(body["driver"]), None)
    parts = {
        string(part["address"]): Part(
            string(part["resource_class"]), frozenset(string(h) for h in part["handles"])
        )
        for part in told
    }
    return Seen(string(body["driver"]), parts)
