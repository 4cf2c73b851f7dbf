# SPDX-License-Identifier: Apache-2.0
"""The values and the XML of the device of an ARQ."""

from typing import Any

import pytest

from cyborg import os_acc
from cyborg.core.errors import CyborgError, Invalid
from cyborg.tests.fixtures.machine.libvirt import canonical
from cyborg.tests.unit.os_acc.samples import ARQ, CARD, HANDLE, make_arq

ALIAS = f"ua-cyborg-{ARQ}"
PCI_SOURCE = (
    '<source><address domain="0x0000" bus="0x3d" slot="0x01" function="0x1"/></source>'  # of CARD
)


def hostdev(attributes: str, source: str, alias: bool) -> str:
    """Return the expected XML."""
    return canonical(
        f"<hostdev mode='subsystem' {attributes}>{source}"
        + (f"<alias name='{ALIAS}'/>" if alias else "")
        + "</hostdev>"
    )


EXPECTED = {
    "PCI": ("type='pci' managed='yes'", PCI_SOURCE),
    "VFIO": ("type='pci' managed='no'", PCI_SOURCE),
    "TEST_PCI": ("type='pci' managed='no'", PCI_SOURCE.replace("0x0000", "0x80000000")),
    "MDEV": (
        "type='mdev' managed='no' model='vfio-pci'",
        f"<source><address uuid='{HANDLE}'/></source>",
    ),
}


@pytest.mark.parametrize("handle_type", EXPECTED)
def test_attach_of_each_type_has_source_and_alias(handle_type: str) -> None:
    xml = os_acc.attach(make_arq(handle_type))
    assert canonical(xml) == hostdev(*EXPECTED[handle_type], alias=True)


@pytest.mark.parametrize("handle_type", EXPECTED)
def test_detach_of_each_type_has_the_source_and_no_alias(handle_type: str) -> None:
    xml = os_acc.detach(make_arq(handle_type, state="BindStarted"))
    assert canonical(xml) == hostdev(*EXPECTED[handle_type], alias=False)


def test_get_config_of_pci_has_address_and_parts() -> None:
    assert os_acc.get_config(make_arq()) == {
        "attach_handle_type": "PCI",
        "arq_uuid": ARQ,
        "alias": ALIAS,
        "address": str(CARD),
        **CARD.attach_info(),
    }


def test_config_of_test_pci_has_the_invented_address() -> None:
    config = os_acc.get_config(make_arq("TEST_PCI"))
    assert (config["address"], config["domain"]) == (str(CARD), "0000")


def test_device_of_test_pci_is_no_real_device() -> None:
    test = make_arq("TEST_PCI")
    assert os_acc.find_alias(make_arq(), domain(os_acc.attach(test))) is None
    assert os_acc.find_alias(test, domain(os_acc.attach(make_arq()))) is None


def test_find_alias_of_vfio_finds_the_device_by_its_source_whoever_attached_it() -> None:
    by_nova = domain(os_acc.attach(make_arq()).replace("ua-cyborg-", "hostdev-"))
    assert os_acc.find_alias(make_arq("VFIO"), by_nova) == f"hostdev-{ARQ}"
    assert os_acc.find_alias(make_arq("VFIO"), domain(os_acc.detach(make_arq("MDEV")))) is None


def test_get_config_of_mdev_has_parent_and_type() -> None:
    assert os_acc.get_config(make_arq("MDEV")) == {
        "attach_handle_type": "MDEV",
        "arq_uuid": ARQ,
        "alias": ALIAS,
        "mdev_uuid": HANDLE,
        "asked_type": "nvidia-35",
        "parent": str(CARD),
    }


def test_get_config_of_mdev_below_no_pci_device_has_its_name() -> None:
    arq = make_arq("MDEV", attach_handle_info={"parent": "mtty", "asked_type": "mtty-2"})
    config = os_acc.get_config(arq)
    assert (config["parent"], config["asked_type"]) == ("mtty", "mtty-2")


def test_get_config_ignores_other_keys_of_the_info() -> None:
    info = {**CARD.attach_info(), "physical_network": "physnet'/>"}
    config = os_acc.get_config(make_arq(attach_handle_info=info))
    assert config == os_acc.get_config(make_arq())


def with_info(**values: Any) -> dict[str, Any]:
    """Return an ARQ of type MDEV with these values in its info; None removes a key."""
    info = {**make_arq("MDEV")["attach_handle_info"], **values}
    info = {key: value for key, value in info.items() if value is not None}
    return make_arq("MDEV", attach_handle_info=info)


INJECTION = "01'/><hostdev"


@pytest.mark.parametrize(
    ("arq", "field"),
    [
        (None, "arq"),
        ([make_arq()], "arq"),
        ({}, "uuid"),
        (make_arq(uuid=INJECTION), "uuid"),
        (make_arq(uuid=f"{ARQ}\n"), "uuid"),
        (make_arq(state="Initial"), "state"),
        (make_arq(state=["Bound"]), "state"),
        (make_arq(attach_handle_type=""), "attach_handle_type"),
        (make_arq(attach_handle_type=None), "attach_handle_type"),
        (make_arq(attach_handle_type=7), "attach_handle_type"),
        (make_arq(attach_handle_type="pci"), "attach_handle_type"),
        (make_arq(attach_handle_type="USB"), "attach_handle_type"),
        (make_arq(attach_handle_info="0000:3d:01.1"), "attach_handle_info"),
        (make_arq(attach_handle_info={}), "attach_handle_info['domain']"),
        (
            make_arq(attach_handle_info={**CARD.attach_info(), "bus": "00", "device": "00"}),
            "attach_handle_info",
        ),
        (with_info(domain="0x0000"), "attach_handle_info['domain']"),
        (with_info(domain="123456789"), "attach_handle_info['domain']"),
        (with_info(bus="3d "), "attach_handle_info['bus']"),
        (with_info(bus=INJECTION), "attach_handle_info['bus']"),
        (with_info(bus=0x3D), "attach_handle_info['bus']"),
        (with_info(device="20"), "attach_handle_info['device']"),
        (with_info(device="\u0660\u0661"), "attach_handle_info['device']"),
        (with_info(function="8"), "attach_handle_info['function']"),
        (with_info(function="1\n"), "attach_handle_info['function']"),
        (with_info(parent="../mtty"), "attach_handle_info['parent']"),
        (with_info(asked_type=None), "attach_handle_info['asked_type']"),
        (with_info(asked_type="../../x"), "attach_handle_info['asked_type']"),
        (with_info(asked_type=".."), "attach_handle_info['asked_type']"),
        (make_arq("MDEV", attach_handle_uuid=None), "attach_handle_uuid"),
        (make_arq("MDEV", attach_handle_uuid=f"{{{HANDLE}}}"), "attach_handle_uuid"),
    ],
)
def test_attach_of_malformed_arq_names_the_field(arq: Any, field: str) -> None:
    with pytest.raises(Invalid) as error:
        os_acc.attach(arq)
    assert error.value.details["field"] == field
    assert field in error.value.message


def test_unbound_arq_is_reported_as_unbound() -> None:
    arq = make_arq(state="Initial", attach_handle_type="", attach_handle_info={})
    with pytest.raises(Invalid, match="the ARQ has no attach handle, bind it first"):
        os_acc.attach(arq)


def domain(*devices: str) -> str:
    """Return the XML of a domain."""
    return f"<domain type='kvm' id='3'><name>a</name><devices>{''.join(devices)}</devices></domain>"


@pytest.mark.parametrize("handle_type", EXPECTED)
def test_find_alias_returns_that_of_the_device(handle_type: str) -> None:
    arq = make_arq(handle_type)
    assert os_acc.find_alias(arq, domain("<disk/>", os_acc.attach(arq))) == ALIAS


def test_find_alias_of_a_device_composed_by_another_program_returns_its_alias() -> None:
    source = "<source><address domain='0x0' bus='0x3D' slot='1' function='0x1'/></source>"
    other = source.replace("slot='1'", "slot='2'")
    xml = domain(
        f"<hostdev type='pci'>{other}<alias name='hostdev0'/></hostdev>",
        f"<hostdev type='pci'>{source}<alias name='hostdev1'/></hostdev>",
    )
    assert os_acc.find_alias(make_arq(), xml) == "hostdev1"


def test_find_alias_of_the_device_of_a_port_returns_that_of_its_interface() -> None:
    address = "<address type='pci' domain='0x0000' bus='0x3d' slot='0x01' function='0x1'/>"
    guest = "<address type='pci' domain='0x0000' bus='0x00' slot='0x03' function='0x0'/>"
    xml = domain(
        f"<interface type='network'>{guest}<alias name='net0'/></interface>",
        "<interface type='hostdev' managed='yes'><mac address='52:54:00:6d:90:02'/>"
        f"<source>{address}</source>{guest}<alias name='hostdev0'/></interface>",
    )
    assert os_acc.find_alias(make_arq(), xml) == "hostdev0"
    assert os_acc.find_alias(make_arq("MDEV"), xml) is None
    assert os_acc.find_alias(make_arq(), xml.replace("0x3d", "0x3e")) is None
    assert os_acc.find_alias(make_arq(), xml.replace("'hostdev' m", "'vdpa' m")) is None


def test_find_alias_without_alias_in_the_definition_is_empty() -> None:
    assert os_acc.find_alias(make_arq(), domain(os_acc.detach(make_arq()))) == ""


def test_find_alias_of_absent_device_is_none() -> None:
    xml = domain("<hostdev type='pci'/>", os_acc.attach(make_arq("MDEV")))
    assert os_acc.find_alias(make_arq(), xml) is None


BOMB = "<!DOCTYPE d [<!ENTITY a 'aaaa'>]><domain>&a;</domain>"


@pytest.mark.parametrize("xml", [None, b"<domain/>", "", "<domain>", "<pool/>", "\x00", BOMB])
def test_find_alias_in_malformed_domain_names_the_field(xml: Any) -> None:
    with pytest.raises(CyborgError) as error:
        os_acc.find_alias(make_arq(), xml)
    assert (error.type, error.value.details) == (Invalid, {"field": "domain_xml"})
