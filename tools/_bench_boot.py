# SPDX-License-Identifier: Apache-2.0
"""``tools/bench boot``: what one server with one accelerator costs, from POST to DELETE."""

import argparse
import json
import logging
import os
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _bench_drive as drive
import _bench_floor as floor
import _bench_others as others
import _bench_stack as stack
import _bench_table as table
import kombu
import pytest

FLOOR_SECONDS = 2.0
LONGEST_WARM_UP = 100


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench."""
    add = parser.add_argument
    add("--mode", choices=sorted(stack.MODES), action="append", help="both unless given")
    add("--concurrency", type=_numbers, default=(1, 8, 32), help="clients at once (1,8,32)")
    add("--others", type=_numbers, default=(0, 1000, 10000), help="(0,1000,10000)")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--cycles", type=int, help="of each cell; else it ends after --seconds")
    limit.add_argument("--seconds", type=float, default=10.0, help="of each cell (%(default)s)")
    add(
        "--auth",
        choices=("keystone", "noauth"),
        default="keystone",
        help="a member's token and Nova's service token, or everyone is an administrator and the "
        "instance's owner is asked of Placement; stand-alone has noauth alone (%(default)s)",
    )
    add("--no-floor", action="store_true", help="leave the floor out")
    add("--trace", action="store_true", help="show on stderr what one cycle sends, in order")
    add("--format", choices=("table", "json", "rst"), default="table")


def run(args: argparse.Namespace) -> int:
    """Run it and print what was found; return the exit status."""
    # oslo.messaging warns of more than ten calls at once, which is what is wanted here.
    logging.disable(logging.WARNING)
    # So that a run which is ended leaves no process and no database behind either.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found: dict[str, Any] = {"machine": machine(), "cells": [], "memory": {}, "floor": []}
    try:
        for mode in args.mode or ("cloud", "standalone"):
            # The path of a unix socket must be short.
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                _mode(args, mode, Path(folder), found)
    except (
        pytest.skip.Exception,
        pytest.fail.Exception,
        OSError,
        kombu.exceptions.KombuError,
    ) as bad:
        say(f"gave up: {bad}")
        return 1
    found["ratios"] = table.ratios(found["cells"])
    if args.format == "json":
        print(json.dumps(found, indent=2))
    else:
        print("\n".join((table.rst if args.format == "rst" else table.text)(found)))
    return 0


def _mode(args: argparse.Namespace, mode: str, folder: Path, found: dict[str, Any]) -> None:
    say(f"{mode}: starting")
    limit = drive.Limit(args.cycles, args.seconds)
    with stack.MODES[mode](folder, args.auth) as bed:
        found["machine"][mode] = drive.versions(bed)
        drive.make_profile(bed)
        warm = min(LONGEST_WARM_UP, 4 * (args.cycles or LONGEST_WARM_UP))
        drive.drive(bed, max(args.concurrency), drive.Limit(warm, 0))
        idle = drive.memory(bed)
        if args.trace:
            for group, thread, text in drive.trace(bed):
                say(f"  {group:<10} {thread:<8} {text}")
        there = 0
        for wanted in sorted(args.others):
            if wanted > there:
                say(f"{mode}: adding {wanted - there} other requests")
                others.add(bed.engine, drive.PROFILE, stack.PROJECT, there, wanted)
                there = wanted
            for concurrency in args.concurrency:
                cell = drive.measure(bed, wanted, concurrency, limit)
                found["cells"].append(cell)
                say(f"{mode}: {table.line(cell)}")
        found["memory"][mode] = {"idle": idle, "after": drive.memory(bed)}
        if not args.no_floor:
            found["floor"] += [_floor(args, bed, folder, n) for n in args.concurrency]


def _floor(args: argparse.Namespace, bed: stack.Bed, folder: Path, n: int) -> dict[str, Any]:
    seconds = min(FLOOR_SECONDS, args.seconds)
    cloud = bed.mode == "cloud"
    threads = stack.THREADS
    one = {
        "mode": bed.mode,
        "concurrency": n,
        "commits_per_second": floor.commits(bed.url, n, seconds),
        "calls_per_second": floor.calls(bed.bus, folder, n, seconds),
        "answers_per_second": floor.answers(
            folder, stack.WORKERS if cloud else 0, threads, n, seconds
        ),
    }
    say(
        f"{bed.mode}: floor at {n}: {one['commits_per_second']:.0f} commits/s, "
        f"{one['calls_per_second']:.0f} calls/s, {one['answers_per_second']:.0f} answers/s"
    )
    return one


def machine() -> dict[str, Any]:
    """Tell what this ran on."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "processors": len(os.sched_getaffinity(0)),
        "model": model,
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def say(line: str) -> None:
    """Tell how far it is."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as bad:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers parted by commas") from bad
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a number is below 0")
    return found
