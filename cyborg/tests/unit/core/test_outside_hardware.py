# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from cyborg.core.device import Device, DeviceType, HandleType, Health
from cyborg.core.errors import Invalid
from cyborg.core.hardware import describe
from cyborg.core.outside_hardware import load
from cyborg.fixtures.outside import ADDRESS, hardware


def one(**changes: Any) -> Device:
    specs = hardware()["acc_specs"] | changes.pop("specs", {})
    (device,) = load({"hardware": [hardware(acc_specs=specs, **changes)]}, "crypto", "NIC")
    return device


def test_a_piece_of_hardware_is_a_device_with_one_deployable() -> None:
    card = one(vendor_id="1af4", product_id="1054", serial="s", numa_node=1, health="unhealthy")
    assert (card.address, card.type, card.backend) == (ADDRESS, DeviceType.CRYPTO, "crypto")
    assert (card.vendor, card.model, card.serial, card.numa_node) == ("1af4", "1054", "s", 1)
    assert card.health is Health.UNHEALTHY
    (part,) = card.deployables
    assert part.resource_class == "CUSTOM_CRYPTO"
    assert "CUSTOM_CRYPTO_IPSEC_AES" in part.traits
    (handle,) = part.handles
    assert (handle.address, handle.type) == (ADDRESS, HandleType.PCI)
    assert handle.info == {"domain": "0000", "bus": "5a", "device": "00", "function": "0"}


def test_it_is_told_as_it_came() -> None:
    told, came = describe(one(vendor_id="1af4")), hardware()
    assert told["acc_specs"] == came["acc_specs"]
    assert told["acc_status"] == came["acc_status"]
    assert (told["vendor_id"], told["driver"]) == ("1af4", "crypto")


@pytest.mark.parametrize(
    ("kind", "type_", "resource_class"),
    [
        ("gpu", DeviceType.GPU, "PGPU"),
        ("FPGA", DeviceType.FPGA, "FPGA"),
        ("VCPU", DeviceType.OTHER, "CUSTOM_VCPU"),
        ("comp-press", DeviceType.OTHER, "CUSTOM_COMP_PRESS"),
    ],
)
def test_types(kind: str, type_: DeviceType, resource_class: str) -> None:
    card = one(specs={"device_type": kind})
    assert (card.type, card.deployables[0].resource_class) == (type_, resource_class)


def test_who_tells_no_type_has_that_of_the_hello() -> None:
    (card,) = load({"hardware": [hardware(acc_specs={"num": 1})]}, "b", "NIC")
    assert (card.type, card.deployables[0].resource_class) == (DeviceType.NIC, "CUSTOM_NIC")


@pytest.mark.parametrize("word", ["reboot_required", "reboot_equired"])
def test_both_spellings_of_a_reboot(word: str) -> None:
    assert one(acc_status={"setup_required": True, word: True}).reboot_required


def test_without_an_address_nothing_can_be_given_away() -> None:
    card = one(address=None)
    assert card.address == "5f0d6f3c-6a8e-4a39-9b7a-0d5f6f3c6a8e"
    assert card.deployables[0].handles == ()


def test_what_is_remote_cannot_be_attached() -> None:
    card = one(specs={"remote": 1})
    assert card.deployables[0].handles == ()
    assert describe(card)["acc_specs"]["remote"] == 1


def test_several_handles() -> None:
    named = [f"0000:5a:00.{n}" for n in (1, 2)]
    (part,) = one(specs={"num": 2}, handles=named).deployables
    assert [(h.address, h.type) for h in part.handles] == [(n, HandleType.PCI) for n in named]
    (part,) = one(specs={"num": 9}, attach_type="TEST_PCI").deployables
    assert [h.address for h in part.handles][7:] == ["0000:5a:00.7", "0000:5a:01.0"]


def test_no_numa_node_as_sysfs_says_it() -> None:
    assert one(numa_node=-1).numa_node is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": None, "uuid": None}, "it has neither an address nor a uuid"),
        ({"address": "5a"}, "'5a' is not a PCI address"),
        ({"address": 5}, "TypeError expected a string"),
        ({"uuid": "x"}, "'x' is no uuid"),
        ({"specs": {"num": -1}}, "num is '-1': expected 0 to 256"),
        ({"specs": {"num": 10**9}}, "num is '1000000000'"),
        ({"specs": {"num": "1"}}, "num is '1': expected 0 to 256"),
        ({"specs": {"num": True}}, "num is 'True'"),
        ({"specs": {"num": 2}}, "num is 2: its functions must be named in handles"),
        ({"handles": []}, "num is 1 and handles names 0"),
        ({"handles": 5}, "handles is no list"),
        ({"specs": {"num": 2}, "handles": [ADDRESS, ADDRESS]}, f"{ADDRESS} twice"),
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
        ({"numa_node": 70000}, "numa_node is '70000'"),
        ({"vendor_id": 8086}, "TypeError expected a string"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=rf"^hardware\[0\]: .*{message}"):
        one(**changes)


@pytest.mark.parametrize("body", [None, [], {}, {"hardware": {}}])
def test_what_is_no_answer(body: Any) -> None:
    with pytest.raises(Invalid, match="the answer is malformed"):
        load(body, "b", "X")


def test_one_address_twice() -> None:
    body = {"hardware": [hardware(), hardware("0000:5a:00.1", handles=[ADDRESS])]}
    with pytest.raises(Invalid, match=rf"hardware\[1\] has the address {ADDRESS} of hardware\[0\]"):
        load(body, "b", "X")


def test_a_flood() -> None:
    with pytest.raises(Invalid, match="has 257 pieces of hardware, at most 256"):
        load({"hardware": [hardware()] * 257}, "b", "X")
    many = [
        hardware(f"0000:{n:02x}:00.0", attach_type="TEST_PCI", acc_specs={"num": 256})
        for n in range(17)
    ]
    with pytest.raises(Invalid, match="more than 4096 handles"):
        load({"hardware": many}, "b", "X")
