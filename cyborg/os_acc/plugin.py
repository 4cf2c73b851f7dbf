# SPDX-License-Identifier: Apache-2.0
"""The plugins of the library, one for each attach handle type, and the ARQs that they get.

ARQs are parsed strictly, as the REST API shows them. A plugin is an entry point of the group
``cyborg.os_acc.plugin``. Its name is the attach handle type in lower case, and it refers to a
subclass of ``Plugin``, which is created without arguments. Those of this package are for the types
PCI, VFIO and TEST_PCI (functions of the PCI bus) and MDEV (mediated devices).
"""

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any
from xml.etree.ElementTree import Element, SubElement

from stevedore import ExtensionManager

from cyborg.core.address import PciAddress
from cyborg.core.binding.states import ArqState
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.text import describe, join_limited
from cyborg.core.validation import parse_uuid

# Start of the aliases of attached devices; libvirt keeps an alias of others only if it begins with
# ``ua-``.
ALIAS_PREFIX = "ua-cyborg-"

_HANDLE_TYPE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class BoundArq:
    """The parsed fields of an ARQ that owns an attach handle.

    ``handle_uuid`` and ``info`` are not parsed: their meaning depends on ``handle_type``, whose
    plugin parses them.
    """

    uuid: str
    handle_type: str
    handle_uuid: Any
    info: Mapping[Any, Any]

    @property
    def alias(self) -> str:
        """Return the alias of the device in a libvirt domain."""
        return f"{ALIAS_PREFIX}{self.uuid}"


def parse_arq(arq: Any) -> BoundArq:
    """Parse an ARQ that owns an attach handle. Raise Invalid with the field."""
    if not isinstance(arq, Mapping):
        raise Invalid(
            f"arq: expected an object of GET /v2/accelerator_requests, found {type(arq).__name__}",
            field="arq",
        )
    uuid = parse_uuid(arq.get("uuid"), "uuid")
    handle_type = arq.get("attach_handle_type")
    if not isinstance(handle_type, str) or not _HANDLE_TYPE.fullmatch(handle_type):
        reason = (
            "the ARQ has no attach handle, bind it first"
            if handle_type in ("", None)
            else f"invalid value {describe(handle_type)}, expected a type such as PCI"
        )
        raise Invalid(f"attach_handle_type of ARQ {uuid}: {reason}", field="attach_handle_type")
    info = arq.get("attach_handle_info")
    if not isinstance(info, Mapping):
        raise Invalid(
            f"attach_handle_info of ARQ {uuid}: expected an object of strings, found "
            f"{type(info).__name__}",
            field="attach_handle_info",
        )
    return BoundArq(uuid, handle_type, handle_uuid=arq.get("attach_handle_uuid"), info=info)


def require_bound(arq: Mapping[str, Any]) -> None:
    """Raise Invalid unless the state of a parsed ARQ is Bound."""
    if (state := arq.get("state")) != ArqState.BOUND:
        raise Invalid(
            f"state of ARQ {arq['uuid']}: found {describe(state)}, only the device of an ARQ in "
            f"state {ArqState.BOUND} can be attached",
            field="state",
        )


def check_info(arq: BoundArq, key: str, pattern: re.Pattern[str], expected: str) -> str:
    """Return a value of the attach handle info. Raise Invalid unless all of it matches."""
    field = f"attach_handle_info['{key}']"
    if key not in arq.info:
        raise Invalid(f"{field} of ARQ {arq.uuid} is missing, expected {expected}", field=field)
    # fullmatch: a value becomes a part of an XML document or of a path in sysfs.
    value = arq.info[key]
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise Invalid(
            f"{field} of ARQ {arq.uuid}: invalid value {describe(value)}, expected {expected}",
            field=field,
        )
    return value


NAMESPACE = "cyborg.os_acc.plugin"
_MAX_NAMES = 20  # in an error message


class Plugin(ABC):
    """Renders the devices of one attach handle type."""

    @abstractmethod
    def get_config(self, arq: BoundArq) -> dict[str, str]:
        """Return the values that a hypervisor driver needs. Raise Invalid with the field.

        Every value must be checked here: ``build_hostdev`` gets nothing else.
        """

    @abstractmethod
    def build_hostdev(self, config: Mapping[str, str]) -> Element:
        """Return the element ``hostdev`` of libvirt's domain XML, without an alias."""


def load_plugin(handle_type: str) -> Plugin:
    """Return the plugin of an attach handle type.

    Raise Invalid if there is none, or DriverFailed if it cannot be loaded.
    """
    plugins, errors = _load_all()
    name = handle_type.lower()
    if name in errors:
        raise DriverFailed(
            f"the plugin {name} of {NAMESPACE} cannot be loaded: {errors[name]}; correct or "
            "uninstall its package"
        )
    if name not in plugins:
        types = join_limited(sorted(key.upper() for key in plugins), _MAX_NAMES)
        raise Invalid(
            f"attach_handle_type: no plugin for {handle_type!r}, the installed ones are for "
            f"{types}",
            field="attach_handle_type",
        )
    return plugins[name]


# Scanning the installed packages takes longer than all calls of a guest together. A package that is
# installed later is found after a restart.
@functools.cache
def _load_all() -> tuple[Mapping[str, Plugin], Mapping[str, str]]:
    """Return the plugins by name, and the errors of those that cannot be loaded."""
    errors: dict[str, str] = {}

    def note_failure(manager: Any, entry: EntryPoint, exc: BaseException) -> None:
        errors[entry.name] = f"{type(exc).__name__}: {exc}"

    manager: ExtensionManager[Any] = ExtensionManager(
        NAMESPACE, invoke_on_load=True, on_load_failure_callback=note_failure
    )
    plugins: dict[str, Plugin] = {}
    for extension in manager:
        name, plugin = extension.name, extension.obj
        # Neither is used, see ``load_plugin``: the order of the installed packages would decide.
        if name in plugins:
            errors[name] = "several packages have a plugin of this name"
        elif not isinstance(plugin, Plugin):
            errors[name] = f"{extension.entry_point.value} is no subclass of {Plugin.__name__}"
        else:
            plugins[name] = plugin
    return plugins, errors


# The forms of PciAddress.attach_info.
_PARTS = (
    ("domain", re.compile(r"[0-9a-fA-F]{4,8}"), "4 to 8 hexadecimal digits such as 0000"),
    ("bus", re.compile(r"[0-9a-fA-F]{2}"), "2 hexadecimal digits such as 3d"),
    ("device", re.compile(r"[01][0-9a-fA-F]"), "2 hexadecimal digits from 00 to 1f"),
    ("function", re.compile(r"[0-7]"), "a digit from 0 to 7"),
)

# The number of a domain is a signed integer of 32 bits in the Linux kernel.
_FIRST_ABSENT_DOMAIN = 0x80000000


def parse_address(arq: BoundArq) -> PciAddress:
    """Return the PCI address of the attach handle info. Raise Invalid with the field."""
    parts = (check_info(arq, key, pattern, text) for key, pattern, text in _PARTS)
    domain, bus, device, function = (int(part, 16) for part in parts)
    return PciAddress(domain, bus, device, function)


class PciPlugin(Plugin):
    """Renders a PCI function that libvirt takes from its driver on the host, and returns to it."""

    managed = True

    def get_config(self, arq: BoundArq) -> dict[str, str]:
        """Return ``address``, and its parts ``domain``, ``bus``, ``device`` and ``function``."""
        address = parse_address(arq)
        if not (address.domain or address.bus or address.device):
            # libvirt treats it as an absent address; the host bridge of every machine is there.
            raise Invalid(
                f"attach_handle_info of ARQ {arq.uuid}: {address} is a host bridge, which cannot "
                "be attached",
                field="attach_handle_info",
            )
        return {"address": str(address), **address.attach_info()}

    def build_hostdev(self, config: Mapping[str, str]) -> Element:
        """Return the element for the source address."""
        hostdev = Element(
            "hostdev",
            {"mode": "subsystem", "type": "pci", "managed": "yes" if self.managed else "no"},
        )
        source = SubElement(hostdev, "source")
        # libvirt reads digits without the prefix 0x as a decimal number.
        address = {
            "domain": f"0x{config['domain']}",
            "bus": f"0x{config['bus']}",
            "slot": f"0x{config['device']}",
            "function": f"0x{config['function']}",
        }
        SubElement(source, "address", address)
        return hostdev


class VfioPlugin(PciPlugin):
    """Renders a PCI function that keeps its driver, such as a vGPU without mediated device.

    With ``managed="yes"`` libvirt would bind it to vfio-pci, and a vGPU would end. libvirt accepts
    a driver other than vfio-pci if the function has the folder ``vfio-dev`` in sysfs
    (``virPCIDeviceGetCurrentDriverNameAndType`` in ``src/util/virpci.c`` of libvirt); releases
    without this check refuse it.
    """

    managed = False


class PciTestPlugin(PciPlugin):
    """Renders a function that the driver ``fake`` invents, for tests of code that composes guests.

    ``get_config`` returns the invented address, which a real device may have. The element has the
    address in a PCI domain that no machine has, so that its attachment fails.
    """

    managed = False

    def build_hostdev(self, config: Mapping[str, str]) -> Element:
        """Return the element for the source address, in the domain plus 0x80000000."""
        domain = int(config["domain"], 16) | _FIRST_ABSENT_DOMAIN
        return super().build_hostdev({**config, "domain": f"{domain:08x}"})


_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PARENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")


class MdevPlugin(Plugin):
    """Renders a mediated device, which exists before it is attached."""

    def get_config(self, arq: BoundArq) -> dict[str, str]:
        """Return ``mdev_uuid``, ``asked_type`` and ``parent``, a PCI address or a sysfs name."""
        if "parent" in arq.info:
            # A driver of the kernel without a device, such as the sample mtty.
            parent = check_info(arq, "parent", _PARENT, "the name of a parent in sysfs")
        else:
            parent = str(parse_address(arq))
        asked_type = check_info(arq, "asked_type", _TYPE, "the name of an mdev type")
        # The uuid of the handle is that of the mediated device: see core.naming.handle_uuid.
        mdev_uuid = parse_uuid(arq.handle_uuid, "attach_handle_uuid")
        return {"mdev_uuid": mdev_uuid, "asked_type": asked_type, "parent": parent}

    def build_hostdev(self, config: Mapping[str, str]) -> Element:
        """Return the element for the uuid of the mediated device."""
        hostdev = Element(
            "hostdev",
            # The agent creates and removes the mediated device; libvirt does neither.
            {"mode": "subsystem", "type": "mdev", "managed": "no", "model": "vfio-pci"},
        )
        SubElement(SubElement(hostdev, "source"), "address", {"uuid": config["mdev_uuid"]})
        return hostdev
