# SPDX-License-Identifier: Apache-2.0
"""A topology as an SVG picture, which needs no other file.

Each host is a panel with a column of device cards for each NUMA node. A card has a square for each
handle, or a bar if there are many, and the first owners.
"""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from xml.etree import ElementTree as ET

from cyborg.cli.common.formatting import SHORT_UUID, UUID
from cyborg.cli.views.inventory import OWNED, DeviceView, HostView, TopologyView
from cyborg.core.inventory.device_set import OfferState

WIDTH = 1120
MARGIN, GAP, PAD = 24, 14, 12
CARD_WIDTH = 340
COLUMNS = 3
# Height of a line of text in pixels.
LINE = 17
CELL, CELL_GAP = 13, 3
# Maximum number of squares of a deployable; a bar shows more handles.
MAX_CELLS = 76
MAX_OWNERS = 4
# Width of a character of a card's text, of a fixed-width font of 12 pixels.
CHARACTER = 7.3
ROW_CELLS = (CARD_WIDTH - 2 * PAD) // (CELL + CELL_GAP)

_STATES = {"up": "good", "late": "warn", "down": "bad"}
_USES = ("owned", "dirty", "draining", "cordoned", "error", "free")


@dataclass(frozen=True, slots=True)
class _Card:
    """A device, its lines of text above the handles, and its handles with an owner."""

    device: DeviceView
    lines: Sequence[tuple[str, str]]
    owners: Sequence[str]

    @property
    def height(self) -> int:
        height = PAD + LINE * (1 + len(self.lines))
        for deployable in self.device.deployables:
            height += LINE + 4 + _cell_rows(len(deployable.handles)) * (CELL + CELL_GAP)
        return height + LINE * min(len(self.owners), MAX_OWNERS + 1) + PAD


def draw_svg(topology: TopologyView) -> bytes:
    """Return the picture as a file."""
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"})
    ET.SubElement(root, "title").text = "Accelerators by host"
    ET.SubElement(root, "desc").text = _clean(_describe(topology))
    style = resources.files(__package__).joinpath("svg.css").read_text("utf-8")
    ET.SubElement(root, "style").text = f"\n{style}"
    # Its height is known at the end, and set there.
    paper = _rect(root, "paper", x=0, y=0, width=WIDTH, height=0)
    _text(root, "title", MARGIN, MARGIN + 16, "Accelerators by host")
    _legend(root, MARGIN + 260, MARGIN + 16)
    y = MARGIN + 40
    for host in topology.hosts:
        y += _draw_host(root, host, y) + GAP
    if topology.num_more:
        _text(root, "soft", MARGIN, y + LINE, f"{topology.num_more} more hosts are not shown")
        y += 2 * LINE
    height = y + MARGIN - GAP
    paper.set("height", str(height))
    root.set("viewBox", f"0 0 {WIDTH} {height}")
    root.set("width", str(WIDTH))
    root.set("height", str(height))
    ET.indent(root)
    # By a library of XML: names from the service are escaped.
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _describe(topology: TopologyView) -> str:
    hosts = (
        f"{host.name} ({host.state}): {sum(map(len, host.nodes.values()))} devices"
        for host in topology.hosts
    )
    return "; ".join(hosts) or "no hosts"


def _legend(root: ET.Element, x: int, y: int) -> None:
    for use in _USES:
        _rect(root, use, x, y - CELL + 2, width=CELL, height=CELL, radius=2)
        text = "cleaning failed" if use == "error" else use
        _text(root, "soft", x + CELL + 6, y, text)
        x += CELL + 26 + math.ceil(len(text) * CHARACTER)


def _draw_host(root: ET.Element, host: HostView, y: int) -> int:
    """Draw a host and return its height in pixels. The ``y`` of a text is that of its baseline."""
    panel = ET.SubElement(root, "g")
    # Its height is known when its cards are drawn, and set then.
    frame = _rect(panel, "panel", x=MARGIN, y=y, width=WIDTH - 2 * MARGIN, height=0, radius=8)
    name = _fit(host.name, columns=80)
    _text(panel, "host", MARGIN + PAD, y + 26, name)
    state = _STATES.get(host.state, "bad")
    _text(panel, state, WIDTH - MARGIN - PAD, y + 26, host.state, anchor="end")
    height = 40
    for number, devices in host.nodes.items():
        title = "NUMA node unknown" if number is None else f"NUMA node {number}"
        _text(panel, "node", MARGIN + PAD, y + height + LINE - 4, title)
        height += LINE + 4
        height += _draw_devices(panel, devices, y + height)
    if not host.nodes or host.is_partial:
        note = "more devices and handles than shown" if host.is_partial else "no devices"
        _text(panel, "soft", MARGIN + PAD, y + height + LINE - 4, note)
        height += LINE + 4
    height += PAD - 4
    frame.set("height", str(height))
    return height


def _draw_devices(panel: ET.Element, devices: Sequence[DeviceView], y: int) -> int:
    """Draw the cards of a NUMA node in rows of COLUMNS, and return their height."""
    height = 0
    for start in range(0, len(devices), COLUMNS):
        row = [
            _Card(device, _lines(device), _owners(device))
            for device in devices[start : start + COLUMNS]
        ]
        tallest = max(card.height for card in row)
        for column, card in enumerate(row):
            x = MARGIN + PAD + column * (CARD_WIDTH + GAP)
            _draw_card(panel, card, x, y + height, tallest)
        height += tallest + GAP
    return height


def _lines(device: DeviceView) -> list[tuple[str, str]]:
    """Return the lines of text above the handles: class of style and text."""
    lines = [("soft", f"{device.type} {device.name}".rstrip())]
    ready = device.status == "yes"
    if device.is_unhealthy:
        lines.append(("bad", device.health))
    # The line of the health says it already, with its reason.
    if device.status != "no: unhealthy":
        lines.append(("good", "ready") if ready else ("warn", f"schedulable {device.status}"))
    if device.root:
        lines.append(("soft", f"PCI root {device.root}"))
    lines += [("soft", f"in {item.name}, {item.offer}") for item in device.member_of]
    for item in device.sets:
        if not item.is_withheld:
            style = "good" if item.offer == OfferState.OFFERED else "soft"
            text = f"{item.name} {item.offer}, {item.size} devices {item.owner}".rstrip()
            lines.append((style, text))
    if withheld := sum(item.is_withheld for item in device.sets):
        lines.append(("soft", f"sets withheld: {withheld}"))
    return lines


def _owners(device: DeviceView) -> list[str]:
    """Return the handles with an owner."""
    return [
        f"{handle.address} {handle.owner}"
        for deployable in device.deployables
        for handle in deployable.handles
        if handle.owner
    ]


def _cell_rows(number: int) -> int:
    return 1 if number > MAX_CELLS else -(-number // ROW_CELLS)


def _draw_card(panel: ET.Element, content: _Card, x: int, y: int, height: int) -> None:
    """Draw the card of a device: texts, a cell for each handle, owners."""
    card = ET.SubElement(panel, "g")
    device, owners = content.device, content.owners
    tooltip = [device.address, *(text for _, text in content.lines), *owners]
    ET.SubElement(card, "title").text = _clean("\n".join(tooltip))
    kind = "card unhealthy" if device.is_unhealthy else "card"
    _rect(card, kind, x, y, width=CARD_WIDTH, height=height, radius=6)
    y += PAD + LINE - 5
    _text(card, "address", x + PAD, y, _fit(device.address))
    for style, text in content.lines:
        y += LINE
        _text(card, style, x + PAD, y, _fit(_shorten(text)))
    for deployable in device.deployables:
        y += LINE + 4
        uses = [_use(handle.state) for handle in deployable.handles]
        count = f"{uses.count('owned')}/{len(uses)} owned"
        _text(card, "", x + PAD, y, _fit(f"{deployable.resource_class} {count}"))
        y += CELL_GAP * 2
        _draw_handles(card, uses, x + PAD, y)
        y += _cell_rows(len(uses)) * (CELL + CELL_GAP) - CELL_GAP * 2
    for owner in owners[:MAX_OWNERS]:
        y += LINE
        _text(card, "soft", x + PAD, y, _fit(_shorten(owner)))
    if len(owners) > MAX_OWNERS:
        _text(card, "soft", x + PAD, y + LINE, f"{len(owners) - MAX_OWNERS} more owned handles")


def _shorten(text: str) -> str:
    """Return a text with short uuids; the tooltip has the whole ones."""
    return UUID.sub(lambda match: match[0][:SHORT_UUID], text)


def _use(state: str) -> str:
    return "owned" if state in OWNED else state


def _draw_handles(card: ET.Element, uses: Sequence[str], x: int, y: int) -> None:
    """Draw a square for each handle; of more than MAX_CELLS, a bar with the share of each use."""
    if len(uses) <= MAX_CELLS:
        for number, use in enumerate(uses):
            row, column = divmod(number, ROW_CELLS)
            step = CELL + CELL_GAP
            left, top = x + column * step, y + row * step
            _rect(card, use, left, top, width=CELL, height=CELL, radius=2)
        return
    width, start = CARD_WIDTH - 2 * PAD, float(x)
    for use in _USES:
        part = round(width * uses.count(use) / len(uses), 2)
        if part:
            _rect(card, use, start, y, width=part, height=CELL)
            start += part


def _rect(
    parent: ET.Element, kind: str, x: float, y: float, width: float, height: float, radius: int = 0
) -> ET.Element:
    values = {"x": x, "y": y, "width": width, "height": height}
    attributes = {name: f"{value:g}" for name, value in values.items()}
    attributes |= {"rx": str(radius)} if radius else {}
    return ET.SubElement(parent, "rect", {"class": kind, **attributes})


def _text(
    parent: ET.Element, kind: str, x: float, y: float, text: str, anchor: str | None = None
) -> None:
    attributes = {"x": f"{x:g}", "y": f"{y:g}"} | ({"class": kind} if kind else {})
    attributes |= {"text-anchor": anchor} if anchor else {}
    ET.SubElement(parent, "text", attributes).text = _clean(text)


def _fit(text: str, columns: int = int((CARD_WIDTH - 2 * PAD) / CHARACTER)) -> str:
    """Return the text, cut to a number of columns; wide characters count twice."""
    used, shown = 0, ""
    for character in _clean(text):
        used += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if used > columns:
            return f"{shown[:-1]}…"
        shown += character
    return shown


def _clean(text: str) -> str:
    """Return the text without characters that XML does not allow."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)
