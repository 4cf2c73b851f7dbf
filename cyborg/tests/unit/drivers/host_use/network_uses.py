# SPDX-License-Identifier: Apache-2.0
"""The uses of network cards by a host that drivers find."""

from collections.abc import Sequence

from cyborg.drivers.host_use import networks
from cyborg.drivers.host_use.networks import ACTIVE_PORT, Link, Route
from cyborg.testing.machine import HostTree
from cyborg.tests.unit.drivers.host_use.steps import Use, add_nic, set_up


def _end_network(host: HostTree) -> None:
    host.remove_routes()
    for link in (host.root / "class/net/eth0").glob("upper_*"):
        link.unlink()
    (host.root / "class/net/eth0/master").unlink(missing_ok=True)
    set_up(host, "eth0", False)


def _network(
    name: str,
    reason: str,
    *above: str,
    routes: Sequence[Route] = (),
    addressed: Sequence[int] = (),
    is_master: bool = True,
) -> Use:
    """Return a use of eth0, which has the number 1, or of the last interface above, with 2."""

    def begin(host: HostTree) -> None:
        set_up(host, "eth0", True)
        lower = "eth0"
        for upper in above:
            host.add_interface(upper)
            host.stack_interfaces(upper, lower, master=is_master)
            lower = upper
        links = [Link(1, "eth0"), *([Link(2, lower)] if above else [])]
        for interface, text in networks.summarize(links, routes, addressed).reasons.items():
            host.add_route(interface, text)

    return Use(name, reason, add_nic, begin, _end_network)


def _hide_interface(host: HostTree) -> None:
    (host.root / "class/net/eth0").rename(host.root / "hidden")


def _show_interface(host: HostTree) -> None:
    (host.root / "hidden").rename(host.root / "class/net/eth0")


def _unread(host: HostTree) -> None:
    set_up(host, "eth0", True)
    (host.proc / "self/net/rtnetlink.json").write_text('{"error": "rtnetlink: EPERM"}')


_MAIN, _VRF = 254, 100
_IN_CONTAINER = (
    "it is bound to i40e and has no network interface here: a container or a vDPA device may "
    "have it"
)

NETWORK_USES: Sequence[Use] = (
    _network("the default route", "eth0 has the default route", routes=[Route((1,), _MAIN, True)]),
    _network("another route", "eth0 has a route", routes=[Route((1,), _MAIN, False)]),
    _network(
        "a route of a policy table",
        "eth0 has the default route in table 100",
        routes=[Route((1,), _VRF, True)],
    ),
    _network(
        "the second next hop of a route (ECMP)",
        "eth0 has the default route",
        routes=[Route((9, 1), _MAIN, True)],
    ),
    _network("an address, IPv4 or IPv6", "eth0 has an address of the host", addressed=[1]),
    _network(
        "a bond with an address",
        "eth0 is below bond0, which has an address of the host",
        "bond0",
        addressed=[2],
    ),
    _network(
        "a VLAN with a route on a bond",
        "eth0 is below bond0, which has a route",
        *("bond0", "bond0.7"),
        routes=[Route((2,), _MAIN, False)],
    ),
    _network("a port of a VRF", "eth0 is an active port of red", "red"),
    _network("a port of a Linux bridge", "eth0 is an active port of br0", "br0"),
    _network("a port of Open vSwitch", "eth0 is an active port of ovs-system", "ovs-system"),
    _network("a port of a team", "eth0 is an active port of team0", "team0"),
    _network("a macvtap of a guest", "eth0 is below macvtap0", "macvtap0", is_master=False),
    _network(
        "the underlay of a tunnel (VXLAN, GRE)",
        "eth0 is below vxlan0, which has an address of the host",
        "vxlan0",
        addressed=[2],
        is_master=False,
    ),
    Use(
        "a network port that is up with a link",
        f"eth0 {ACTIVE_PORT}",
        add_nic,
        lambda host: set_up(host, "eth0", True),
        _end_network,
    ),
    Use(
        "an interface of a container or vDPA device",
        _IN_CONTAINER,
        add_nic,
        _hide_interface,
        _show_interface,
    ),
    Use(
        "routes that cannot be read",
        "eth0 may be in use: rtnetlink: EPERM",
        add_nic,
        _unread,
        _end_network,
    ),
)
