# SPDX-License-Identifier: Apache-2.0
"""Days of a cloud of HGX H100 hosts with device sets: accepted servers, and fragmentation.

Servers of 1, 2, 4 and 8 GPUs arrive at random and run for exponential times; each policy gets the
same ones. disjoint and all are the offer modes, random schedules GPUs without sets. perfect sees
all GPUs at once, and has neither delays nor races; migrating also moves all servers at each
arrival, so that it is an upper bound. The time is simulated; equal options have equal results.

With --reservations, binds of sets in a cloud of real processes are measured instead: how long until
the sets that overlap a bound one are reserved in Placement. This needs MariaDB and RabbitMQ.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import report
from cyborg.tests.fixtures.device_sets.policies import POLICIES
from cyborg.tests.fixtures.device_sets.simulation import SIZES, UNITS, Cloud, Figures, Options

HOUR = 3600
SPLIT_SIZES = SIZES[1:]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add = parser.add_argument
    add("--hosts", type=int, default=200, help="with 8 GPUs each (%(default)s)")
    add("--days", type=int, default=10, help="independent ones, that are added (%(default)s)")
    add("--hours", type=int, default=24, help="measured on each day (%(default)s)")
    add("--warm-up", type=int, default=8, help="hours before, from an empty cloud (%(default)s)")
    add("--life", type=float, default=2.0, help="mean hours of a server (%(default)s)")
    load = "GPUs of all servers that arrive, as a share of those of the cloud (0.95 1.3)"
    add("--load", type=float, nargs="+", default=[0.95, 1.3], help=load)
    wanted = "sizes and numbers of the sets that the group of all hosts offers (%(default)s)"
    add("--wanted", default="8:1,4:1,2:2,1:2", help=wanted)
    add("--policy", nargs="+", choices=POLICIES, default=list(POLICIES), help="(all)")
    reservations = "measure so many binds of each size with real services instead"
    add("--reservations", type=int, metavar="NUMBER", help=reservations)
    add("--seed", type=int, default=1, help="of the first day (%(default)s)")


def measure(args: argparse.Namespace, folder: Path) -> report.Results:
    """Simulate the days of each load with each policy."""
    if args.reservations is not None:
        # A late import: the simulation needs none of the services.
        from cyborg.tests.fixtures.device_sets.reservations import measure_reservations

        return {"reservations": asdict(measure_reservations(folder, args.reservations))}
    pairs = [pair.partition(":") for pair in args.wanted.split(",") if pair]
    options = Options(
        hosts=args.hosts,
        load=0.0,
        duration=args.hours * HOUR,
        life=args.life * HOUR,
        warm_up=args.warm_up * HOUR,
        seed=args.seed,
        wanted={int(size): int(number) for size, _, number in pairs},
    )
    cells = []
    for load in args.load:
        for name in args.policy:
            total = Figures()
            for day in range(args.days):
                cloud = Cloud(replace(options, load=load, seed=args.seed + day))
                total.add(cloud.run(POLICIES[name](cloud)))
            report.say(f"load {load:g}: {name}: done")
            cells.append({"load": load, "policy": name, **_results(args, name, total)})
    return {"cells": cells, "options": asdict(options), "days": args.days}


def _results(args: argparse.Namespace, name: str, figures: Figures) -> report.Results:
    """Return the results of a policy; a share is None where it has no meaning."""
    hours = range(args.warm_up, args.warm_up + args.hours)
    # Servers that are moved at will are on no host.
    placed = name != "migrating"
    every = range(args.warm_up + args.hours)
    return {
        "requested": dict(figures.requested),
        "accepted": dict(figures.accepted),
        "failed": dict(figures.failed),
        "acceptance": {size: figures.acceptance(size) for size in SIZES},
        "acceptance_all": figures.accepted.total() / max(1, figures.requested.total()),
        "used": 1 - figures.free_units(hours) / (args.hosts * len(UNITS)) if placed else None,
        "unusable": {
            size: figures.fragmentation(size, hours) if placed else None for size in SPLIT_SIZES
        },
        "unusable_by_hour": {
            size: [figures.fragmentation(size, [hour]) if placed else None for hour in every]
            for size in SPLIT_SIZES
        },
    }


def summarize(results: report.Results) -> str:
    """Return the rest of the first line."""
    if "reservations" in results:
        return "; two hosts, offer = all, one bind at a time."
    options = results["options"]
    wanted = ", ".join(f"{number} of {size}" for size, number in options["wanted"].items())
    return (
        f"; {options['hosts']} hosts, {results['days']} days of"
        f" {options['duration'] / HOUR:g} hours, servers of {options['life'] / HOUR:g} hours;"
        f" wanted: {wanted}."
    )


def tables(results: report.Results) -> Iterator[report.Table]:
    """Yield the tables of each load: accepted servers, and fragmentation by the hour."""
    if "reservations" in results:
        yield _reservations(results["reservations"])
        return
    cells = results["cells"]
    for load in dict.fromkeys(cell["load"] for cell in cells):
        found = [cell for cell in cells if cell["load"] == load]
        yield report.Table(
            f"Load {load:.0%}: accepted servers by GPUs, and free GPUs that are no use for a size",
            [
                *("Policy", *(f"Accepted: {size}" for size in SIZES), "all", "GPUs used"),
                *(f"No use for {size}" for size in SPLIT_SIZES),
                "Boots failed",
            ],
            [
                [
                    cell["policy"],
                    *(_percent(cell["acceptance"][size]) for size in SIZES),
                    *(_percent(cell["acceptance_all"]), _percent(cell["used"])),
                    *(_percent(cell["unusable"][size]) for size in SPLIT_SIZES),
                    str(sum(cell["failed"].values())),
                ]
                for cell in found
            ],
        )
        by_policy = {cell["policy"]: cell for cell in found}
        if {"disjoint", "perfect"} <= by_policy.keys():
            own, best = (by_policy[name]["acceptance"] for name in ("disjoint", "perfect"))
            yield report.Table(
                f"Load {load:.0%}: accepted by disjoint, as a share of those by perfect",
                [str(size) for size in SIZES],
                [[_percent(own[n] / best[n] if best[n] else None) for n in SIZES]],
            )
        last = len(found[0]["unusable_by_hour"][SIZES[-1]])
        shown = sorted({*range(1, last, max(1, last // 8)), last - 1})
        yield report.Table(
            f"Load {load:.0%}: free GPUs that are no use for {SIZES[-1]}, by hour from the start",
            ["Policy", *map(str, shown)],
            [
                [
                    cell["policy"],
                    *(_percent(cell["unusable_by_hour"][SIZES[-1]][hour]) for hour in shown),
                ]
                for cell in found
            ],
        )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _reservations(found: report.Results) -> report.Table:
    """Return the table of the times of binds, in milliseconds."""
    rows = []
    for size, seconds in found["reserved"].items():
        ordered, bound = sorted(seconds), sorted(found["bound"][size])
        times = [statistics.median(bound), statistics.median(ordered), ordered[-1]]
        rows.append([str(size), str(len(ordered)), *(f"{1000 * value:.0f}" for value in times)])
    return report.Table(
        "Milliseconds from the request of a bind until its answer, and until each set with one of "
        "its GPUs is reserved in Placement",
        ["GPUs", "Binds", "Answer, median", "Reserved, median", "Reserved, longest"],
        rows,
    )
