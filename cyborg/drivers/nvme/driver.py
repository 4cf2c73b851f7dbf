# SPDX-License-Identifier: Apache-2.0
"""Driver for NVMe controllers, which it erases between two servers.

It discovers like the generic driver, but only NVMe controllers. ``kernel.nvme`` chooses the method
of erasure; a rule can restrict the choice. ``privileged.nvme`` erases and verifies the erasure.

If the agent can read which methods a controller supports, one that supports no method of its rule
is not scheduled. The methods are stored in the memory of the backend, because they can be read only
while the kernel's nvme driver is bound.

Sources in Linux: ``drivers/nvme/host/sysfs.c`` (``state``, ``serial``, ``model``, ``firmware_rev``)
and ``Documentation/ABI/stable/sysfs-block`` (``queue/rotational``).

With ``class_by_capacity`` the resource class depends on medium and capacity. The kernel shows both
only while its nvme driver is bound, and not while a server uses the controller. So the class is
stored in the memory of the backend.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cyborg.core.drivers.registry import Option, Support
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import MAX_TEXT, Ability, Device, DeviceType
from cyborg.core.jobs.job import WorkItem
from cyborg.core.log import get_logger
from cyborg.core.naming import make_custom_name
from cyborg.drivers.base import in_range
from cyborg.drivers.host_use import domains
from cyborg.drivers.kernel import nvme
from cyborg.drivers.pci import reset
from cyborg.drivers.pci.driver import PciDriver
from cyborg.drivers.pci.offers import Description
from cyborg.drivers.sysfs import PCI_DEVICES, PciFunction, canonical_address

LOG = get_logger(__name__)

# Class code of an NVMe I/O controller; ``pci.classes`` names the specification.
CLASS = "010802"

_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("B", 1.0))
_UNKNOWN = (
    "its capacity is unknown, and so is its resource class: bind it to the kernel driver nvme "
    "until it is discovered, or set resource_class in a rule"
)
_ERASE_HELP = (
    "The key erase is a list of the methods that may erase a released device, the preferred one "
    "first, such as erase=purge: purge (sanitize, or format with crypto erase), clear (also format "
    "with user data erase), sanitize, crypto, block, overwrite. Without it the strongest method is "
    "used. A device that supports none of them is not scheduled, or stays unavailable after its "
    "first use."
)
# Bytes; the unit of "size" in /sys/class/block, whatever the block size is: part_size_show of
# block/genhd.c and SECTOR_SIZE of include/linux/blk_types.h of Linux.
_SECTOR = 512


def _with_erase(option: Option) -> Option:
    if option.name != "devices":
        return option
    return replace(option, help=f"{option.help} {_ERASE_HELP}")


class NvmeDriver(PciDriver):
    """Driver that offers NVMe controllers and their virtual functions, and erases them."""

    name = "nvme"
    version = "1.0"
    DEVICE_TYPE = DeviceType.SSD
    SUPPORT_LEVEL = Support.SUPPORTED
    # The serial number appears with the controller, the capacity with its namespaces: a real drive
    # needs seconds after its PCI function was bound. ``block`` has uevents of all other disks too.
    UEVENT_SUBSYSTEMS = PciDriver.UEVENT_SUBSYSTEMS | {"nvme", "nvme-generic"}
    RULE_KEYS = (*PciDriver.RULE_KEYS, nvme.ERASE)
    OPTIONS = (
        # An erasure is more than a reset.
        *(_with_erase(option) for option in PciDriver.OPTIONS if option is not reset.OPTION),
        Option(
            "erase_timeout",
            "float",
            3600.0,
            "Seconds until the erasure of a controller fails. Overwriting a large drive takes "
            "hours; a cryptographic erasure takes seconds.",
        ),
        Option(
            "class_by_capacity",
            "bool",
            False,
            "Whether the resource class of a controller for which no rule sets one follows from "
            "its medium and capacity, such as CUSTOM_NVME_SSD_1_92TB. Virtual functions keep the "
            "class CUSTOM_NVME.",
        ),
    )

    def initialize(self) -> None:
        """Read the options of this driver, and create its readers."""
        self._erase_timeout = self.parse_option("erase_timeout", in_range(30, 86400))
        # Resource classes by address: as the last discovery read them, and as this one reports.
        self._shown: dict[str, str | None] = {}
        self._classes: dict[str, str | None] = {}

    @property
    def abilities(self) -> frozenset[Ability]:
        """Return the abilities, always with SANITISES: a released controller is erased."""
        return super().abilities | {Ability.SANITISES}

    def sanitise(self, item: WorkItem) -> None:
        """Erase the controller of a handle; see ``privileged.nvme.erase``."""
        if (address := canonical_address(item.handle or item.device)) is None:
            return  # no controller ever had this address
        function = self._sysfs.pci_function(address)
        if function is None:
            # The contract lets a missing handle succeed. The data of a virtual function is on the
            # drive, and may come back with it.
            if address != item.device and self._sysfs.pci_function(item.device) is not None:
                raise DriverFailed(
                    f"{address} does not exist now, but its data are still on {item.device}: "
                    f"enable the virtual functions of {item.device}"
                )
            return
        policies = self._policies(function)
        methods = [method.value for method in nvme.permitted_methods(policies)]
        domains.check_unused(self._sysfs, self.read_domains, address)
        result = self._access.erase(address, self._erase_timeout, methods)
        if result["method"] is None:
            return  # the controller disappeared a moment ago
        LOG.info(
            "Erased %s namespaces by %s (%s), verified: %s samples of the old data are gone",
            result["namespaces"],
            result["method"],
            f"policy {nvme.ERASE}={'|'.join(policies)}" if policies else "no policy",
            result["samples"],
            backend=self.backend,
            device=item.device,
        )

    def is_candidate(self, function: PciFunction) -> bool:
        """Return whether a PCI function is an NVMe controller."""
        return function.class_code == CLASS

    def discover(self) -> Sequence[Device]:
        """Return the controllers; those without a resource class cannot be attached to a server."""
        self._classes = {}
        devices = super().discover()
        self._shown = {address: self._shown[address] for address in self._classes}
        return devices

    def default_type_and_class(self, function: PciFunction) -> tuple[DeviceType, str]:
        """Return the type and resource class of a controller.

        With ``class_by_capacity`` the class depends on the capacity, if the capacity is known.
        """
        type_, plain = super().default_type_and_class(function)
        if not self.options["class_by_capacity"] or function.physfn is not None:
            return type_, plain
        # Once a discovery: a second reading may find another state.
        if function.address not in self._classes:
            self._classes[function.address] = self._find_class(function)
        return type_, self._classes[function.address] or plain

    def find_obstacle(self, function: PciFunction) -> str | None:
        """Return why a controller is not scheduled, for example because its class is not known yet.

        Return None if the controller is scheduled.
        """
        rule = self.select(function)
        address = function.address
        # Without ``class_by_capacity``, and for virtual functions, there is no entry.
        is_class_unknown = address in self._classes and self._classes[address] is None
        if is_class_unknown and (rule is None or rule.resource_class is None):
            return _UNKNOWN
        return self._find_mismatch(function) or super().find_obstacle(function)

    def _policies(self, function: PciFunction) -> Sequence[nvme.ErasePolicy]:
        """Return the policies of the rule for a controller; an empty list permits each method."""
        # Without a rule there are none: an operator adopted the device or removed its rule.
        rule = self.select(function)
        return () if rule is None else rule.erase

    def _find_mismatch(self, function: PciFunction) -> str | None:
        """Return why no method of the rule can erase a controller, None if one can or may."""
        policies = self._policies(function)
        # A controller that the host uses is not offered, with that use as its reason.
        if not policies or function.address in self._used:
            return None
        supported = self._find_supported(function)
        return nvme.find_mismatch(
            nvme.permitted_methods(policies),
            tuple(nvme.Method) if supported is None else supported,
            # Sanitize erases the whole drive: never for a virtual function.
            exclusive=function.physfn is None,
        )

    def _find_supported(self, function: PciFunction) -> Sequence[nvme.Method] | None:
        """Return the methods that a controller supports; None if they are unknown."""
        # They are read once for each drive and firmware, and else taken from the memory. Its text
        # has three lines: the model of the function, what the drive shows of itself, the methods.
        key = f"methods {function.address}"
        model = _model_of(function)
        lines = (self.memory.get(key) or "").split("\n")
        known_model, known_drive, texts = lines if len(lines) == 3 else ("", "", "")
        known_methods = [method for method in nvme.Method if method.value in texts.split(";")]
        controller, _ = self._read_namespaces(function.address)
        if self._sysfs.read_text(controller / "state") != "live":
            # A server has it, or no driver: only the model of its slot can be compared.
            return known_methods if known_model == model else None
        names = ("serial", "model", "firmware_rev")
        drive = " ".join(self._sysfs.read_text(controller / name) or "?" for name in names)
        if (known_model, known_drive) == (model, drive):
            return known_methods
        node = Path("/dev") / controller.name
        methods = self._access.read_methods(node, self._sysfs.read_text(controller / "dev"))
        text = None if methods is None else f"{model}\n{drive}\n{';'.join(methods)}"
        self.memory.put(key, text)
        return methods

    def _find_class(self, function: PciFunction) -> str | None:
        """Return the resource class of a controller to report; None if it is unknown."""
        stored = self._stored_class(function)
        class_now = self._read_class(function.address)
        is_confirmed = class_now == self._shown.get(function.address)
        self._shown[function.address] = class_now
        if class_now is None:
            return stored
        # A class that differs from the stored one is reported only after two discoveries have found
        # it: the kernel shows the namespaces of a controller one after another.
        is_change = stored is not None and class_now != stored
        if is_change and not is_confirmed:
            return stored
        self.memory.put(_class_key(function), f"{_model_of(function)} {class_now}")
        return class_now

    def _stored_class(self, function: PciFunction) -> str | None:
        """Return the class that an earlier discovery stored; None if its slot had another model."""
        model, _, stored = (self.memory.get(_class_key(function)) or "").partition(" ")
        return (stored or None) if model == _model_of(function) else None

    def _read_class(self, address: str) -> str | None:
        """Return the resource class for the capacity of the namespaces; None if none is visible."""
        controller, namespaces = self._read_namespaces(address)
        if not namespaces or self._sysfs.read_text(controller / "state") != "live":
            return None
        media = {self._sysfs.read_text(controller / n / "queue/rotational") for n in namespaces}
        return resource_class_of(sum(namespaces.values()), rotational="1" in media)

    def _read_namespaces(self, address: str) -> tuple[Path, dict[str, int]]:
        """Return the sysfs folder of a controller, and its namespaces: the bytes by name.

        Namespaces without a capacity are omitted.
        """
        folder = PCI_DEVICES / address / "nvme"
        names = self._sysfs.list_names(folder)
        controller = folder / names[0] if names else folder
        sizes = {
            name: self._sysfs.read_int(controller / name / "size")
            for name in self._sysfs.list_names(controller)
            if name.startswith("nvme")
        }
        return controller, {name: size * _SECTOR for name, size in sizes.items() if size}

    def describe(self, card: PciFunction) -> Description:
        """Return model, firmware, serial and capacity while the kernel's nvme driver is bound."""
        controller, namespaces = self._read_namespaces(card.address)
        capacity = sum(namespaces.values())
        info = {
            "model_number": self._sysfs.read_text(controller / "model"),
            "firmware": self._sysfs.read_text(controller / "firmware_rev"),
            "capacity_bytes": str(capacity) if capacity else None,
        }
        return Description(
            firmware=info["firmware"],
            serial=self._sysfs.read_text(controller / "serial"),
            info={key: value[:MAX_TEXT] for key, value in info.items() if value},
        )


def _class_key(function: PciFunction) -> str:
    """Return the key of a controller's class in the memory of the backend."""
    return f"class {function.address}"


def _model_of(function: PciFunction) -> str:
    return f"{function.vendor}:{function.product}"


def resource_class_of(capacity: int, *, rotational: bool) -> str:
    """Return the resource class of a number of bytes, such as ``CUSTOM_NVME_SSD_1_92TB``."""
    # Three significant digits, in decimal units: drives of the same nominal capacity differ in the
    # other digits.
    rounded = float(f"{capacity:.3g}")
    unit, size = next((u, s) for u, s in _UNITS if rounded >= s or s == 1.0)
    medium = "HDD" if rotational else "SSD"
    return make_custom_name(f"NVME_{medium}_{rounded / size:g}{unit}")
