# SPDX-License-Identifier: Apache-2.0
"""Devices in the words of the internal contract."""

import json
from typing import Any

import pytest
from hypothesis import given

from cyborg.core.device import AttachHandle, Deployable, Device, DeviceType, HandleType, Health
from cyborg.core.errors import Invalid
from cyborg.core.hardware import Part, Seen, answer, describe, load
from cyborg.core.report import BackendState, BackendStatus
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
        "deployables": [
            {"address": "a", "resource_class": "FPGA", "handles": ["0", "1"]},
            {"address": "b", "resource_class": "FPGA", "handles": []},
        ],
    }


@given(strategies.hosts())
def test_every_device_can_be_told_on_the_bus(host: tuple[Device, ...]) -> None:
    told = [describe(device) for device in host]
    assert json.loads(json.dumps(told)) == told


@given(strategies.hosts())
def test_what_is_told_is_read(host: tuple[Device, ...]) -> None:
    states = [
        BackendState("well", "fake", BackendStatus.READY),
        BackendState("sick", "fake", BackendStatus.ERROR, "broken"),
        BackendState("new", "fake", BackendStatus.DISCOVERING),
    ]
    seen = load(json.loads(json.dumps(answer(host, states))))
    assert seen.silent == {"sick": "broken", "new": None}
    assert seen.devices == {
        device.address: Seen(
            device.backend,
            {
                part.address: Part(part.resource_class, frozenset(h.address for h in part.handles))
                for part in device.deployables
            },
        )
        for device in host
    }


def test_an_agent_of_before_tells_less() -> None:
    told = {"hardware": [{"address": "a", "driver": "fake"}]}
    assert load(told).devices == {"a": Seen("fake", None)}


@pytest.mark.parametrize(
    "body",
    [
        *(None, {}, {"hardware": 1}, {"hardware": [{}]}),
        {"hardware": [{"address": "a", "driver": "d", "deployables": [{"address": "a"}]}]},
        {"hardware": [], "backends": [{"name": "b"}]},
    ],
)
def test_nonsense_is_refused(body: Any) -> None:
    with pytest.raises(Invalid, match="malformed hardware"):
        load(body)
