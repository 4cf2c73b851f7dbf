# SPDX-License-Identifier: Apache-2.0
"""PCI functions whose network interfaces the host uses: routes, addresses, tunnels, links.

``/proc/net/route`` has only the main table of IPv4, and one next hop of a route. rtnetlink has all
tables, VRFs included, and all next hops, and needs no privileges
(``Documentation/userspace-api/netlink`` of the Linux kernel, rtnetlink(7), and
``include/uapi/linux/rtnetlink.h`` and ``if_link.h`` for the values below).

A tree that is not /sys has the facts as a file, without addresses: so does a capture.

Other sources in Linux: ``Documentation/ABI/testing/sysfs-class-net`` (``flags``, ``carrier``) and
``netdev_adjacent_sysfs_add`` and ``__netdev_adjacent_dev_insert`` of ``net/core/dev.c`` (the links
``upper_*`` and ``master``).
"""

import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from cyborg.core.codec import Serializable
from cyborg.core.inventory.delivery import is_vfio
from cyborg.drivers.sysfs import PciFunction, Sysfs, read_facts

# Path of the facts below the directory that contains ``sys``.
FILE = "proc/self/net/rtnetlink.json"
# Routes that are read: a router has a million, which take a minute.
MAX_ROUTES = 50_000

_UNICAST = 1  # RTN_UNICAST; the others have no interface, or are addresses of the host
_CLONED = 0x200  # RTM_F_CLONED: an entry of the cache of routes
_MAIN = 254  # RT_TABLE_MAIN
_LINK_SCOPE = 253  # RT_SCOPE_LINK and RT_SCOPE_HOST: not reachable from other networks


@dataclass(frozen=True, slots=True)
class NetworkFacts(Serializable):
    """Uses of network interfaces, by name.

    ``reasons``: how the host uses an interface, such as "has the default route". ``lower``: the
    interface through which a tunnel sends its packets, by the name of the tunnel. ``error``: why
    not all facts could be read, None if they were.
    """

    reasons: Mapping[str, str] = field(default_factory=dict)
    lower: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """A network interface; ``lower`` is the number of another one of this namespace, or None."""

    number: int
    name: str
    lower: int | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """A route: the numbers of the interfaces of its next hops, and its table."""

    interfaces: tuple[int, ...]
    table: int
    is_default: bool


def summarize(
    links: Sequence[Link], routes: Iterable[Route], addressed: Iterable[int]
) -> NetworkFacts:
    """Return the uses of the interfaces. ``addressed`` are those with an address of the host.

    The most important of several reasons is kept: a default route, then any other route, then an
    address; and the main table before others.
    """
    names = {link.number: link.name for link in links}
    uses: dict[str, _Use] = {}
    for number, use in _list_uses(routes, addressed):
        if (name := names.get(number)) is not None and name != "lo":
            uses[name] = min(uses.get(name, use), use)
    return NetworkFacts(
        reasons={name: use.reason for name, use in sorted(uses.items())},
        lower={
            link.name: names[link.lower]
            for link in links
            if link.lower is not None and link.lower != link.number and link.lower in names
        },
    )


class _Use(NamedTuple):
    """A use of an interface by the host; the least one is the most important."""

    rank: int
    table: int
    reason: str


def _list_uses(routes: Iterable[Route], addressed: Iterable[int]) -> Iterator[tuple[int, _Use]]:
    """Yield the uses of interfaces, each with the number of its interface."""
    for route in routes:
        is_main = route.table == _MAIN
        kind = "the default route" if route.is_default else "a route"
        use = _Use(
            rank=0 if route.is_default else 1,
            table=0 if is_main else route.table,
            reason=f"has {kind}" if is_main else f"has {kind} in table {route.table}",
        )
        for number in route.interfaces:
            yield number, use
    for number in addressed:
        yield number, _Use(rank=2, table=0, reason="has an address of the host")


def read_network_facts(sysfs_root: Path) -> NetworkFacts:
    """Return the facts of this host, or of the tree that ``sysfs_root`` is in.

    A tree without the file has none. The error of a failed read is in the result.
    """
    return read_facts(
        sysfs_root, FILE, NetworkFacts, lambda error: NetworkFacts(error=error), _read_kernel
    )


def _read_kernel() -> NetworkFacts:
    """Return the facts of this host by rtnetlink; the error of a failed read is in the result."""
    # A late import: it takes 0.2 s, and needs Linux.
    try:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError
    except ImportError as exc:
        return NetworkFacts(error=f"{exc}; install the extra agent")
    try:
        with IPRoute() as netlink:
            links = [_link(message) for message in netlink.get_links()]
            addressed = [
                message["index"] for message in netlink.get_addr() if message["scope"] < _LINK_SCOPE
            ]
            messages = chain.from_iterable(
                netlink.get_routes(family=family) for family in (socket.AF_INET, socket.AF_INET6)
            )
            routes = [_route(message) for message in islice(messages, MAX_ROUTES + 1)]
    except (OSError, NetlinkError) as exc:
        return NetworkFacts(error=f"rtnetlink: {exc}")
    facts = summarize(links, filter(None, routes), addressed)
    if len(routes) > MAX_ROUTES:
        return replace(facts, error=f"the host has more than {MAX_ROUTES} routes")
    return facts


def _link(message: Any) -> Link:
    # With IFLA_LINK_NETNSID the number is one of another namespace.
    foreign = message.get("link_netnsid") is not None
    return Link(message["index"], message.get("ifname"), None if foreign else message.get("link"))


def _route(message: Any) -> Route | None:
    """Return a route of the host to other machines; None for any other route.

    ``message`` is a message of pyroute2: a mapping that also has ``get_attr``.
    """
    if message["type"] != _UNICAST or message["flags"] & _CLONED:
        return None
    destination = str(message.get("dst") or "")
    if message["family"] == socket.AF_INET6 and destination.lower().startswith("fe80:"):
        return None  # each interface that is up has this route
    # A route with several next hops has their interfaces in RTA_MULTIPATH, and none in RTA_OIF.
    hops = message.get("multipath") or ()
    numbers = [message.get("oif"), *(hop["oif"] for hop in hops)]
    interfaces = tuple(number for number in numbers if number)
    if not interfaces:
        return None
    # The table of the header has eight bits; RTA_TABLE has all.
    table = message.get_attr("RTA_TABLE") or message["table"]
    return Route(interfaces, table=table, is_default=message["dst_len"] == 0)


# Classes of controllers. The kernel drivers of Ethernet controllers create network interfaces,
# those of InfiniBand do so only while the module ``ib_ipoib`` (``drivers/infiniband/ulp/ipoib``) is
# loaded. The PCI id database (pci.ids) has the classes.
ETHERNET, INFINIBAND = "0200", "0207"
MAX_DEPTH = 16  # of stacked network devices
# Kernel drivers that create no device: they keep a function for a guest.
# ``drivers/pci/pci-stub.c`` and ``drivers/xen/xen-pciback/pci_stub.c`` of Linux: the module of Xen
# is xen-pciback, its driver pciback (``PCISTUB_DRIVER_NAME``).
STUBS = frozenset({"pci-stub", "pciback"})
# Kernel drivers for a driver in user space, such as one of DPDK or SPDK.
# ``drivers/uio/uio_pci_generic.c`` of Linux, and ``igb_uio`` of DPDK's dpdk-kmods
# (``doc/guides/linux_gsg/linux_drivers.rst`` of DPDK).
USER_SPACE = frozenset({"uio_pci_generic", "igb_uio"})

# How the host uses a port about which nothing else is known.
ACTIVE_PORT = "is up with a link; set it down or, if it is for servers, active_port=offer in a rule"

_UP = 0x1  # IFF_UP of <linux/if.h>


# Return whether an operator has accepted a use of a function: its address and the reason.
IsAccepted = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class NetworkUse:
    """How the host uses an interface."""

    interface: str
    reason: str

    def __str__(self) -> str:
        """Return the text that operators read."""
        return f"{self.interface} {self.reason}"


class NetworkReader:
    """Reader of the network interfaces of a host."""

    def __init__(self, sysfs: Sysfs, facts: NetworkFacts) -> None:
        self._sysfs = sysfs
        self._facts = facts
        self._functions = {
            name: sysfs.functions_of(f"class/net/{name}/device")
            for name in sysfs.list_names("class/net")
        }
        self._tunnels: dict[str, list[str]] = {}
        for upper, lower in facts.lower.items():
            self._tunnels.setdefault(lower, []).append(upper)

    def uses(self, is_accepted: IsAccepted) -> dict[str, NetworkUse]:
        """Return how the host uses the network interfaces of PCI functions, by address.

        Of each function it is the first use that is not accepted.
        """
        uses: dict[str, NetworkUse] = {}
        for name, addresses in self._functions.items():
            for reason in self._find_uses(name, 0):
                use = NetworkUse(name, reason)
                for address in addresses:
                    if address not in uses and not is_accepted(address, str(use)):
                        uses[address] = use
        return uses

    def active_ports(
        self, addresses: Collection[str], is_accepted: IsAccepted
    ) -> dict[str, NetworkUse]:
        """Return how the host uses the active ports among ``addresses``, by address.

        An active port is a physical function with an interface that is up with a link.
        """
        # The host has set the port up, perhaps for what no reader finds: packet sockets, XDP,
        # another network stack.
        if self._facts.error is not None:
            return {}  # ``unread_functions`` returns them
        ports: dict[str, NetworkUse] = {}
        for name, functions in self._functions.items():
            # ``carrier`` is 1 with a link, and cannot be read while the interface is down
            # (``Documentation/ABI/testing/sysfs-class-net`` of the Linux kernel).
            if not self._is_up(name) or self._sysfs.read_text(f"class/net/{name}/carrier") != "1":
                continue
            # The first function is the port itself; the others on its path are bridges.
            address = functions[0] if functions else ""
            if address not in addresses or address in ports:
                continue
            is_virtual = self._sysfs.read_link(f"bus/pci/devices/{address}/physfn") is not None
            use = NetworkUse(name, ACTIVE_PORT)
            if not is_virtual and not is_accepted(address, str(use)):
                ports[address] = use
        return ports

    def unread_functions(self) -> dict[str, str]:
        """Return the functions with an interface that is up, if not all facts could be read."""
        found: dict[str, str] = {}
        if self._facts.error is not None:
            for name in filter(self._is_up, self._functions):
                for address in self._functions[name]:
                    found.setdefault(address, f"{name} may be in use: {self._facts.error}")
        return found

    def functions_without_interface(self, functions: Mapping[str, PciFunction]) -> dict[str, str]:
        """Return the network functions of a kernel driver without an interface: a reason each."""
        # sysfs shows the interfaces of the network namespace in which it was mounted. A container,
        # a router in a namespace, or a vDPA device can have the interface of a function.
        has_ipoib = self._sysfs.resolve("module/ib_ipoib", strict=True) is not None
        classes = (ETHERNET, INFINIBAND) if has_ipoib else (ETHERNET,)
        with_interface = set(chain.from_iterable(self._functions.values()))
        return {
            address: describe_missing_interface(function.kernel_driver)
            for address, function in functions.items()
            if function.class_code.startswith(classes)
            and function.kernel_driver is not None
            and not is_vfio(function.kernel_driver)
            and function.kernel_driver not in STUBS | USER_SPACE
            and address not in with_interface
        }

    def is_active(self, name: str, address: str) -> bool:
        """Return whether a PCI function has this network interface, and it is up."""
        return address in self._functions.get(name, ()) and self._is_up(name)

    def _find_uses(self, name: str, depth: int) -> Iterator[str]:
        """Yield how the host uses an interface, the most important use first."""
        if name in self._facts.reasons:
            yield self._facts.reasons[name]
        if depth == MAX_DEPTH:
            return
        folder = f"class/net/{name}"
        uppers = [
            link.removeprefix("upper_")
            for link in self._sysfs.list_names(folder)
            if link.startswith("upper_")
        ]
        uppers += self._tunnels.get(name, [])
        for upper in uppers:
            for reason in self._find_uses(upper, depth + 1):
                # Only the interface directly above is named, whichever above it has the use.
                yield f"is below {upper}, which {reason}" if depth == 0 else reason
        master = self._sysfs.read_link(f"{folder}/master")
        # The carrier is ignored: a NIC must not be offered while its switch restarts.
        if not self._is_up(name):
            return
        if master is not None:
            yield f"is an active port of {master}"
        # For example a macvtap of a server, which has no address on the host.
        for upper in filter(self._is_up, uppers):
            if upper != master:
                yield f"is below {upper}"

    def _is_up(self, name: str) -> bool:
        return bool((self._sysfs.read_int(f"class/net/{name}/flags") or 0) & _UP)


def describe_missing_interface(kernel_driver: str) -> str:
    """Return why a function of a network driver, without an interface here, may be in use."""
    return (
        f"it is bound to {kernel_driver} and has no network interface here: a container or a vDPA "
        "device may have it"
    )
