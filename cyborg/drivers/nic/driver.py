# SPDX-License-Identifier: Apache-2.0
"""Driver for network cards: their virtual functions for Neutron ports, and whole cards.

It discovers like the generic driver, but only network controllers. For Neutron ports with a device
profile it adds the physical network to each handle, which Nova copies into the binding of the port,
and a trait of the network, which a device profile can require. A card that the host uses is not
offered as a whole, but its virtual functions are offered.

The option ``physical_networks`` uses Neutron's names of physical networks. The trait
``CUSTOM_PHYSNET_<NAME>`` is the same that Neutron uses for ports with guaranteed bandwidth
(``neutron_lib/placement/utils.py``, ``physnet_trait``).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cyborg.core.drivers.registry import Option, Support
from cyborg.core.inventory.device import MAX_TEXT, Ability, Device, DeviceType, Health
from cyborg.core.inventory.device_state import HEALTHY, Measurement, combine
from cyborg.core.naming import make_custom_name
from cyborg.drivers.base import InvalidOption
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.kernel import interfaces
from cyborg.drivers.pci.offers import Description
from cyborg.drivers.sysfs import PciFunction, canonical_address

NETWORKS_EXPECTED = (
    "NETWORK:ADDRESS or NETWORK:INTERFACE, such as physnet1:0000:3b:00.0 or physnet2:ens1f1, each "
    "card once"
)
# Neutron allows 64 characters (PHYSICAL_NETWORK_MAX_LEN of provider_net.py of neutron-lib); a comma
# and a colon separate the entries and their parts here.
_NETWORK = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# IFNAMSIZ of <linux/if.h> with the end of the text is 16; "/", ":" and white space are not allowed
# (dev_valid_name of net/core/dev.c of Linux).
_INTERFACE = re.compile(r"[A-Za-z0-9_.-]{1,15}")


@dataclass(frozen=True, slots=True)
class Connection:
    """A physical network and its card: the address of a physical function, or an interface."""

    network: str
    card: str

    def __str__(self) -> str:
        return f"{self.network}:{self.card}"


def parse_networks(texts: Iterable[str]) -> tuple[Connection, ...]:
    """Parse the entries of the option. Raise InvalidOption with the wrong entry."""
    connections: dict[str, Connection] = {}  # by card
    networks: dict[str, str] = {}  # by trait
    for text in texts:
        connection = _parse_entry(text)
        trait = trait_of_network(connection.network)
        # Two networks of one trait could not be told apart in a profile.
        network = networks.setdefault(trait, connection.network)
        if connection.card in connections or network != connection.network:
            raise InvalidOption(text, NETWORKS_EXPECTED)
        connections[connection.card] = connection
    return tuple(connections.values())


def trait_of_network(network: str) -> str:
    """Return the trait of cards of a physical network."""
    return make_custom_name(f"PHYSNET_{network}")


def _parse_entry(text: str) -> Connection:
    network, _, card = text.partition(":")
    if not _NETWORK.fullmatch(network) or not re.search(r"[A-Za-z0-9]", network):
        raise InvalidOption(text, NETWORKS_EXPECTED)
    if ":" in card:
        if (address := canonical_address(card)) is None:
            raise InvalidOption(text, NETWORKS_EXPECTED)
        card = address
    elif not _INTERFACE.fullmatch(card) or card in (".", ".."):
        raise InvalidOption(text, NETWORKS_EXPECTED)
    return Connection(network, card)


# Base class code of network controllers; ``pci.classes`` names the specification.
CLASS = "02"

# Key of the attach handle info that Nova reads (``get_arq_pci_device_profile`` of its
# ``nova/accelerator/cyborg.py``).
PHYSICAL_NETWORK = "physical_network"

# Key of the attach handle info with the representor of a virtual function.
REPRESENTOR = "representor"

# Traits of a card that is offered as a whole, and of one that offers virtual functions.
WHOLE, VIRTUAL = (make_custom_name(f"NIC_{kind}") for kind in ("PF", "VF"))

_UP = 0x1  # IFF_UP of <linux/if.h>


class NicDriver(GenericDriver):
    """Driver that offers network cards and their virtual functions."""

    name = "nic"
    version = "1.0"
    DEVICE_TYPE = DeviceType.NIC
    SUPPORT_LEVEL = Support.SUPPORTED
    # Drivers of network cards create virtual functions while their interface is up. What removes
    # them from a server is checked for each virtual function.
    CHANGES_USED_INTERFACES: ClassVar[bool] = True
    OPTIONS = (
        *GenericDriver.OPTIONS,
        Option(
            "physical_networks",
            "list",
            (),
            "The physical networks of Neutron that cards are connected to, such as "
            "physnet1:0000:3b:00.0,physnet2:ens1f1: the name of the network, and the address of "
            "the physical function or its network interface. It applies to the virtual functions "
            "of the card too. A card without a network cannot be used for Neutron ports.",
        ),
        Option(
            "check_carrier",
            "bool",
            True,
            "Whether a card is unhealthy while its network interface is up and has no link.",
        ),
    )

    def initialize(self) -> None:
        """Read the options of this driver, and create its readers."""
        super().initialize()
        self._connections = self.parse_option("physical_networks", parse_networks)
        # What was read last, by card: a card has no interface while a server has all of it, and no
        # speed without a link.
        self._networks: dict[str, Connection] = {}
        self._info: dict[str, dict[str, str]] = {}
        self._unused: tuple[Connection, ...] = ()  # entries without a card

    @property
    def abilities(self) -> frozenset[Ability]:
        """Return the abilities, with MEASURES if the option ``check_carrier`` is set."""
        measures = {Ability.MEASURES} if self.options["check_carrier"] else set()
        return super().abilities | measures

    @property
    def remarks(self) -> Sequence[str]:
        """Return the warnings of the generic driver, and one for each network without a card."""
        unused = (
            f"physical_networks: {connection} matches no network card of this host"
            for connection in self._unused
        )
        return (*super().remarks, *unused)

    def is_candidate(self, function: PciFunction) -> bool:
        """Return whether a PCI function is a network controller."""
        return function.class_code.startswith(CLASS)

    def discover(self) -> Sequence[Device]:
        """Return the cards; record the entries of ``physical_networks`` without a card."""
        devices = super().discover()
        cards = {f.address: f for f in self._sysfs.pci_functions() if self.is_candidate(f)}
        self._networks = {a: known for a, known in self._networks.items() if a in cards}
        self._info = {a: info for a, info in self._info.items() if a in cards}
        names = {name for address in cards for name in self._names(address)}
        # An entry names a card or its interface. A card that has no interface now keeps its entry.
        used = {*cards, *names, *(connection.card for connection in self._networks.values())}
        self._unused = tuple(c for c in self._connections if c.card not in used)
        return devices

    def describe(self, card: PciFunction) -> Description:
        """Return the interface and speed of a card, and the handle info that Nova needs."""
        network = self._find_network(card.address)
        virtual = interfaces.virtual_functions(self._sysfs, card.address)
        representors = interfaces.representors(self._sysfs, card.address)
        info = {PHYSICAL_NETWORK: network} if network is not None else {}
        handle_info = {card.address: info}
        for number, address in virtual.items():
            name = representors.get(number)
            handle_info[address] = info | ({REPRESENTOR: name} if name is not None else {})
        traits = {VIRTUAL if card.numvfs else WHOLE}
        if network is not None:
            traits.add(trait_of_network(network))
        return Description(
            info=self._read_info(card, network),
            traits=frozenset(traits),
            handle_info=handle_info,
        )

    def measure(self, devices: Sequence[Device]) -> Mapping[str, Measurement]:
        """Return the health of the cards that are present; a card without a link is unhealthy."""
        measurements = dict(super().measure(devices))
        if not self.options["check_carrier"]:
            return measurements
        for address, measured in measurements.items():
            if (carrier := self._measure_carrier(address)) is not None:
                measurements[address] = combine([carrier, measured])
        return measurements

    def _names(self, address: str) -> list[str]:
        return interfaces.of_function(self._sysfs, address)

    def _find_network(self, address: str) -> str | None:
        """Return the physical network of a card, or None.

        While the card has no network interface, return its last known physical network.
        """
        names = self._names(address)
        for connection in self._connections:
            if connection.card == address or connection.card in names:
                self._networks[address] = connection
                return connection.network
        if names:
            # The interface by which its network was known is now that of another card, or gone.
            self._networks.pop(address, None)
        known = self._networks.get(address)
        return None if known is None else known.network

    def _read_info(self, card: PciFunction, network: str | None) -> dict[str, str]:
        """Return the board info of a card; keys that are unknown now have their last values."""
        # ``Documentation/ABI/testing/sysfs-class-net``: ``speed`` is in Mbit/s.
        names = self._names(card.address)
        speeds = (self._sysfs.read_int(f"class/net/{name}/speed") for name in names)
        speed = next((speed for speed in speeds if speed is not None and speed > 0), None)
        current = {
            "interface": ", ".join(names),
            "link_speed_mbps": "" if speed is None else str(speed),
            "switch_id": interfaces.switch_id(self._sysfs, card.address) or "",
        }
        info = dict(self._info.get(card.address, {}))
        info |= {key: value[:MAX_TEXT] for key, value in current.items() if value}
        if names and not current["switch_id"]:
            info.pop("switch_id", None)  # the mode switchdev ended
        self._info[card.address] = info
        return info | ({PHYSICAL_NETWORK: network} if network is not None else {})

    def _measure_carrier(self, address: str) -> Measurement | None:
        """Return unhealthy if an interface is up and has no link; None if no interface is up."""
        # ``Documentation/ABI/testing/sysfs-class-net`` describes ``flags`` and ``carrier``, which
        # cannot be read while an interface is down (``carrier_show`` of ``net/core/net-sysfs.c``).
        measured: Measurement | None = None
        for name in self._names(address):
            if not (self._sysfs.read_int(f"class/net/{name}/flags") or 0) & _UP:
                continue
            carrier = self._sysfs.read_text(f"class/net/{name}/carrier")
            if carrier == "0":
                return Measurement(Health.UNHEALTHY, f"the network interface {name} has no link")
            measured = HEALTHY if carrier == "1" else measured
        return measured
