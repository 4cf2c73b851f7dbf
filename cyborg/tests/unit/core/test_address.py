# SPDX-License-Identifier: Apache-2.0
"""Bus addresses."""

import pytest
from hypothesis import given

from cyborg.core.address import MdevAddress, PciAddress
from cyborg.core.errors import Invalid
from cyborg.tests.fixtures.hosts import strategies


@given(strategies.pci_addresses)
def test_pci_address_round_trip(address: PciAddress) -> None:
    assert PciAddress.parse(str(address)) == address
    assert PciAddress.parse(str(address).upper()) == address


@given(strategies.mdev_addresses)
def test_mdev_address_round_trip(address: MdevAddress) -> None:
    assert MdevAddress.parse(str(address)) == address


@given(strategies.pci_addresses, strategies.pci_addresses)
def test_pci_address_order_is_bus_order(left: PciAddress, right: PciAddress) -> None:
    if left.domain == right.domain:
        assert (left < right) == (str(left) < str(right))
    assert (left == right) == (str(left) == str(right))


@given(strategies.pci_addresses)
def test_attach_info_builds_the_node_device_name(address: PciAddress) -> None:
    info = address.attach_info()
    joined = "{domain}:{bus}:{device}.{function}".format(**info)
    assert joined == str(address)
    assert PciAddress.parse_attach_info(info) == address


def test_attach_info_without_a_part_is_rejected() -> None:
    info = PciAddress.parse("84:00.0").attach_info()
    with pytest.raises(Invalid, match="not a PCI address"):
        PciAddress.parse_attach_info(info | {"function": None})


def test_attach_info_is_padded_as_nova_expects() -> None:
    assert PciAddress.parse("84:00.0").attach_info() == {
        "domain": "0000",
        "bus": "84",
        "device": "00",
        "function": "0",
    }


@pytest.mark.parametrize(
    "text",
    ["", "0000:3d:00", "0000:3d:00.8", "0000:3d:20.0", "g:00.0", "0000:3d:00.0 ", "00:00.0\n"],
)
def test_pci_address_malformed_is_rejected(text: str) -> None:
    with pytest.raises(Invalid) as exc:
        PciAddress.parse(text)
    assert exc.value.details["field"] == "address"


@pytest.mark.parametrize(
    "text",
    [
        "0000:3d:00.0",
        "0000:3d:00.0/nvidia-35/none",
        "0000:3d:00.0/a b/6f1c2b1e-0f57-5b0a-9d0e-3a5d8d6c4a11",
        "0000:3d:00.0/../6f1c2b1e-0f57-5b0a-9d0e-3a5d8d6c4a11",
        "x/nvidia-35/6f1c2b1e-0f57-5b0a-9d0e-3a5d8d6c4a11",
    ],
)
def test_mdev_address_malformed_is_rejected(text: str) -> None:
    with pytest.raises(Invalid):
        MdevAddress.parse(text)
