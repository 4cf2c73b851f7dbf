# SPDX-License-Identifier: Apache-2.0
"""A topology as a tree of lines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cyborg.cli.views.inventory import DeployableView, DeviceView, HostView, TopologyView
from cyborg.cli.views.text import Glyphs, Part, build_line

if TYPE_CHECKING:
    from rich.text import Text

_STATES = {"up": "green", "late": "yellow", "down": "bold red"}
_HANDLES = {"bound": "cyan", "preparing": "cyan", "free": "green", "error": "bold red"}
NARROW = 60
"""Below this width the branches take two columns less."""


@dataclass(frozen=True, slots=True)
class Node:
    """A line of the tree, and what is below it."""

    parts: Sequence[Part]
    children: Sequence["Node"] = ()


def build_tree(topology: TopologyView, width: int, glyphs: Glyphs) -> list["Text"]:
    """Return the lines of the trees of all hosts."""
    lines = []
    for host in topology.hosts:
        lines += list(_draw(_host(host), width, glyphs, "", ""))
    if topology.num_more:
        text = f"{topology.num_more} more hosts, see --host and --max-hosts"
        lines.append(build_line(width, glyphs, (text, "dim")))
    return lines


def _draw(node: Node, width: int, glyphs: Glyphs, branch: str, indent: str) -> Iterator["Text"]:
    yield build_line(width, glyphs, (branch, "dim"), *node.parts)
    middle, last, below, blank = (
        text if width >= NARROW else text[0] + text[-1] for text in glyphs.tree
    )
    for number, child in enumerate(node.children, 1):
        is_last = number == len(node.children)
        yield from _draw(
            child,
            width,
            glyphs,
            indent + (last if is_last else middle),
            indent + (blank if is_last else below),
        )


def _host(host: HostView) -> Node:
    children = [
        Node(
            [("NUMA node unknown" if number is None else f"NUMA node {number}", "bold")],
            [_device(device) for device in devices],
        )
        for number, devices in host.nodes.items()
    ]
    if host.is_partial:
        children.append(Node([("more devices and handles than shown", "dim")]))
    parts: list[Part] = [(host.name, "bold"), " ", (host.state, _STATES.get(host.state, "red"))]
    return Node(parts if children else [*parts, ("  no devices", "dim")], children)


def _device(device: DeviceView) -> Node:
    parts: list[Part] = [(device.address, "bold"), f" {device.type}"]
    parts += [f" {device.name}"] if device.name else []
    if device.status == "yes":
        parts += [" ", ("ready", "green")]
    elif device.status != "no: unhealthy":
        parts += [", ", (f"schedulable {device.status}", "yellow")]
    if device.is_unhealthy:
        parts += [", ", (device.health, "bold red")]
    return Node(parts, [_deployable(deployable) for deployable in device.deployables])


def _deployable(deployable: DeployableView) -> Node:
    counts = ", ".join(f"{n} {state}" for state, n in deployable.counts.most_common())
    children = [
        Node(
            [
                handle.address,
                " ",
                (handle.state, _HANDLES.get(handle.state, "yellow")),
                f" {handle.owner}" if handle.owner else "",
                *([": ", (handle.error, "red")] if handle.error else ()),
            ]
        )
        for handle in deployable.handles
        if handle.owner or handle.error
    ]
    return Node([(f"{deployable.resource_class}", "cyan"), f": {counts}"], children)
