# SPDX-License-Identifier: Apache-2.0
"""Sphinx directives ``life-cycle`` and ``attachment-steps``: tables of the code as pictures.

HTML gets a chart and the tables, other builders only the tables. The chart has a column for each
state and a row for each event, with an arrow from each state in which the event is allowed. This
needs no layout of a graph, and so neither Graphviz nor an extension: each place follows from the
order of states and events.
"""

from collections.abc import Iterable
from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from cyborg.core.attachments.attachment import ATTACHMENT_LIFE_CYCLE, FLOWS
from cyborg.core.binding.states import ARQ_LIFE_CYCLE
from cyborg.core.contexts.states import CONTEXT_LIFE_CYCLE
from cyborg.core.jobs.job import JOB_LIFE_CYCLE
from cyborg.core.life_cycle import LifeCycle, Transition

LIFE_CYCLES: dict[str, LifeCycle[Any, Any]] = {
    "arq": ARQ_LIFE_CYCLE,
    "device-context": CONTEXT_LIFE_CYCLE,
    "attachment": ATTACHMENT_LIFE_CYCLE,
    "job": JOB_LIFE_CYCLE,
}
LEFT, COLUMN, TOP, ROW = 130, 112, 44, 34  # pixels
DELETED = "(deleted)"


def chart(life_cycle: LifeCycle[Any, Any]) -> str:
    """Return the chart of a life cycle as SVG."""
    columns = [str(state) for state in life_cycle.states]
    if life_cycle.deletable:
        columns.append(DELETED)
    x = {name: LEFT + COLUMN // 2 + COLUMN * n for n, name in enumerate(columns)}
    rows = [_arrows(found) for found in life_cycle.transitions]
    if life_cycle.deletable:
        rows.append(("delete", [str(state) for state in life_cycle.deletable], DELETED))
    width, height = LEFT + COLUMN * len(columns), TOP + ROW * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'style="max-width: {width}px" font-family="sans-serif" font-size="13" role="img" '
        f'aria-label="{escape(life_cycle.name)}: events and states">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 Z" fill="#222"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>',
    ]
    for name, at in x.items():
        is_end = name == DELETED or name in life_cycle.final
        fill = "#f3e1e1" if is_end else "#fdf0d5" if name == life_cycle.initial else "#e4f0dd"
        parts += [
            f'<line x1="{at}" y1="34" x2="{at}" y2="{height - 6}" stroke="#999" '
            'stroke-dasharray="3 4"/>',
            f'<rect x="{at - 52}" y="8" width="104" height="26" rx="4" fill="{fill}" '
            'stroke="#444"/>',
            f'<text x="{at}" y="26" text-anchor="middle" fill="#111">{escape(name)}</text>',
        ]
    for number, (event, sources, target) in enumerate(rows):
        y = TOP + ROW * number + ROW // 2
        parts.append(f'<text x="8" y="{y + 4}" fill="#111">{escape(event)}</text>')
        # The longest arrow of each direction is below the others: only its line is seen.
        for source in sources:
            side = -1 if x[source] > x[target] else 1
            parts += [
                f'<circle cx="{x[source]}" cy="{y}" r="4" fill="#222"/>',
                f'<line x1="{x[source]}" y1="{y}" x2="{x[target] - side}" y2="{y}" '
                'stroke="#222" marker-end="url(#tip)"/>',
            ]
    return "\n".join([*parts, "</svg>"])


def tables(life_cycle: LifeCycle[Any, Any]) -> str:
    """Return the tables of the states and of the events as reStructuredText."""
    meanings = [(f"``{state}``", getattr(state, "description", "")) for state in life_cycle.states]
    events = [
        (
            f"``{found.event}``",
            " ".join(f"``{state}``" for state in found.sources),
            f"``{found.target}``",
            found.guard,
            found.effects,
        )
        for found in life_cycle.transitions
    ]
    if life_cycle.deletable:
        sources = [f"``{state}``" for state in life_cycle.states if state in life_cycle.deletable]
        events.append(("delete", " ".join(sources), "", "", ""))
    parts = _table(("Event", "In the states", "Leads to", "If", "Effects"), events)
    if any(meaning for _, meaning in meanings):
        parts = [*_table(("State", "Meaning"), meanings), "", *parts]
    return "\n".join(parts)


def _arrows(transition: Transition[Any, Any]) -> tuple[str, list[str], str]:
    return (
        str(transition.event),
        [str(state) for state in transition.sources],
        str(transition.target),
    )


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in [titles, *rows]:
        lines += [f"   {'  ' if n else '* '}- {cell}".rstrip() for n, cell in enumerate(row)]
    return lines


class LifeCycleDirective(SphinxDirective):
    """The chart and the tables of one life cycle; the argument is its key in LIFE_CYCLES."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the chart and the tables. Raise an error of the build for an unknown key."""
        life_cycle = LIFE_CYCLES.get(self.arguments[0])
        if life_cycle is None:
            raise self.error(f"no life cycle {self.arguments[0]}: {', '.join(LIFE_CYCLES)}")
        picture = nodes.raw("", chart(life_cycle), format="html")
        return [picture, *self.parse_text_to_nodes(tables(life_cycle))]


def steps() -> str:
    """Return the table of the steps of attachments as reStructuredText."""
    rows = [
        (
            f"``{mode}``",
            ", ".join(f"``{step}`` (``{undo}``)" for step, undo in flow.attach.items()),
            ", ".join(f"``{step}``" for step in flow.detach),
        )
        for mode, flow in FLOWS.items()
    ]
    titles = (
        "Mode",
        "Steps of the attach, each with the first step of its undo",
        "Steps of the detach",
    )
    return "\n".join(_table(titles, rows))


class AttachmentSteps(SphinxDirective):
    """The table of the steps of attachments."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        return self.parse_text_to_nodes(steps())


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("life-cycle", LifeCycleDirective)
    app.add_directive("attachment-steps", AttachmentSteps)
    return {"version": "1", "parallel_read_safe": True}
