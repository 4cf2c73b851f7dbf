# SPDX-License-Identifier: Apache-2.0
"""Driver for FPGA cards: discovery of their regions, and programming with images.

Cards are offered as by the generic driver, but only cards in ``cards.FAMILIES`` and cards whose
rule has ``type=FPGA``. A card has one deployable for each region that has its own handles. An image
is loaded when an operator programs the deployable, or when a handle is prepared for a device
profile with ``accel:bitstream_id`` or ``accel:function_id``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cyborg.core.drivers.registry import Option, Support
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.inventory import device as inventory
from cyborg.core.inventory.device_state import Measurement, combine
from cyborg.core.jobs.job import WorkItem
from cyborg.core.log import get_logger
from cyborg.core.naming import make_custom_name
from cyborg.core.validation import parse_uuid
from cyborg.drivers.base import in_range, one_of
from cyborg.drivers.fpga import cards, images
from cyborg.drivers.fpga.loader import ImageLoader, RecordStore, parse_address
from cyborg.drivers.host_use import domains
from cyborg.drivers.pci import rules
from cyborg.drivers.pci.driver import PciDriver
from cyborg.drivers.pci.offers import Description
from cyborg.drivers.sysfs import PciFunction, canonical_address

LOG = get_logger(__name__)

RESOURCE_CLASS = "FPGA"


class FpgaDriver(PciDriver):
    """Driver that offers FPGA cards and loads images into their regions."""

    name = "fpga"
    version = "1.0"
    DEVICE_TYPE = inventory.DeviceType.FPGA
    SUPPORT_LEVEL = Support.SUPPORTED
    # The regions of a card appear after its PCI function: classes of fpga-mgr.c and fpga-region.c,
    # and the bus of dfl.c, in drivers/fpga of Linux.
    UEVENT_SUBSYSTEMS = PciDriver.UEVENT_SUBSYSTEMS | {"fpga_manager", "fpga_region", "dfl"}
    OPTIONS = (
        *PciDriver.OPTIONS,
        Option(
            "programmer",
            "str",
            cards.ProgrammerName.AUTO.value,
            "How images are loaded: firmware (attribute of the FPGA manager, in kernels of "
            "vendors), dfl (ioctl of the kernel, for Intel cards), fpgasupdate or fpgaconf (OPAE), "
            "xbmgmt or xbutil (XRT, for Alveo cards), none, or auto, which is the one of the "
            "family of a card.",
        ),
        Option(
            "program_timeout",
            "float",
            300.0,
            "Seconds after which a tool that loads an image is killed, 10 to 3600. The kernel "
            "limits the other ways.",
        ),
    )

    def initialize(self) -> None:
        """Read the options of this driver, and create its readers."""
        # Functions return memory and images, because the agent sets both later.
        self._records = RecordStore(lambda: self.memory)
        self._loader = ImageLoader(
            self._sysfs,
            lambda: self.images,
            self._records,
            self._access,
            self.parse_option("programmer", one_of(cards.ProgrammerName)),
            self.parse_option("program_timeout", in_range(10, 3600, " seconds")),
        )
        # The regions that were read last, by address and product: the kernel has none of a card
        # that is bound to vfio-pci for a server.
        self._known: dict[tuple[str, str], cards.CardRegions] = {}
        self._functions: dict[str, PciFunction] = {}

    @property
    def abilities(self) -> frozenset[inventory.Ability]:
        """Return the abilities; they include PREPARES and PROGRAMS."""
        return super().abilities | {inventory.Ability.PREPARES, inventory.Ability.PROGRAMS}

    def is_candidate(self, function: PciFunction) -> bool:
        """Return whether a PCI function is a known FPGA card, or its rule has ``type=FPGA``."""
        if cards.find_family(function.vendor, function.product) is not None:
            return True
        rule = rules.matching_rule(self._rules, function)
        return rule is not None and rule.type is inventory.DeviceType.FPGA

    def default_type_and_class(self, function: PciFunction) -> tuple[inventory.DeviceType, str]:
        """Return the default type and resource class of a PCI function; a rule overrides them."""
        return inventory.DeviceType.FPGA, RESOURCE_CLASS

    def find_used(self, functions: Mapping[str, PciFunction]) -> dict[str, str]:
        """Read the regions, and return the PCI functions that the host uses, with the reasons."""
        self._functions = dict(functions)
        regions = cards.read_regions(self._sysfs, functions.values())
        present = {(function.address, function.product) for function in functions.values()}
        self._known = {
            key: card_regions for key, card_regions in self._known.items() if key in present
        }
        for address, card_regions in regions.items():
            if address in functions:
                self._known[address, functions[address].product] = card_regions
        return super().find_used(functions)

    def describe(self, card: PciFunction) -> Description:
        """Return the family of a card, its static region and its management function."""
        family = cards.find_family(card.vendor, card.product)
        known = self._known.get((card.address, card.product), cards.CardRegions())
        info = {key: value[: inventory.MAX_TEXT] for key, value in known.info.items()}
        if known.regions:
            info["regions"] = str(len(known.regions))
        traits: set[str] = set()
        if family is not None:
            info["family"] = family.name
            traits.add(make_custom_name(f"FPGA_{family.name}"))
        if (management := cards.find_management(card, self._functions)) is not None:
            info["management_function"] = management
        return Description(info=info, traits=frozenset(traits))

    def discover(self) -> Sequence[inventory.Device]:
        """Return the cards, with a deployable for each region that has its own handles."""
        return [self._with_regions(card) for card in super().discover()]

    def measure(self, devices: Sequence[inventory.Device]) -> Mapping[str, Measurement]:
        """Return the health of the cards by address.

        A card is unhealthy if an FPGA manager of it shows an error or a port of it is in reset.
        """
        measurements = dict(super().measure(devices))
        regions = cards.read_regions(self._sysfs, self._functions.values())
        for address, former in list(measurements.items()):
            measured = [former]
            for region in regions.get(address, cards.CardRegions()).regions:
                reasons = [] if region.obstacle is None else [region.obstacle]
                state = self._loader.manager_state(region)
                if state is not None and state.endswith("error"):
                    reasons.append(f"the FPGA manager {region.manager} is in the state {state!r}")
                if reasons:
                    measured.append(Measurement(inventory.Health.UNHEALTHY, "; ".join(reasons)))
            measurements[address] = combine(measured)
        return measurements

    def prepare(self, item: WorkItem, instance: str | None) -> None:
        """Check that the host does not use a handle, and load the image of the device profile.

        ``accel:bitstream_id`` is the uuid of an image. With ``accel:function_id`` the driver
        searches for the image with this property and, if the region shows an interface id, with the
        property ``accel:region_id`` of the region.
        """
        self.check_unused(item.handle)
        bitstream, function = item.accel.get("bitstream_id"), item.accel.get("function_id")
        if bitstream is not None and function is not None:
            raise DriverFailed("the device profile has both accel:bitstream_id and function_id")
        if bitstream is not None:
            self._load(item, _parse_image(bitstream))
        elif function is not None:
            if (function_id := images.parse_id(function)) is None:
                raise DriverFailed(f"accel:function_id {function!r:.100} is not a function id")
            self._load(item, image=None, function_id=function_id)
        offered = self._sysfs.pci_function(parse_address(item.handle))
        # A server with a virtual function cannot load images: the records stay trusted.
        if offered is None or offered.physfn is None:
            self._change_records(self._records.mark_given, parse_address(item.device))

    def release(self, item: WorkItem) -> None:
        """Forget the recorded images of a card that a server used as a whole."""
        # Records without the mark stay: a server with a virtual function cannot load images, and
        # after a failed preparation no server had the card.
        if (card := canonical_address(item.device)) is None:
            return  # something that was never prepared
        # The server can have loaded other images.
        self._change_records(self._records.forget_given, card)

    def program(self, item: WorkItem, image: str) -> None:
        """Load an image into the region of a deployable, unless the region has the image."""
        domains.check_unused(self._sysfs, self.read_domains, parse_address(item.device))
        self._load(item, _parse_image(image))

    def _load(self, item: WorkItem, image: str | None, function_id: str | None = None) -> None:
        loaded = self._loader.load(item.device, item.deployable, image, function_id)
        if loaded is not None:
            LOG.info("Image %s was loaded", loaded, backend=self.backend, device=item.device)

    def _change_records(self, change: Callable[[str], None], card: str) -> None:
        try:
            change(card)
        except OSError as exc:
            raise DriverFailed(
                f"the record of the images of {card} cannot be written: {exc.strerror}"
            ) from exc

    def _with_regions(self, card: inventory.Device) -> inventory.Device:
        """Return a card with a deployable, its traits and its image for each region."""
        function = self._functions.get(card.address)
        if function is None or not card.deployables:
            return card
        known = self._known.get((card.address, function.product))
        regions = cards.list_regions(self._sysfs, function, known)
        parts = cards.split(self._sysfs, card, function, len(regions))
        # It is not known which function uses which region: the card stays one deployable.
        if not parts:
            return card
        return replace(
            card,
            deployables=tuple(
                self._with_region(card.address, number, regions[number], deployable)
                for number, deployable in parts
            ),
        )

    def _with_region(
        self, card: str, number: int, region: cards.Region, deployable: inventory.Deployable
    ) -> inventory.Deployable:
        """Add the ids of a region to its deployable, and the image if it is known."""
        ids = {"REGION": region.interface_id, "FUNCTION": region.function_id}
        record = self._loader.trusted_record(card, number, region)
        if record is not None and ids["FUNCTION"] is None:
            ids["FUNCTION"] = record.function_id
        traits = {make_custom_name(f"FPGA_{kind}_{value}") for kind, value in ids.items() if value}
        attributes = {
            "region_id": region.interface_id,
            "function_id": ids["FUNCTION"],
            "fpga_region": region.name or None,
            "fpga_manager": region.manager,
        }
        return replace(
            deployable,
            traits=deployable.traits | traits,
            attributes={
                **deployable.attributes,
                **{key: value for key, value in attributes.items() if value},
            },
            bitstream_id=None if record is None else record.image,
        )


def _parse_image(text: str) -> str:
    try:
        return parse_uuid(text, "image")
    except Invalid as exc:
        raise DriverFailed(exc.message) from exc
