# SPDX-License-Identifier: Apache-2.0
"""Driver for crypto accelerators: Intel QAT, virtio-crypto and AMD CCP.

It discovers like the generic driver, but only PCI functions whose ids are in ``kernel.crypto``. It
adds the algorithms that each accelerator can compute, and does not offer accelerators that the
host's kernel uses. Each set of services of a QAT device of the fourth generation is a layout.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from cyborg.core.drivers.registry import Support
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory import device as inventory
from cyborg.core.inventory.device_state import Measurement, combine
from cyborg.core.jobs.job import WorkItem
from cyborg.core.log import get_logger
from cyborg.drivers.crypto import algorithms
from cyborg.drivers.host_use import domains
from cyborg.drivers.kernel import crypto
from cyborg.drivers.pci.driver import PciDriver
from cyborg.drivers.pci.offers import Description
from cyborg.drivers.sysfs import PCI_DEVICES, PciFunction, canonical_address

LOG = get_logger(__name__)

RESOURCE_CLASS = "CUSTOM_CRYPTO"

# Name of the only layout of a device whose services cannot be changed.
FIXED = "fixed"

# Seconds without a use by the kernel until a device is deliverable again.
# Any user of the host can start and end a use, by a socket of the family AF_ALG.
KERNEL_USE_HOLD = 300.0

_DOWN = Measurement(inventory.Health.UNHEALTHY, "the QAT device is stopped: qat/state is down")
# Documentation/ABI/testing/sysfs-driver-ccp of Linux.
_CCP_ATTRIBUTES = (
    *("fused_part", "debug_lock_on", "tsme_status", "anti_rollback_status"),
    *("rpmc_production_enabled", "rpmc_spirom_available", "hsp_tpm_available"),
    *("rom_armor_enforced", "bootloader_version", "tee_version"),
)


class CryptoDriver(PciDriver):
    """Driver that offers crypto accelerators and their virtual functions."""

    name = "crypto"
    version = "1.0"
    SUPPORT_LEVEL = Support.SUPPORTED
    # The algorithms of a virtio device appear after its PCI function.
    UEVENT_SUBSYSTEMS = PciDriver.UEVENT_SUBSYSTEMS | {"virtio"}

    def initialize(self) -> None:
        """Set what the driver remembers between discoveries."""
        self._algorithms: tuple[algorithms.Algorithm, ...] = ()
        # Cards with a function that the host's kernel can use, at the last discovery.
        self._served_cards: frozenset[str] = frozenset()
        # What was read last, by address and product id: the kernel lists algorithms and has the
        # attributes of a device only while it has the device itself, and not while a server has it.
        self._trees: dict[tuple[str, str], algorithms.Tree] = {}
        self._configured: dict[tuple[str, str], tuple[str, ...]] = {}
        self._last_uses: dict[str, float] = {}  # by the kernel; by the module of a family
        self._kernel_used: dict[str, str] = {}  # reasons by function, at the last discovery
        self._changing: set[str] = set()  # devices that are stopped to change their services

    @property
    def abilities(self) -> frozenset[inventory.Ability]:
        """Return the abilities; they include PARTITIONS, to change the services of QAT devices."""
        return super().abilities | {inventory.Ability.PARTITIONS}

    def is_candidate(self, function: PciFunction) -> bool:
        """Return whether a PCI function is a known crypto accelerator."""
        return crypto.family_of(function) is not None

    def default_type_and_class(self, function: PciFunction) -> tuple[inventory.DeviceType, str]:
        """Return the type of the family, and one resource class for all families."""
        family = crypto.family_of(function)
        return inventory.DeviceType.CRYPTO if family is None else family.type, RESOURCE_CLASS

    def find_used(self, functions: Mapping[str, PciFunction]) -> dict[str, str]:
        """Return the PCI functions that the host uses; see ``host_use.check``.

        Accelerators with which the kernel computes are not included; ``discover`` marks them as not
        deliverable. For it, read the algorithms of the kernel, and forget what is known of
        functions that are not present.
        """
        self._algorithms = algorithms.read_algorithms(self.sysfs_root.parent / "proc")
        served = [function for function in functions.values() if self._is_served(function)]
        self._served_cards = frozenset(f.physfn or f.address for f in served)
        present = {(function.address, function.product) for function in functions.values()}
        self._trees = {key: tree for key, tree in self._trees.items() if key in present}
        self._configured = {k: value for k, value in self._configured.items() if k in present}
        # Not a use: the kernel's computation begins and ends with each program, with which a
        # provider must not come and go.
        self._kernel_used = self._find_kernel_used(served)
        return super().find_used(functions)

    def check_adoption(self, addresses: Sequence[str], forced: Collection[str] = ()) -> None:
        """Raise DriverFailed also for an accelerator with which the kernel computes."""
        super().check_adoption(addresses, forced)
        for address in addresses:
            if (reason := self._kernel_used.get(address)) is not None:
                raise DriverFailed(f"{address} cannot be adopted: {reason}")

    def discover(self) -> Sequence[inventory.Device]:
        """Return the devices; a device with which the kernel computes is not deliverable.

        If the kernel computes with one virtual function of a card, the whole card is not.
        """
        # Such a device keeps its deployables, so that its provider stays.
        return [self._with_kernel_use(device) for device in super().discover()]

    def describe(self, card: PciFunction) -> Description:
        """Return what an accelerator can compute, and its attributes in sysfs.

        Services and algorithms that cannot be read now are those of the last time that they could.
        """
        # ``Documentation/ABI/testing/sysfs-driver-qat`` of Linux describes those of QAT.
        folder = PCI_DEVICES / card.address
        names = {"services": "qat/cfg_services", "ring_pairs": "qat/num_rps"}
        names |= {name: name for name in _CCP_ATTRIBUTES}
        values = {key: self._sysfs.read_text(folder / path) for key, path in names.items()}
        info = {key: value[: inventory.MAX_TEXT] for key, value in values.items() if value}
        key = card.address, card.product
        if services := crypto.parse_services(values["services"]):
            self._configured[key] = services
        configured, tree = self._configured.get(key), self._known_algorithms(card)
        if configured is None:
            return Description(info=info, tree=tree)
        # A service whose algorithms are unknown is shown without them.
        return Description(
            info=info,
            tree={name: tree.get(name, 1) for name in crypto.service_functions(configured)},
            traits=frozenset({crypto.services_trait(crypto.join_services(configured))}),
        )

    def measure(self, devices: Sequence[inventory.Device]) -> Mapping[str, Measurement]:
        """Return the health of the devices that are present; a stopped QAT device is unhealthy.

        A device whose services are being changed keeps its last measurement.
        """
        # A device has no attribute ``qat/state`` while it is bound to another kernel driver, such
        # as vfio-pci.
        changing = frozenset(self._changing)  # a change may end while the devices are measured
        measurements = dict(super().measure(devices))
        for address, measurement in measurements.items():
            if self._sysfs.read_text(PCI_DEVICES / address / "qat/state") == "down":
                measurements[address] = combine([_DOWN, measurement])
        changing |= self._changing
        return {a: measured for a, measured in measurements.items() if a not in changing}

    def layouts(self, device: inventory.Device) -> Sequence[inventory.Layout]:
        """Return a layout for each set of services of a QAT device; ``fixed`` for other devices.

        The current layout is the layout that the last discovery found. All layouts of a device
        have the same handles: only the services differ.
        """
        offers = inventory.count_handles(device)
        key = device.address, device.std_board_info.get("product_id", "")
        current = self._configured.get(key, ())
        if not current:
            return [inventory.Layout(FIXED, offers)]
        names = dict.fromkeys([*crypto.QAT_LAYOUTS, crypto.join_services(current)])
        return [
            inventory.Layout(name, offers, frozenset({crypto.services_trait(name)}))
            for name in names
        ]

    def partition(self, item: WorkItem, layout: str) -> None:
        """Change the services of a QAT device; see ``privileged.qat.set_services``."""
        if (address := canonical_address(item.device)) is None:
            raise DriverFailed(f"there is no device {item.device}")
        current = self._services(address)
        if layout == (crypto.join_services(current) if current else FIXED):
            return
        if not current:
            raise DriverFailed(
                f"the services of {address} cannot be changed: it has no readable attribute "
                "qat/cfg_services"
            )
        if layout not in crypto.QAT_LAYOUTS:
            names = ", ".join(crypto.QAT_LAYOUTS)
            raise DriverFailed(f"{address} has no layout {layout!r}: expected one of {names}")
        domains.check_unused(self._sysfs, self.read_domains, address)
        self._changing.add(address)
        try:
            self._access.set_services(address, layout)
        finally:
            self._changing.discard(address)
        LOG.info("Services changed to %s", layout, backend=self.backend, device=address)

    def _services(self, address: str) -> tuple[str, ...]:
        return crypto.parse_services(
            self._sysfs.read_text(PCI_DEVICES / address / "qat/cfg_services")
        )

    def _is_served(self, function: PciFunction) -> bool:
        """Return whether the host's kernel can compute with a PCI function."""
        family = crypto.family_of(function)
        if family is None or function.kernel_driver not in family.kernel_drivers:
            return False
        if family is not crypto.VIRTIO:
            return True
        # The driver virtio-pci has the function, virtio_crypto the device below it.
        folder = PCI_DEVICES / function.address
        return any(
            self._sysfs.read_link(folder / name / "driver") == crypto.VIRTIO.module
            for name in self._sysfs.list_names(folder)
            if name.startswith("virtio")
        )

    def _find_kernel_used(self, served: Iterable[PciFunction]) -> dict[str, str]:
        """Return a reason by address for each PCI function that the kernel uses or used lately."""
        # The kernel does not show which accelerator of a family computes. So every accelerator that
        # is bound to a driver of the family counts as used. The reasons do not change during the
        # use.
        now, reasons = self._access.clock(), dict[str, str]()
        for function in served:
            family = crypto.family_of(function)
            if family is None or (family is crypto.QAT and function.numvfs):
                continue  # with virtual functions, the physical one computes nothing itself
            if any(a.users and a.belongs_to(family) for a in self._algorithms):
                self._last_uses[family.module] = now
            last = self._last_uses.get(family.module)
            if last is not None and now - last < KERNEL_USE_HOLD:
                reasons[function.address] = (
                    f"the kernel of the host uses algorithms of {family.module}, and may compute "
                    "them with this device: let it use others, or bind the device to vfio-pci"
                )
        return reasons

    def _with_kernel_use(self, device: inventory.Device) -> inventory.Device:
        """Return a device; it is not deliverable if the kernel uses one of its handles."""
        handles = (handle for part in device.deployables for handle in part.handles)
        reason = next(
            (self._kernel_used[h.address] for h in handles if h.address in self._kernel_used), None
        )
        if reason is None or not device.deliverable:
            return device
        return replace(device, deliverable=False, undeliverable_reason=reason)

    def _known_algorithms(self, card: PciFunction) -> algorithms.Tree:
        """Return the capability tree of the algorithms that a card can compute.

        While the kernel cannot compute with the card, return the last known tree.
        """
        family, key = crypto.family_of(card), (card.address, card.product)
        if family is not None and card.address in self._served_cards:
            of_family = (a for a in self._algorithms if a.belongs_to(family))
            if tree := algorithms.build_tree(of_family):
                self._trees[key] = tree
        return self._trees.get(key, {})
