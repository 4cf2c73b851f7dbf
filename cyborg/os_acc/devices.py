# SPDX-License-Identifier: Apache-2.0
"""Devices of bound ARQs in a libvirt domain: their values and their XML."""

from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from cyborg.core.errors import Invalid
from cyborg.os_acc.plugin import BoundArq, load_plugin, parse_arq, require_bound

_PROLOG = ("<!DOCTYPE", "<!ENTITY")
_PCI_ADDRESS = frozenset({"domain", "bus", "slot", "function"})


def get_config(arq: Any) -> dict[str, str]:
    """Return the values that a hypervisor driver needs for the device of an ARQ.

    ``arq`` is an ARQ as the REST API shows it. Each result has ``attach_handle_type``, ``arq_uuid``
    and ``alias``, the alias of the device in a libvirt domain. The other keys depend on the type:
    see its plugin. Raise Invalid with the field.
    """
    return _config(parse_arq(arq))


def attach(arq: Any) -> str:
    """Return the ``<hostdev>`` that attaches the device of a bound ARQ. Raise Invalid.

    It is an argument of libvirt's ``virDomainAttachDeviceFlags``, or a child of ``<devices>`` in a
    domain. Its alias identifies the device until it is detached.
    """
    parsed = parse_arq(arq)
    # An ARQ has its handle before it is bound, while the host may still prepare the device.
    require_bound(arq)
    hostdev = _hostdev(parsed)
    SubElement(hostdev, "alias", {"name": parsed.alias})
    return _serialize(hostdev)


def detach(arq: Any) -> str:
    """Return the ``<hostdev>`` that detaches the device of an ARQ. Raise Invalid.

    It is an argument of libvirt's ``virDomainDetachDeviceFlags``. The state of the ARQ is not
    checked: a device must also be detached after a failure.
    """
    # No alias: libvirt finds the device by its source, also if Nova has composed the domain again
    # since the attachment, without our alias.
    return _serialize(_hostdev(parse_arq(arq)))


def find_alias(arq: Any, domain_xml: str) -> str | None:
    """Return the alias that the device of an ARQ has in a domain; None if the domain lacks it.

    ``domain_xml`` is the XML of libvirt's ``virDomainGetXMLDesc``. The device is found by its
    source, whatever its alias is, also as the interface of a Neutron port. libvirt reports the
    removal of a device by its alias. The alias is empty if the domain was never started. Raise
    Invalid with the field.
    """
    device = _identity(_hostdev(parse_arq(arq)))
    for found in _parse_domain(domain_xml).iterfind("devices/*"):
        if _is_host_device(found) and _identity(found) == device:
            alias = found.find("alias")
            return "" if alias is None else alias.get("name", "")
    return None


def _config(arq: BoundArq) -> dict[str, str]:
    return {
        "attach_handle_type": arq.handle_type,
        "arq_uuid": arq.uuid,
        "alias": arq.alias,
        **load_plugin(arq.handle_type).get_config(arq),
    }


def _hostdev(arq: BoundArq) -> Element:
    return load_plugin(arq.handle_type).build_hostdev(_config(arq))


def _serialize(element: Element) -> str:
    return ElementTree.tostring(element, encoding="unicode")


def _parse_domain(domain_xml: Any) -> Element:
    """Return the root of the XML of a domain. Raise Invalid."""
    # libvirt never writes a document type; entities could make a small text very large.
    if isinstance(domain_xml, str) and not any(word in domain_xml for word in _PROLOG):
        try:
            root = ElementTree.fromstring(domain_xml)  # noqa: S314
        except (ElementTree.ParseError, LookupError, ValueError):
            root = Element("")
        if root.tag == "domain":
            return root
    raise Invalid(
        "domain_xml: expected the XML of a libvirt domain, as virDomainGetXMLDesc returns it",
        field="domain_xml",
    )


def _is_host_device(device: Element) -> bool:
    """Return whether a device belongs to the host; it may be the interface of a Neutron port."""
    return device.tag == "hostdev" or (
        device.tag == "interface" and device.get("type") == "hostdev"
    )


def _identity(device: Element) -> tuple[str | None, dict[str, str | int]]:
    """Return the type of a device and its source address, in a form that can be compared."""
    kind = device.get("type") if device.tag == "hostdev" else "pci"
    address = device.find("source/address")
    attributes = {} if address is None else address.attrib
    # The address of an interface also has the attribute type.
    keys = _PCI_ADDRESS & set(attributes) if kind == "pci" else set(attributes)
    # libvirt writes numbers in hexadecimal, and reads decimal ones too.
    return kind, {key: _normalize(attributes[key]) for key in keys}


def _normalize(value: str) -> str | int:
    """Return a number such as 0x3d as an integer, and another text in lower case."""
    try:
        return int(value, 0)
    except ValueError:
        return value.lower()
