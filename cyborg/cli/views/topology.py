# SPDX-License-Identifier: Apache-2.0
"""``cyborg topology``: hosts, NUMA nodes, devices and handles, and who has them, as a tree."""

import argparse
import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from cyborg.cli.common import base
from cyborg.cli.common.base import argument
from cyborg.cli.common.rest import CommandError
from cyborg.cli.views import inventory, text
from cyborg.cli.views.svg import draw_svg
from cyborg.cli.views.text import Canvas, Part

if TYPE_CHECKING:
    from rich.text import Text

_STATES = {"up": "green", "late": "yellow", "down": "bold red"}
_HANDLES = {"bound": "cyan", "preparing": "cyan", "free": "green", "error": "bold red"}
_OFFERS = {"offered": "green", "allocated": "cyan"}
# Below this width each branch takes two columns instead of three.
NARROW = 60


@dataclass(frozen=True, slots=True)
class Node:
    """A line of the tree, and what is below it."""

    parts: Sequence[Part]
    children: Sequence["Node"] = ()


def build_tree(topology: inventory.TopologyView, canvas: Canvas) -> list["Text"]:
    """Return the lines of the trees of all hosts."""
    lines = []
    for host in topology.hosts:
        lines += list(_draw(_host(host), canvas, "", ""))
    if topology.num_more:
        text = f"{topology.num_more} more hosts, see --host and --max-hosts"
        lines.append(canvas.build_line((text, "dim")))
    return lines


def _draw(node: Node, canvas: Canvas, branch: str, indent: str) -> Iterator["Text"]:
    """Yield the lines of a node and all below it.

    ``branch`` precedes the text of the node, ``indent`` the branches of its children.
    """
    yield canvas.build_line((branch, "dim"), *node.parts)
    # Of a narrow view, each has its first and its last character.
    middle, last, below, blank = (
        text if canvas.width >= NARROW else text[0] + text[-1] for text in canvas.glyphs.tree
    )
    for number, child in enumerate(node.children, 1):
        is_last = number == len(node.children)
        yield from _draw(
            child,
            canvas,
            indent + (last if is_last else middle),
            indent + (blank if is_last else below),
        )


def _host(host: inventory.HostView) -> Node:
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


def _device(device: inventory.DeviceView) -> Node:
    parts: list[Part] = [(device.address, "bold"), f" {device.type}"]
    parts += [f" {device.name}"] if device.name else []
    if device.status == "yes":
        parts += [" ", ("ready", "green")]
    # The health below says it, with its reason.
    elif device.status != "no: unhealthy":
        parts += [", ", (f"schedulable {device.status}", "yellow")]
    if device.is_unhealthy:
        parts += [", ", (device.health, "bold red")]
    for item in device.member_of:
        parts += [", in ", item.name, " ", (item.offer, _OFFERS.get(item.offer, "yellow"))]
    return Node(parts, [*map(_deployable, device.deployables), *_sets(device.sets)])


def _sets(sets: Sequence[inventory.SetView]) -> Iterator[Node]:
    """Yield the device sets of a source; those that are withheld are only counted."""
    for item in sets:
        if not item.is_withheld:
            yield Node(
                [
                    f"{item.name} ",
                    (item.offer, _OFFERS.get(item.offer, "yellow")),
                    f" {item.owner}" if item.owner else "",
                    f": {', '.join(item.handles)}",
                ]
            )
    sizes = Counter(item.size for item in sets if item.is_withheld)
    if sizes:
        text = ", ".join(f"{number} of {size}" for size, number in sorted(sizes.items()))
        yield Node([(f"withheld: {text}", "dim")])


def _deployable(deployable: inventory.DeployableView) -> Node:
    """Return the node of a deployable, with a child for each handle with an owner or an error."""
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
        # Free handles are only counted: there can be hundreds.
        if handle.owner or handle.error
    ]
    return Node([(f"{deployable.resource_class}", "cyan"), f": {counts}"], children)


def write_picture(path: Path, content: bytes) -> None:
    """Replace a regular file, or create it, in one step. Raise CommandError.

    Anything else of that name, such as a folder or a device, stays as it is.
    """
    if path.exists() and not path.is_file():
        raise CommandError(f"{path} is not a regular file: choose another name")
    # A symbolic link stays a link to the new content.
    target = Path(os.path.realpath(path))
    # Cut: with a dot and the uuid, it must be no longer than a file system allows, often 255 bytes.
    temporary = target.with_name(f".{target.name[:200]}.{uuid4().hex}")
    try:
        # With the permissions of a new file of this user, which those of tempfile are not.
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            # Before the replacement: after a crash the name must not refer to an empty file.
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as exc:
        raise CommandError(f"cannot write {path}: {exc.strerror or exc}") from exc
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


DEFAULT_HOSTS = 10


def parse_max_hosts(text: str) -> int:
    """Parse a number of hosts. Raise ArgumentTypeError."""
    if not text.isdecimal() or not 1 <= int(text[:9]) <= inventory.MAX_HOSTS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number from 1 to {inventory.MAX_HOSTS}"
        )
    return int(text)


class Topology(base.Command):
    """Show the devices of hosts by NUMA node, their handles, and who has these.

    Handles without an owner, and device sets that are not offered, are only counted. Without --host
    the first hosts by name are shown. For administrators.
    """

    ARGUMENTS = (
        (
            argument("--host", help="only this host"),
            argument(
                "--max-hosts",
                type=parse_max_hosts,
                default=DEFAULT_HOSTS,
                metavar="N",
                help=f"number of hosts, {DEFAULT_HOSTS} by default, at most {inventory.MAX_HOSTS}",
            ),
        ),
        argument("--svg", type=Path, metavar="FILE", help="write a picture to this file instead"),
        text.FORMAT,
    )

    def take_action(self, args: argparse.Namespace) -> None:
        """Show the topology or write the picture."""
        found = inventory.fetch_topology(self.app.rest, args.host, args.max_hosts)
        if args.svg is not None:
            write_picture(args.svg, draw_svg(found))
        elif args.format == "json":
            document = {"hosts": found.document, "more_hosts": found.num_more}
            self.app.stdout.write(json.dumps(document, indent=2) + "\n")
        else:
            lines = build_tree(found, text.make_canvas(self.app.stdout))
            text.write_lines(self.app.stdout, lines)
