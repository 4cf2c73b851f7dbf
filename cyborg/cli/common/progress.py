# SPDX-License-Identifier: Apache-2.0
"""Durations on the command line, and a progress bar on stderr while work lasts."""

import argparse
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cyborg.cli.common.rest import CommandError
from cyborg.threads.failures import Backoff

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
# No time in ISO 8601 ends with one of these units.
_FROM_NOW = re.compile(r"\+?([0-9]{1,9})([smhd])")


def parse_seconds(text: str) -> float:
    """Parse a duration. Raise ArgumentTypeError, which argparse shows with the argument's name.

    >>> parse_seconds("1.5")
    1.5
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # nan also fails this: no deadline would ever be reached
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return value


def parse_time(text: str, now: datetime | None = None) -> str:
    """Parse a time in ISO 8601, or ``+2h`` or ``2h`` (s, m, h or d): a time from now on.

    ``now`` is for tests. Raise ArgumentTypeError.

    >>> parse_time("+2h", datetime(2030, 1, 31, 12, tzinfo=UTC))
    '2030-01-31T14:00:00+00:00'
    >>> parse_time("90m", datetime(2030, 1, 31, 12, tzinfo=UTC))
    '2030-01-31T13:30:00+00:00'
    >>> parse_time("2030-01-31T14:00:00Z")
    '2030-01-31T14:00:00Z'
    """
    try:
        match = _FROM_NOW.fullmatch(text)
        if match is None:
            datetime.fromisoformat(text)
            # Unchanged: the service reads it, and decides about the time zone.
            return text
        length = timedelta(**{_UNITS[match[2]]: int(match[1])})
        return ((now or datetime.now(UTC)) + length).isoformat(timespec="seconds")
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time: give a time in ISO 8601, such as 2030-01-31T14:00:00Z, or a "
            "duration from now on, such as +90m, +2h or +1d"
        ) from None


MAX_FAILURES = 5  # consecutive failed requests
MAX_INTERVAL = 2.0  # seconds between two requests, unless the first interval is longer
_SHARE = 0.1  # of the time that the work has taken, by which its end may be seen late


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of some work.

    ``pending`` is the error message for a timeout; None means that the work has ended. ``total`` is
    0 if it is unknown. ``lines`` describe the state of each part; each new line is printed once.
    """

    done: int
    total: int
    pending: str | None
    lines: Sequence[str] = ()


def wait_until_done(
    fetch: Callable[[], dict[str, Any]],
    measure: Callable[[dict[str, Any]], Progress],
    title: str,
    *,
    timeout: float,
    interval: float,
    show_counts: bool = False,
) -> dict[str, Any]:
    """Call ``fetch`` until the work has ended; return the last response.

    The pause between two calls is ``interval`` seconds, and grows to MAX_INTERVAL. ``show_counts``
    adds the numbers to the bar. Raise CommandError after MAX_FAILURES consecutive failures of
    ``fetch``, and after ``timeout`` seconds; the work itself continues.
    """
    from rich import console, progress

    started = time.monotonic()
    deadline = started + timeout
    columns = progress.Progress.get_default_columns()
    bar = progress.Progress(
        *(*columns, progress.MofNCompleteColumn()) if show_counts else columns,
        # The output of the command, on stdout, may be read by a script.
        console=console.Console(stderr=True),
        # The result follows in its place.
        transient=True,
    )
    printed: set[str] = set()
    pending, failures = "no response", 0
    # After a failure the service may need time to recover.
    backoff = Backoff(initial=2 * interval, maximum=timeout)
    with bar:
        task = bar.add_task(title, total=None)
        while True:
            try:
                response = fetch()
            except CommandError:
                failures, pause = failures + 1, backoff.next_delay()
                # One failure is no reason to give up: a proxy restarts, a conductor is upgraded.
                if failures >= MAX_FAILURES or time.monotonic() > deadline:
                    raise
            else:
                elapsed = time.monotonic() - started
                pause = max(interval, min(_SHARE * elapsed, MAX_INTERVAL))
                failures, state = 0, measure(response)
                backoff.reset()
                for line in state.lines:
                    # Once each: the bar is redrawn, and a line of the log stays.
                    if line not in printed:
                        printed.add(line)
                        bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
                bar.update(task, completed=state.done, total=state.total or None)
                if state.pending is None:
                    return response
                pending = state.pending
            if time.monotonic() > deadline:
                raise CommandError(f"{pending} after {timeout:g} s")
            # Not beyond the deadline: the last look at the work is then.
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
