# SPDX-License-Identifier: Apache-2.0
"""The findings of ``tools/bench boot`` as text, and as tables of the documentation."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Found = Mapping[str, Any]
Table = tuple[str, Sequence[str], list[list[str]]]
"""Title, head and rows."""

TITLES = {"cloud": "MariaDB and RabbitMQ", "standalone": "Stand-alone"}
OUR_CPU = ("api", "conductor", "database", "standalone")
"""Whose CPU time the figure to reach adds up; in the stand-alone service that is one process."""


def our_cpu(cell: Found) -> float:
    """Return the CPU time of API, conductor and database for one cycle, in ms."""
    return float(sum(ms for group, ms in cell["cpu_ms"].items() if group in OUR_CPU))


def all_statements(cell: Found) -> float:
    """Return the statements of one cycle, its event's delivery among them."""
    return float(cell["statements"] + cell["statements_outbox"])


def line(cell: Found) -> str:
    """Return a cell in one line."""
    return (
        f"{cell['others']} others, {cell['concurrency']} at once: {cell['cycles']} cycles, "
        f"{cell['cycles_per_second']:.1f}/s, p50 {cell['p50_ms']:.0f} ms, "
        f"p99 {cell['p99_ms']:.0f} ms, statements {cell['statements']:.1f} "
        f"+ {cell['statements_outbox']:.1f}, CPU {our_cpu(cell):.1f} ms"
    )


def ratios(cells: Sequence[Found]) -> list[dict[str, Any]]:
    """Return what is left of the throughput with the most others, for each mode and concurrency."""
    found = []
    for mode, concurrency in sorted({(c["mode"], c["concurrency"]) for c in cells}):
        row = [c for c in cells if (c["mode"], c["concurrency"]) == (mode, concurrency)]
        few, many = row[0], row[-1]
        if few is not many:
            found.append(
                {
                    "mode": mode,
                    "concurrency": concurrency,
                    "others": [few["others"], many["others"]],
                    "throughput": many["cycles_per_second"] / few["cycles_per_second"],
                    "statements": all_statements(many) / all_statements(few),
                }
            )
    return found


def _in_answers(found: Found, floor: Found) -> float:
    """Return the CPU time of a cycle, the least of any number of others, in time of bare answers.

    So that machines of different speed can be compared.
    """
    same = ("mode", "concurrency")
    cells = [c for c in found["cells"] if all(c[key] == floor[key] for key in same)]
    return min(map(our_cpu, cells)) / 1000 * float(floor["answers_per_second"])


def _tables(found: Found) -> Iterator[Table]:
    """Yield title, head and rows of each table."""
    for mode, title in TITLES.items():
        cells = [cell for cell in found["cells"] if cell["mode"] == mode]
        if not cells:
            continue
        groups = list(cells[0]["cpu_ms"])
        head = ["Others", "At once", "Cycles/s", "p50 ms", "p99 ms", "Statements", "Outbox"]
        head += ["Other work", "Pings", "RPC", *(f"CPU {group}" for group in groups), "CPU sum"]
        rows = [
            [
                *(str(cell["others"]), str(cell["concurrency"])),
                *(f"{cell[key]:.1f}" for key in ("cycles_per_second", "p50_ms", "p99_ms")),
                *(f"{cell[key]:.2f}" for key in ("statements", "statements_outbox")),
                *(f"{cell[key]:.2f}" for key in ("statements_other", "pings")),
                f"{sum(cell['rpc'].values()):.2f}",
                *(f"{cell['cpu_ms'].get(group, float('nan')):.1f}" for group in groups),
                f"{our_cpu(cell):.1f}",
            ]
            for cell in cells
        ]
        yield f"{title}: each figure but the first three is of one cycle", head, rows
    if found["floor"]:
        head = ["Mode", "At once", "Commits/s", "Bare calls/s", "Bare answers/s"]
        head += ["CPU sum in bare answers"]
        keys = ("commits_per_second", "calls_per_second", "answers_per_second")
        rows = [
            [
                *(one["mode"], str(one["concurrency"]), *(f"{one[key]:.0f}" for key in keys)),
                f"{_in_answers(found, one):.0f}",
            ]
            for one in found["floor"]
        ]
        yield "The floor, measured in the same run", head, rows
    if found["ratios"]:
        rows = [
            [
                *(one["mode"], str(one["concurrency"]), f"{one['others'][1]}/{one['others'][0]}"),
                *(f"{one['throughput']:.2f}", f"{one['statements']:.2f}"),
            ]
            for one in found["ratios"]
        ]
        head = ["Mode", "At once", "Others", "Throughput", "Statements"]
        yield "What the other requests change: many over few", head, rows
    rows = [
        [mode, group, *(f"{mb:.0f}" for when in ("idle", "after") for mb in when_of[when][group])]
        for mode, when_of in found["memory"].items()
        for group in when_of["idle"]
    ]
    head = ["Mode", "Process", "RSS idle", "PSS idle", "RSS after", "PSS after"]
    yield "Memory of the largest process of a kind, MB", head, rows


def text(found: Found) -> Iterator[str]:
    """Yield the lines of all tables."""
    yield _machine(found)
    yield from as_text(_tables(found))


def rst(found: Found) -> Iterator[str]:
    """Yield the lines of all tables as reStructuredText."""
    yield _machine(found)
    yield from as_rst(_tables(found))


def as_text(tables: Iterable[Table]) -> Iterator[str]:
    """Yield the lines of tables."""
    for title, head, rows in tables:
        widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
        yield ""
        yield title
        for row in (head, *rows):
            yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def as_rst(tables: Iterable[Table]) -> Iterator[str]:
    """Yield the lines of tables as reStructuredText."""
    for title, head, rows in tables:
        yield ""
        yield f".. list-table:: {title}"
        yield "   :header-rows: 1"
        yield ""
        for row in (head, *rows):
            for n, cell in enumerate(row):
                yield f"   {'-' if n else '* -'} {cell}".replace("   -", "     -", 1)


def processors(about: Found) -> str:
    """Tell in words what ``_bench_boot.machine`` found."""
    return f"{about['processors']} processors ({about['model']}), Python {about['python']}"


def _machine(found: Found) -> str:
    about = found["machine"]
    servers = {name for mode in TITLES if mode in about for name in about[mode]}
    with_ = f", {', '.join(sorted(servers))}" if servers else ""
    median = statistics.median(cell["cycles"] for cell in found["cells"])
    return (
        f"{processors(about)}{with_}; "
        f"the load was {about['load']:.1f} before; a cell has {median:.0f} cycles (median)."
    )
