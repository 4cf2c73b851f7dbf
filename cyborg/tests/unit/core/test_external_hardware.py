# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from cyborg.core.errors import Invalid
from cyborg.core.external import load_devices
from cyborg.core.inventory.device import Device, DeviceType, HandleType, Health
from cyborg.core.inventory.report import dump_device
from cyborg.tests.fixtures.hosts.external_drivers import ADDRESS, hardware


def load_one(**changes: Any) -> Device:
    specs = hardware()["acc_specs"] | changes.pop("specs", {})
    (device,) = load_devices({"hardware": [hardware(acc_specs=specs, **changes)]}, "crypto", "NIC")
    return device


def test_load_devices_one_deployable_per_piece() -> None:
    card = load_one(
        vendor_id="1af4", product_id="1054", serial="s", numa_node=1, health="unhealthy"
    )
    assert (card.address, card.type, card.backend) == (ADDRESS, DeviceType.CRYPTO, "crypto")
    assert (card.vendor, card.model, card.serial, card.numa_node) == ("1af4", "1054", "s", 1)
    assert card.health is Health.UNHEALTHY
    (deployable,) = card.deployables
    assert deployable.resource_class == "CUSTOM_CRYPTO"
    assert "CUSTOM_CRYPTO_IPSEC_AES" in deployable.traits
    (handle,) = deployable.handles
    assert (handle.address, handle.type) == (ADDRESS, HandleType.PCI)
    assert handle.info == {"domain": "0000", "bus": "5a", "device": "00", "function": "0"}


def test_load_devices_dump_round_trip() -> None:
    dumped, original = dump_device(load_one(vendor_id="1af4")), hardware()
    assert dumped["acc_specs"] == original["acc_specs"]
    assert dumped["acc_status"] == original["acc_status"]
    assert (dumped["vendor_id"], dumped["driver"]) == ("1af4", "crypto")


@pytest.mark.parametrize(
    ("kind", "type_", "resource_class"),
    [
        ("gpu", DeviceType.GPU, "PGPU"),
        ("FPGA", DeviceType.FPGA, "FPGA"),
        ("VCPU", DeviceType.OTHER, "CUSTOM_VCPU"),
        ("comp-press", DeviceType.OTHER, "CUSTOM_COMP_PRESS"),
    ],
)
def test_load_devices_types(kind: str, type_: DeviceType, resource_class: str) -> None:
    card = load_one(specs={"device_type": kind})
    assert (card.type, card.deployables[0].resource_class) == (type_, resource_class)


def test_load_devices_default_type() -> None:
    (card,) = load_devices({"hardware": [hardware(acc_specs={"num": 1})]}, "b", "NIC")
    assert (card.type, card.deployables[0].resource_class) == (DeviceType.NIC, "CUSTOM_NIC")


@pytest.mark.parametrize("key", ["reboot_required", "reboot_equired"])
def test_load_devices_misspelt_reboot_required(key: str) -> None:
    assert load_one(acc_status={"setup_required": True, key: True}).reboot_required


def test_load_devices_without_address_has_no_handles() -> None:
    card = load_one(address=None)
    assert card.address == "5f0d6f3c-6a8e-4a39-9b7a-0d5f6f3c6a8e"
    assert card.deployables[0].handles == ()


def test_load_devices_remote_has_no_handles() -> None:
    card = load_one(specs={"remote": 1})
    assert card.deployables[0].handles == ()
    assert dump_device(card)["acc_specs"]["remote"] == 1


def test_load_devices_several_handles() -> None:
    addresses = [f"0000:5a:00.{n}" for n in (1, 2)]
    (deployable,) = load_one(specs={"num": 2}, handles=addresses).deployables
    assert [(h.address, h.type) for h in deployable.handles] == [
        (n, HandleType.PCI) for n in addresses
    ]
    (deployable,) = load_one(specs={"num": 9}, attach_type="TEST_PCI").deployables
    assert [h.address for h in deployable.handles][7:] == ["0000:5a:00.7", "0000:5a:01.0"]
    (handle,) = load_one(attach_type="VFIO").deployables[0].handles
    assert (handle.type, handle.info["delivery"]) == (HandleType.VFIO, "agent")


def test_load_devices_numa_node_minus_one_is_none() -> None:
    assert load_one(numa_node=-1).numa_node is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": None, "uuid": None}, "hardware has neither an address nor a uuid"),
        ({"address": "5a"}, "'5a' is not a PCI address"),
        ({"address": 5}, "TypeError expected a string"),
        ({"uuid": "x"}, "'x' is not a uuid"),
        ({"specs": {"num": -1}}, "num: invalid value '-1', expected an integer from 0 to 256"),
        ({"specs": {"num": 10**9}}, "num: invalid value '1000000000'"),
        ({"specs": {"num": "1"}}, "num: invalid value '1', expected an integer from 0 to 256"),
        ({"specs": {"num": True}}, "num: invalid value 'True'"),
        ({"specs": {"num": 2}}, "num is 2: expected 2 addresses of PCI functions in handles"),
        ({"handles": []}, "num is 1 but handles has 0"),
        ({"handles": 5}, "handles must be a list"),
        (
            {"specs": {"num": 2}, "handles": [ADDRESS, ADDRESS]},
            f"duplicate handle address {ADDRESS}",
        ),
        ({"attach_type": "MDEV"}, "attach_type is MDEV"),
        ({"attach_type": "X"}, "'X' is not a valid HandleType"),
        ({"specs": {"remote": 2}}, "remote is '2': expected 0 or 1"),
        ({"specs": {"device_type": " "}}, "' ' has no letter or digit"),
        ({"specs": {"acc_capability": {" ": 1}}}, "acc_capability: "),
        ({"specs": {"acc_capability": {"a": "x" * 20480}}}, "acc_capability: it has 20488 bytes"),
        (
            {"acc_status": {"setup_required": "no"}},
            "setup_required is 'no': expected true or false",
        ),
        ({"acc_status": []}, "AttributeError"),
        ({"health": "fine"}, "'fine' is not a valid Health"),
        ({"numa_node": 70000}, "numa_node: invalid value '70000'"),
        ({"vendor_id": 8086}, "TypeError expected a string"),
    ],
)
def test_load_devices_malformed_piece_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=rf"^hardware\[0\]: .*{message}"):
        load_one(**changes)


@pytest.mark.parametrize("body", [None, [], {}, {"hardware": {}}])
def test_load_devices_malformed_answer_is_rejected(body: Any) -> None:
    with pytest.raises(Invalid, match="the answer is malformed"):
        load_devices(body, "b", "X")


def test_load_devices_duplicate_address_is_rejected() -> None:
    body = {"hardware": [hardware(), hardware("0000:5a:00.1", handles=[ADDRESS])]}
    with pytest.raises(
        Invalid, match=rf"hardware\[1\]: duplicate address {ADDRESS}, also in hardware\[0\]"
    ):
        load_devices(body, "b", "X")


def test_load_devices_too_many_is_rejected() -> None:
    with pytest.raises(Invalid, match="hardware has 257 elements, at most 256"):
        load_devices({"hardware": [hardware()] * 257}, "b", "X")
    many = [
        hardware(f"0000:{n:02x}:00.0", attach_type="TEST_PCI", acc_specs={"num": 256})
        for n in range(17)
    ]
    with pytest.raises(Invalid, match="more than 4096 devices and handles"):
        load_devices({"hardware": many}, "b", "X")
