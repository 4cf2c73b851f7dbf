# SPDX-License-Identifier: Apache-2.0
"""Devices in the words of the internal contract."""

import json

from hypothesis import given

from cyborg.core.device import AttachHandle, Deployable, Device, DeviceType, HandleType, Health
from cyborg.core.hardware import describe
from cyborg.fixtures import strategies


def test_a_card_is_told_as_the_contract_has_it() -> None:
    handles = tuple(AttachHandle(address, HandleType.PCI) for address in ("0", "1"))
    card = Device(
        address="0000:3d:00.0",
        type=DeviceType.CRYPTO,
        vendor="8086",
        model="C62x",
        backend="gen0",
        std_board_info={"product_id": "37c8"},
        numa_node=1,
        serial="s1",
        health=Health.UNHEALTHY,
        setup_required=True,
        deployables=(Deployable("a", "FPGA", handles=handles), Deployable("b", "FPGA")),
    )
    assert describe(card, "6f1c2b1e-0f57-5b0a-9d0e-3a5d8d6c4a11") == {
        "uuid": "6f1c2b1e-0f57-5b0a-9d0e-3a5d8d6c4a11",
        "acc_specs": {
            "remote": 0,
            "num": 2,
            "device_type": "CRYPTO",
            "acc_capability": {},
        },
        "acc_status": {"setup_required": True, "reboot_required": False},
        "address": "0000:3d:00.0",
        "driver": "gen0",
        "vendor_id": "8086",
        "product_id": "37c8",
        "numa_node": 1,
        "health": "unhealthy",
        "serial": "s1",
    }


@given(strategies.hosts())
def test_every_device_can_be_told_on_the_bus(host: tuple[Device, ...]) -> None:
    told = [describe(device) for device in host]
    assert json.loads(json.dumps(told)) == told
