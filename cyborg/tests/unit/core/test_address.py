# SPDX-License-Identifier: Apache-2.0
"""Bus addresses."""

import pytest
from hypothesis import given

from cyborg.core.address import MdevAddress, PciAddress
from cyborg.core.errors import Invalid
from cyborg.fixtures import strategies


@given(strategies.pci_addresses)
def test_a_pci_address_reads_what_it_prints(address: PciAddress) -> None:
    assert PciAddress.parse(str(address)) == address
    assert PciAddress.parse(str(address).upper()) == address


@given(strategies.mdev_addresses)
def test_an_mdev_address_reads_what_it_prints(address: MdevAddress) -> None:
    assert MdevAddress.parse(str(address)) == address


@given(strategies.pci_addresses, strategies.pci_addresses)
def test_order_is_the_bus_order(one: PciAddress, two: PciAddress) -> None:
    if one.domain == two.domain:
        assert (one < two) == (str(one) < str(two))
    assert (one == two) == (str(one) == str(two))


@given(strategies.pci_addresses)
def test_attach_info_builds_the_node_device_name(address: PciAddress) -> None:
    info = address.attach_info()
    joined = "{domain}:{bus}:{device}.{function}".format(**info)
    assert joined == str(address)


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
def test_what_is_no_pci_address(text: str) -> None:
    with pytest.raises(Invalid) as bad:
        PciAddress.parse(text)
    assert bad.value.details["field"] == "address"


@pytest.mark.parametrize(
    "text",
    [
        "0000:3d:00.0",
        "0000:3d:00.0/nvidia-35/none",
        "0000:3d:00.0/a b/6f1c2b1e-0f57-5b0a-9d0e-3a5d8d6c4a11",
        "x/nvidia-35/6f1c2b1e-0f57-5b0a-9d0e-3a5d8d6c4a11",
    ],
)
def test_what_is_no_mdev_address(text: str) -> None:
    with pytest.raises(Invalid):
        MdevAddress.parse(text)
