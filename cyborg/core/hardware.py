# SPDX-License-Identifier: Apache-2.0
"""A device in the words of the internal contract's ``GET /hardware``."""

from typing import Any

from cyborg.core.device import Device


def describe(device: Device, uuid: str | None = None) -> dict[str, Any]:
    """Return what the contract calls hardware; ``uuid`` is known to the conductor alone.

    ``num`` counts what can be given away. The capability tree is empty until a driver tells one.
    """
    board = device.std_board_info
    return {
        "uuid": uuid,
        "acc_specs": {
            "remote": 0,
            "num": sum(len(part.handles) for part in device.deployables),
            "device_type": str(device.type),
            "acc_capability": {},
        },
        "acc_status": {
            "setup_required": device.setup_required,
            "reboot_required": device.reboot_required,
        },
        "address": device.address,
        "driver": device.backend,
        "vendor_id": board.get("vendor_id", device.vendor),
        "product_id": board.get("product_id"),
        "numa_node": device.numa_node,
        "health": str(device.health),
        "serial": device.serial,
    }
