# SPDX-License-Identifier: Apache-2.0
"""The option ``physical_networks``: which network card is connected to which network.

The option uses Neutron's names of physical networks. The trait ``CUSTOM_PHYSNET_<NAME>`` is the
same that Neutron uses for ports with guaranteed bandwidth (``neutron_lib/placement/utils.py``,
``physnet_trait``).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from cyborg.core.address import PciAddress
from cyborg.core.errors import Invalid
from cyborg.core.naming import make_custom_name

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

    @property
    def is_address(self) -> bool:
        """Return whether ``card`` is a PCI address, not a network interface."""
        return ":" in self.card

    def __str__(self) -> str:
        return f"{self.network}:{self.card}"


def parse_networks(texts: Iterable[str]) -> tuple[Connection, ...]:
    """Parse the entries of the option. Raise Invalid with the wrong entry as its message."""
    found: dict[str, Connection] = {}
    traits: dict[str, str] = {}
    for text in texts:
        connection = _parse_entry(text)
        trait = trait_of_network(connection.network)
        if connection.card in found or traits.setdefault(trait, connection.network) != (
            connection.network
        ):
            raise Invalid(text, field="physical_networks")
        found[connection.card] = connection
    return tuple(found.values())


def trait_of_network(network: str) -> str:
    """Return the trait of cards of a physical network."""
    return make_custom_name(f"PHYSNET_{network}")


def _parse_entry(text: str) -> Connection:
    network, _, card = text.partition(":")
    if not _NETWORK.fullmatch(network) or not re.search(r"[A-Za-z0-9]", network):
        raise Invalid(text, field="physical_networks")
    if ":" in card:
        try:
            card = str(PciAddress.parse(card))
        except Invalid:
            raise Invalid(text, field="physical_networks") from None
    elif not _INTERFACE.fullmatch(card) or card in (".", ".."):
        raise Invalid(text, field="physical_networks")
    return Connection(network, card)
