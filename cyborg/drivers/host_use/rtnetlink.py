# SPDX-License-Identifier: Apache-2.0
"""What the kernel says about the use of network interfaces: routes, addresses, tunnels.

``/proc/net/route`` has only the main table of IPv4, and one next hop of a route. rtnetlink has all
tables, VRFs included, and all next hops, and needs no privileges
(``Documentation/userspace-api/netlink`` of the Linux kernel, rtnetlink(7), and
``include/uapi/linux/rtnetlink.h`` and ``if_link.h`` for the values below).

A tree that is not /sys has the facts as a file, without addresses: so does a capture.
"""

import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from cyborg.drivers.sysfs import LOCAL_ROOT, notify_facts, read_file

FILE = "proc/self/net/rtnetlink.json"
"""Path of the facts below the directory that contains ``sys``. The kernel has no such file."""
MAX_BYTES = 4 * 1024 * 1024
MAX_ROUTES = 50_000
"""Routes that are read: a router has a million, which take a minute."""

_UNICAST = 1  # RTN_UNICAST; the others have no interface, or are addresses of the host
_CLONED = 0x200  # RTM_F_CLONED: an entry of the cache of routes
_MAIN = 254  # RT_TABLE_MAIN
_LINK_SCOPE = 253  # RT_SCOPE_LINK and RT_SCOPE_HOST: not reachable from other networks


@dataclass(frozen=True, slots=True)
class NetworkFacts:
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
    ranked: dict[str, tuple[int, int, str]] = {}

    def add(number: int, rank: int, table: int, reason: str) -> None:
        if (name := names.get(number)) is not None and name != "lo":
            candidate = (rank, 0 if table == _MAIN else table, reason)
            ranked[name] = min(ranked.get(name, candidate), candidate)

    for route in routes:
        place = "" if route.table == _MAIN else f" in table {route.table}"
        kind = "the default route" if route.is_default else "a route"
        for number in route.interfaces:
            add(number, 0 if route.is_default else 1, route.table, f"has {kind}{place}")
    for number in addressed:
        add(number, 2, _MAIN, "has an address of the host")
    return NetworkFacts(
        reasons={name: reason for name, (_, _, reason) in sorted(ranked.items())},
        lower={
            link.name: names[link.lower]
            for link in links
            if link.lower is not None and link.lower != link.number and link.lower in names
        },
    )


def read(sysfs_root: Path) -> NetworkFacts:
    """Return the facts of this host, or of the tree that ``sysfs_root`` is in.

    A tree without the file has none. The error of a failed read is in the result.
    """
    if sysfs_root != LOCAL_ROOT:
        try:
            content = read_file(sysfs_root.parent / FILE, MAX_BYTES)
            return NetworkFacts(**json.loads(content))
        except FileNotFoundError:
            return NetworkFacts()
        except (OSError, TypeError, ValueError) as exc:
            return NetworkFacts(error=f"{FILE}: {exc}")
    facts = _read_kernel()
    notify_facts(FILE, json.dumps(asdict(facts)).encode())
    return facts


def _read_kernel() -> NetworkFacts:
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
    """Return a route of the host to other machines; None for any other route."""
    if message["type"] != _UNICAST or message["flags"] & _CLONED:
        return None
    destination = str(message.get("dst") or "")
    if message["family"] == socket.AF_INET6 and destination.lower().startswith("fe80:"):
        return None  # each interface that is up has this route
    hops = message.get("multipath") or ()
    interfaces = [message.get("oif"), *(hop["oif"] for hop in hops)]
    found = tuple(number for number in interfaces if number)
    # The table of the header has eight bits; RTA_TABLE has all.
    table = message.get_attr("RTA_TABLE") or message["table"]
    return Route(found, table, message["dst_len"] == 0) if found else None
