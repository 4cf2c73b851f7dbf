# SPDX-License-Identifier: Apache-2.0
"""Boot, heartbeat, report and publishing of another revision and of this work tree, interleaved.

Each round measures both, in turns which one first. The ratio of a figure is the median over the
rounds: what the machine does beside it changes both alike. The exit status is 1 if a figure of
this work tree is higher by more than the limit. The packages are those of this environment.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks import report

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS: Mapping[str, tuple[str, ...]] = {
    "boot": ("--auth", "noauth", "--concurrency", "1", "--others", "0", "--no-floor"),
    "hello": ("--devices", "8"),
    "inventory": ("--devices", "8"),
}
# The figures of a cell; less is better for each.
FIGURES = (
    *("statements", "statements_outbox", "cpu_ms", "ms", "calls"),
    *(
        f"{step}_{unit}"
        for step in ("hello", "report", "publishing")
        for unit in ("statements", "ms")
    ),
)


class Figure(NamedTuple):
    """What is compared: a figure of a cell of a benchmark."""

    benchmark: str
    cell: str
    name: str


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("revision", help="of git, such as a tag")
    add("--rounds", type=int, default=5, help="(%(default)s)")
    add("--cycles", type=int, default=100, help="boots of a round (%(default)s)")
    add("--mode", choices=("cloud", "standalone"), default="standalone", help="(%(default)s)")
    add("--limit", type=float, default=10.0, help="percent (%(default)s)")


def measure(args: argparse.Namespace, folder: Path) -> report.Results:
    """Measure both revisions in rounds."""
    other = folder / "tree"
    for command in (
        ("clone", "-q", "--no-checkout", ROOT, other),
        ("-C", other, "checkout", "-q", "--detach", args.revision),
    ):
        subprocess.run(["git", *command], check=True)
    found: dict[Path, dict[Figure, list[float]]] = {
        tree: defaultdict(list) for tree in (other, ROOT)
    }
    for number in range(args.rounds):
        for tree in (other, ROOT) if number % 2 else (ROOT, other):
            for figure, value in _measure_tree(tree, args):
                found[tree][figure].append(value)
        report.say(f"round {number + 1} of {args.rounds}: done")
    cells = [
        _compare(figure, found[other][figure], values)
        for figure, values in found[ROOT].items()
        # A benchmark that the other revision does not have, or whose cells differ.
        if len(found[other][figure]) == len(values)
    ]
    left_out = {figure for values in found.values() for figure in values} - {
        Figure(cell["benchmark"], cell["cell"], cell["name"]) for cell in cells
    }
    for figure in sorted(left_out):
        report.say(f"{figure.benchmark}, {figure.cell}: only one revision has {figure.name}")
    higher = [cell for cell in cells if cell["ratio"] > 1 + args.limit / 100]
    for cell in higher:
        report.say("{benchmark}, {cell}: {name} is {ratio:.2f} times that before".format(**cell))
    return {
        "cells": cells,
        "revision": args.revision,
        "rounds": args.rounds,
        "failed": bool(higher) or not cells,
    }


def _measure_tree(tree: Path, args: argparse.Namespace) -> Iterator[tuple[Figure, float]]:
    """Run the benchmarks of a tree once; yield their figures."""
    for name, options in BENCHMARKS.items():
        words = [name, *options, "--format", "json"]
        if name == "boot":
            words += ["--mode", args.mode, "--cycles", str(args.cycles)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", *words],
            cwd=tree,
            # Before the project that is installed in this environment.
            env={**os.environ, "PYTHONPATH": f"{tree / 'tools'}:{tree}"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            report.say(done.stderr)
            raise OSError(f"benchmark {name} of {tree} ended with {done.returncode}")
        for cell in json.loads(done.stdout)["cells"]:
            values = dict(cell)
            if "cpu_ms" in cell:
                values["cpu_ms"] = sum(cell["cpu_ms"].values())
            place = ", ".join(f"{values[key]}" for key in ("mode", "what") if key in values)
            for figure in FIGURES:
                if values.get(figure) is not None:
                    yield Figure(name, place, figure), values[figure]


def _compare(figure: Figure, old: list[float], new: list[float]) -> report.Results:
    """Return a line of the table."""
    ratios = [
        after / before if before else math.inf if after else 1.0
        for before, after in zip(old, new, strict=True)
    ]
    return {
        **figure._asdict(),
        "old": statistics.median(old),
        "new": statistics.median(new),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def summarize(results: report.Results) -> str:
    """Return the rest of the first line."""
    return f"; this work tree against {results['revision']}, {results['rounds']} rounds."


def tables(results: report.Results) -> Iterator[report.Table]:
    """Yield the table of all figures."""
    columns = {"Benchmark": "{benchmark}", "Cell": "{cell}", "Figure": "{name}"}
    columns |= {"Before": "{old:.2f}", "Now": "{new:.2f}", "Ratio": "{ratio:.3f}"}
    columns |= {"Lowest": "{lowest:.2f}", "Highest": "{highest:.2f}"}
    yield report.make_table("Medians; ratios of the rounds", columns, results["cells"])
