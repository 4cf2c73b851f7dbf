# SPDX-License-Identifier: Apache-2.0
"""``cyborg top``: hosts, resource classes, alarms and work, refreshed until the user quits."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from cyborg.cli.common import base
from cyborg.cli.common.base import Arguments, argument, flag
from cyborg.cli.common.formatting import SHORT_UUID, UUID
from cyborg.cli.common.listing import DEFAULT_INTERVAL, parse_interval
from cyborg.cli.common.rest import CommandError, RestClient, Row
from cyborg.cli.terminal import live
from cyborg.cli.views import text
from cyborg.cli.views.text import Canvas, Part, format_age

if TYPE_CHECKING:
    from rich.text import Text

# Maximum number of jobs, and of discoveries, in one refresh.
MAX_JOBS = 16
# Below this width, a resource class has two lines.
NARROW = 60
# Limits of the length of a bar in characters; a shorter bar is not shown.
MIN_BAR, MAX_BAR = 4, 60
NO_LIMIT = 10**9  # lines

_GOOD, _WARN, _BAD = "green", "yellow", "bold red"
_USES = (("owned", "cyan"), ("dirty", _WARN), ("unavailable", "magenta"), ("free", "dim"))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The answers of the service for one refresh."""

    summary: Row
    jobs: list[dict[str, Any]]
    discoveries: list[dict[str, Any]]


def fetch_snapshot(rest: RestClient) -> Snapshot:
    """Make the requests of one refresh: three at any size of the cloud. Raise CommandError."""
    summary = rest.call("GET", "/summary")
    jobs = rest.call("GET", "/jobs", params={"state": "pending", "limit": MAX_JOBS})
    running = {"state": "IN-PROGRESS", "limit": MAX_JOBS}
    discoveries = rest.call("GET", "/discoveries", params=running)
    return Snapshot(summary, jobs["jobs"], discoveries["discoveries"])


def build_lines(snapshot: Snapshot, canvas: Canvas, height: int | None = None) -> list["Text"]:
    """Return the lines of the view: at most ``height``, None for all."""
    summary = snapshot.summary
    head = [*_hosts(summary, canvas), *_objects(summary, canvas)]
    classes = list(_classes(summary, canvas))
    alarms = [canvas.build_line((f"! {text}", _BAD)) for text in _alarms(summary)]
    num_alarms = len(alarms) + _unnamed_alarms(summary)
    work = [*_jobs(snapshot, canvas), *_discoveries(snapshot, canvas)]
    open_jobs = sum(job["count"] for job in summary["jobs"])
    num_work = max(len(work), open_jobs + len(snapshot.discoveries))
    # The lines of the three sections, without their titles.
    room = NO_LIMIT if height is None else height - len(head) - 3
    # Alarms get at most a half; of the rest, classes leave a third for work, if needed.
    alarms = canvas.limit_lines(alarms, room // 2, num_alarms, "alarms")
    room -= len(alarms)
    lines_per_class = 1 if canvas.width >= NARROW else 2
    fitting = (room - min(num_work, max(1, room // 3))) // lines_per_class
    if len(classes) > fitting * lines_per_class:
        # One line less: it says how many are missing.
        shown = max(0, fitting - 1)
        more = f"  {len(summary['resource_classes']) - shown} more resource classes"
        classes = [*classes[: shown * lines_per_class], canvas.build_line((more, "dim"))]
    work = canvas.limit_lines(work, room - len(classes), num_work, "jobs")
    lines = [
        *head,
        *_title("Alarms", canvas, alarms),
        *_title("Resource classes", canvas, classes),
        *_title("Work under way", canvas, work),
    ]
    return lines if height is None else lines[:height]


def _title(title: str, canvas: Canvas, lines: list["Text"]) -> list["Text"]:
    empty: list[Part] = [] if lines else ["  ", ("none", "dim")]
    return [canvas.build_line((title, "bold underline"), *empty), *lines]


def _hosts(summary: Row, canvas: Canvas) -> list["Text"]:
    """Return the numbers of hosts by state of their agents, and of the other daemons by state."""
    hosts = summary["hosts"]
    items: list[Part] = [
        (f"{hosts['up']} up", _GOOD),
        (f"{hosts['late']} late", _WARN if hosts["late"] else "dim"),
        (f"{hosts['down']} down", _BAD if hosts["down"] else "dim"),
    ]
    if hosts["cordoned"]:
        items.append((f"{hosts['cordoned']} cordoned", _WARN))
    lines = canvas.build_flow("Hosts", items)
    services: dict[str, list[Part]] = {}
    for row in summary["services"]:
        if row["binary"] != "cyborg-agent" and row["count"]:
            style = {"up": _GOOD, "late": _WARN}.get(row["state"], _BAD)
            name = str(row["binary"]).removeprefix("cyborg-")
            services.setdefault(name, []).append((f"{name} {row['count']} {row['state']}", style))
    items = [item for name in sorted(services) for item in services[name]]
    return [*lines, *canvas.build_flow("Services", items or [("none", "dim")])]


def _objects(summary: Row, canvas: Canvas) -> list["Text"]:
    """Return the numbers of devices, requests and contexts; of devices those that are not ready."""
    devices = summary["devices"]
    items: list[Part] = [f"{devices['total']}"]
    items += [
        (f"{devices[name]} {text}", style)
        for name, text, style in (
            ("disabled", "disabled", _WARN),
            ("unhealthy", "unhealthy", _BAD),
            ("maintenance", "in maintenance", _WARN),
        )
        if devices[name]
    ]
    lines = canvas.build_flow("Devices", items)
    for label, key in (("Requests", "accelerator_requests"), ("Contexts", "device_contexts")):
        lines += canvas.build_flow(label, _format_counts(summary[key]) or [("none", "dim")])
    return lines


def _classes(summary: Row, canvas: Canvas) -> Iterator["Text"]:
    """Yield a bar of uses for each resource class; two lines if the view is narrow."""
    width, glyphs = canvas.width, canvas.glyphs
    rows = [_count_uses(row) for row in summary["resource_classes"]]
    name_width = min(max((len(row["resource_class"]) for row in rows), default=0), width // 3)
    all_counts = [_numbers(row) for row in rows]
    counts_width = max(map(len, all_counts), default=0)
    for row, counts in zip(rows, all_counts, strict=True):
        name = str(row["resource_class"])
        if width < NARROW:
            yield canvas.build_line(name)
            size = max(0, width - 3 - len(counts))
            yield canvas.build_line("  ", *_bar(row, size, glyphs), " ", counts)
            continue
        shown = name if len(name) <= name_width else name[: name_width - 1] + glyphs.ellipsis
        # All bars have the same length; blanks separate name, bar and counts.
        size = min(MAX_BAR, width - name_width - counts_width - 2)
        yield canvas.build_line(f"{shown:<{name_width}} ", *_bar(row, size, glyphs), " ", counts)


def _count_uses(row: Row) -> dict[str, Any]:
    """Add the number of unavailable handles: they have no owner, but are not free either."""
    # One number for two reasons: a line of 80 characters must have a bar, too.
    # An API of the release before counts cordoned handles as free.
    return {**row, "unavailable": row["draining"] + row.get("cordoned", 0)}


def _numbers(row: Row) -> str:
    text = f"{row['owned']}/{row['total']} owned, {row['free']} free"
    more = (f", {row[use]} {use}" for use in ("dirty", "unavailable") if row[use])
    return text + "".join(more)


def _bar(row: Row, size: int, glyphs: text.Glyphs) -> list[Part]:
    """Return a bar of ``size`` characters; a use with at least one handle has at least one."""
    total = row["total"]
    if size < MIN_BAR:
        return []
    if not total:
        return [" " * size]
    sizes = [-(-row[use] * size // total) for use, _ in _USES]
    # Rounded up, so that the largest give back what is too much.
    for _ in range(sum(sizes) - size):
        sizes[sizes.index(max(sizes))] -= 1
    return [
        (character * length, style)
        for (_, style), character, length in zip(_USES, glyphs.bar, sizes, strict=True)
    ]


def _alarms(summary: Row) -> Iterator[str]:
    """Yield what needs attention; lists of objects come last."""
    age = partial(_age, summary)
    for row in summary["outbox"]:
        if row["state"] == "dead":
            noun = "dead letter" if row["count"] == 1 else "dead letters"
            yield f"{row['count']} {noun} of {row['kind']}, the oldest for {age(row['oldest'])}"
    for row in summary["jobs"]:
        if row["overdue"]:
            yield f"{row['overdue']} of {row['count']} {row['kind']} jobs past the deadline"
    if summary["providers"]["failing"]:
        yield f"{summary['providers']['failing']} resource providers failing in Placement"
    if missing := summary["guest_devices_missing"]:
        noun = "device that its running guest lacks" if missing == 1 else "devices that guests lack"
        yield f"{missing} {noun}: cyborg arq-list --attach-failed true"
    for row in summary["down_services"]:
        yield f"{row['binary']} on {row['host']} down, last seen {age(row['last_seen_at'])} ago"
    for row in summary["unhealthy_devices"]:
        yield f"{row['host']} {row['address']} unhealthy for {age(row['health_since'])}"


def _unnamed_alarms(summary: Row) -> int:
    """Return how many daemons are down, and devices unhealthy, without being in the lists."""
    down: int = sum(row["count"] for row in summary["services"] if row["state"] == "down")
    unhealthy: int = summary["devices"]["unhealthy"]
    unnamed_services = max(0, down - len(summary["down_services"]))
    return unnamed_services + max(0, unhealthy - len(summary["unhealthy_devices"]))


def _jobs(snapshot: Snapshot, canvas: Canvas) -> Iterator["Text"]:
    """Yield a line for each job: subject, host, age, activity or counts of its steps, and error."""
    for job in snapshot.jobs:
        place = f" on {job['host']}" if job["host"] else ""
        doing = ", ".join(_format_counts(job["progress"]))
        if activity := job.get("activity"):
            share = f" {activity['done']}/{activity['total']}" if activity["total"] else ""
            doing = f"{activity['step']}{share}"
        age = _age(snapshot.summary, job["created_at"])
        parts: list[Part] = [(f"{job['kind']}", "cyan"), f" {_short(job['subject'])}{place}, {age}"]
        parts += [f": {doing}"] if doing else []
        parts += [(f", error: {job['error']}", _BAD)] if job["error"] else []
        yield canvas.build_line(*parts)


def _discoveries(snapshot: Snapshot, canvas: Canvas) -> Iterator["Text"]:
    for row in snapshot.discoveries:
        age = _age(snapshot.summary, row["created_at"])
        steps = ", ".join(_format_counts(row["progress"]))
        yield canvas.build_line(("discovery", "cyan"), f" {_short(row['uuid'])}, {age}: {steps}")


def _short(text: str) -> str:
    """Return a text, a uuid as its first digits."""
    return text[:SHORT_UUID] if UUID.fullmatch(text) else text


def _format_counts(counts: Mapping[str, int]) -> list[str]:
    return [f"{count} {state}" for state, count in sorted(counts.items()) if count]


def _age(summary: Row, time: str) -> str:
    """Return the age of a time at the time of the summary."""
    # The clock of the service: that of this machine can differ.
    age = datetime.fromisoformat(summary["read_at"]) - datetime.fromisoformat(time)
    return format_age(age.total_seconds())


class Top(base.WaitCommand):
    """Show hosts, resource classes, alarms and work under way, and refresh until q is pressed.

    If the output is no terminal, or with --once, the state is printed once. For administrators.
    """

    ARGUMENTS = (
        argument(
            "--interval",
            type=parse_interval,
            default=DEFAULT_INTERVAL,
            metavar="SECONDS",
            help="seconds between two refreshes, 2 by default",
        ),
        flag("--once", "print the state once"),
        text.FORMAT,
    )

    def take_action(self, args: Arguments) -> None:
        """Show the state."""
        stdout, rest = self.app.stdout, self.app.rest
        # Fetched once before the screen changes: most errors are those of the first request.
        first = fetch_snapshot(rest)
        if args.format == "json":
            # Not asdict: it copies each dictionary, and a Response cannot be made without its URL.
            document = {field.name: getattr(first, field.name) for field in fields(first)}
            stdout.write(json.dumps(document, indent=2) + "\n")
        elif args.once or not live.is_interactive(stdout):
            text.write_lines(stdout, build_lines(first, text.make_canvas(stdout)))
        else:
            glyphs, interval = text.make_canvas(stdout).glyphs, args.interval

            def build(
                found: Snapshot, error: str | None, seconds: float, width: int, height: int
            ) -> list["Text"]:
                # The terminal may have another size at each refresh.
                canvas = Canvas(width, glyphs)
                title = build_title(found, error, seconds, interval, canvas)
                return [title, *build_lines(found, canvas, height - 1)]

            refresher = live.Refresher(lambda: fetch_snapshot(rest), first, interval, CommandError)
            stdin: Any = getattr(self.app, "stdin", None) or sys.stdin
            self._status = live.show_until_quit(stdout, stdin, refresher, build)


def build_title(
    snapshot: Snapshot, error: str | None, seconds: float, interval: float, canvas: Canvas
) -> "Text":
    """Return the first line: the time of the data, or the error of the last refresh."""
    read_at = snapshot.summary["read_at"][:19]
    if error is not None:
        age = format_age(seconds)
        return canvas.build_line((f"data of {age} ago: {error}", "bold white on red"))
    count_age = snapshot.summary["count_age"]
    note = f", counts {format_age(count_age)} old" if count_age else ""
    text = f"cyborg top  {read_at}Z, every {interval:g} s{note}  q quits"
    return canvas.build_line((text, "reverse"))
