# SPDX-License-Identifier: Apache-2.0
"""The command ``describe``."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import Arguments, argument, plan
from cyborg.cli.common.rest import CommandError
from cyborg.cli.describe.kinds import KINDS
from cyborg.cli.describe.report import Description, Found, Search, Section, describe
from cyborg.cli.terminal import tables
from cyborg.core.text import sanitize

# Maximum number of rows of a section in text; JSON has all that were read.
MAX_ROWS = 20
MIN_TEXT = 20  # characters of a line of a field, even beyond the width of the terminal
_INDENT = "  "


class Describe(base.Command):
    """Show everything about one object: device, host, request, context, attachment, job and others.

    It has the fields of the object, what hinders its use, its owners, jobs and history. If several
    objects have the name, they are listed and the exit status is 1.
    """

    ARGUMENTS = (
        argument(
            "object",
            help="uuid or its first digits; name of a host, profile, driver, context or "
            "accelerator; address of a device, also as HOST/ADDRESS; HOST/DAEMON; HOST/SET; or the "
            "uuid of a server",
        ),
        argument(
            "-f",
            "--format",
            choices=("text", "json"),
            default="text",
            help="format of the output, text by default; json has all fields",
        ),
    )

    def take_action(self, args: Arguments) -> None:
        """Find and show the object. Raise CommandError."""
        search = Search(self.app.rest, args.object)
        found = search.run()
        if len(found) != 1:
            raise CommandError(_explain(search, found))
        description = describe(self.app.rest, found[0])
        stdout = self.app.stdout
        if args.format == "json":
            stdout.write(json.dumps(description.to_document(), indent=2) + "\n")
            return
        width = tables.terminal_width(stdout)
        stdout.writelines(f"{line}\n" for line in format_description(description, width))


def _explain(search: Search, found: Sequence[Found]) -> str:
    """Return why a text does not name one object."""
    if found:
        lines = [str(plan("", each.kind.noun, each.row)).removeprefix("would ") for each in found]
        return f"{search.text!r} names {len(found)} objects, give the uuid:\n" + "\n".join(lines)
    nouns = ", ".join(kind.noun for kind in KINDS)
    remarks = "".join(f"; {remark}" for remark in search.remarks)
    return (
        f"no object has the uuid, name or address {search.text!r}: looked for {nouns}, host and "
        f"instance{remarks}"
    )


def format_description(description: Description, width: int) -> Iterator[str]:
    """Yield the lines of a description, at most ``width`` wide."""
    row = description.row
    title = row.get("name") or row.get("address") or row.get("uuid")
    yield sanitize(f"{description.kind.noun.capitalize()} {title}")[:width]
    yield from _format_fields(description, width)
    hindrances = description.hindrances()
    yield ""
    yield "Hindered by:" if hindrances else "Hindered by nothing that is known"
    for text in hindrances:
        yield from textwrap.wrap(
            sanitize(text), width, initial_indent=f"{_INDENT}- ", subsequent_indent=_INDENT * 2
        )
    for section in description.sections:
        yield ""
        yield from _format_section(section, width)


def _format_fields(description: Description, width: int) -> Iterator[str]:
    """Yield the lines of the fields that have a value, their texts wrapped and aligned."""
    # The parts are sections of their own, not fields.
    part_titles = {title for title, _ in description.kind.parts.values()}
    names, cells = description.kind.collection.build_object(description.row)
    shown = [
        (name, text)
        for name, cell in zip(names, cells, strict=True)
        if name not in part_titles and (text := _text(cell))
    ]
    indent = max((len(name) for name, _ in shown), default=0) + len(_INDENT) + 2
    for name, text in shown:
        yield from textwrap.wrap(
            text,
            max(width, indent + MIN_TEXT),
            initial_indent=f"{_INDENT}{name}:".ljust(indent),
            subsequent_indent=" " * indent,
        )


def _format_section(section: Section, width: int) -> Iterator[str]:
    """Yield the title of a section with its number of rows, and a table of at most MAX_ROWS."""
    if section.error is not None:
        yield from textwrap.wrap(
            sanitize(f"{section.title}: unknown, {section.error}"), width, subsequent_indent=_INDENT
        )
        return
    more = "+" if section.has_more else ""
    yield f"{section.title} ({len(section.rows)}{more})"
    rows = section.rows[:MAX_ROWS]
    if rows:
        yield from _format_table(section, rows, width)
    if len(section.rows) > len(rows):
        yield f"{_INDENT}{len(section.rows) - len(rows)} more"


def _format_table(section: Section, rows: Sequence[Any], width: int) -> Iterator[str]:
    """Yield the lines of a table without borders, cut to the width."""
    columns = section.collection.short
    objects = [section.collection.format_row(row) for row in rows]
    lines = [
        [
            formatting.to_cell(formatting.read_value(row, key), formatting.SHORT_UUID)
            for _, key in columns
        ]
        for row in objects
    ]
    names = [name for name, _ in columns]
    every = [True] * len(names)
    # The table of fit_table() has borders, which take a column more for each column here.
    fitting = listing.fit_table(
        names, lines, visible=every, elastic=every, width=width + len(names), ellipsis="~"
    )
    texts = [names, *([_text(cell) for cell in line] for line in fitting)]
    widths = [max(map(tables.text_width, column)) for column in zip(*texts, strict=True)]
    for line in texts:
        padded = (
            text + " " * (size - tables.text_width(text))
            for text, size in zip(line, widths, strict=True)
        )
        yield (_INDENT + _INDENT.join(padded)).rstrip()


def _text(cell: Any) -> str:
    # Texts of hosts and users must not change the terminal.
    return sanitize(listing.cell_text(cell))
