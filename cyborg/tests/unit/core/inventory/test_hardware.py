# SPDX-License-Identifier: Apache-2.0
"""Devices in the format of the internal contract."""

import json
from typing import Any

import pytest
from hypothesis import given

from cyborg.core.errors import Invalid
from cyborg.core.inventory.device import (
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
    Health,
)
from cyborg.core.inventory.report import (
    BackendState,
    BackendStatus,
    ObservedDeployable,
    ObservedDevice,
    dump_answer,
    dump_device,
    load_answer,
)
from cyborg.tests.fixtures.hosts import strategies


def test_dump_device_matches_contract() -> None:
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
    assert dump_device(card, "6f1c2b1e-0f57-5b0a-9d0e-3a5d8d6c4a11") == {
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
def test_dump_device_is_json(host: tuple[Device, ...]) -> None:
    body = [dump_device(device) for device in host]
    assert json.loads(json.dumps(body)) == body


@pytest.mark.slow
@given(strategies.hosts())
def test_hardware_round_trip(host: tuple[Device, ...]) -> None:
    states = [
        BackendState("well", "fake", BackendStatus.READY),
        BackendState("sick", "fake", BackendStatus.ERROR, "broken"),
        BackendState("new", "fake", BackendStatus.DISCOVERING),
    ]
    answer = load_answer(json.loads(json.dumps(dump_answer(host, states))))
    assert answer.failed_backends == {"sick": "broken", "new": None}
    assert answer.devices == {
        device.address: ObservedDevice(
            device.backend,
            {
                deployable.address: ObservedDeployable(
                    deployable.resource_class, frozenset(h.address for h in deployable.handles)
                )
                for deployable in device.deployables
            },
        )
        for device in host
    }


def test_load_answer_of_previous_release() -> None:
    body = {"hardware": [{"address": "a", "driver": "fake"}]}
    assert load_answer(body).devices == {"a": ObservedDevice("fake", None)}


@pytest.mark.parametrize(
    "body",
    [
        *(None, {}, {"hardware": 1}, {"hardware": [{}]}),
        {"hardware": [{"address": "a", "driver": "d", "deployables": [{"address": "a"}]}]},
        {"hardware": [], "backends": [{"name": "b"}]},
    ],
)
def test_load_answer_malformed_is_rejected(body: Any) -> None:
    with pytest.raises(Invalid, match="malformed hardware"):
        load_answer(body)
