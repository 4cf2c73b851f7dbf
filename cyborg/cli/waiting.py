# SPDX-License-Identifier: Apache-2.0
"""Waiting for work of the service, with its progress on stderr."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cyborg.cli.answers import Refused

TRIES = 5  # questions one after another that may fail


@dataclass(frozen=True, slots=True)
class Progress:
    """How far some work is: ``late`` is what to say when it takes too long, None when it is over.

    ``total`` is 0 while nobody knows it. ``lines`` tell how each part is; one that has not been
    told before is written down.
    """

    done: int
    total: int
    late: str | None
    lines: Sequence[str] = ()


def wait(
    ask: Callable[[], dict[str, Any]],
    look: Callable[[dict[str, Any]], Progress],
    what: str,
    *,
    within: float,
    pause: float,
    counted: bool = False,
) -> dict[str, Any]:
    """Ask every ``pause`` seconds until the work is over; return the last answer.

    ``counted`` shows the numbers beside the bar. The work goes on whether or not a question is
    answered: a few may fail before this gives up. Raises Refused then, and after ``within``
    seconds.
    """
    from rich import console, progress

    end = time.monotonic() + within
    columns = progress.Progress.get_default_columns()
    bar = progress.Progress(
        *(*columns, progress.MofNCompleteColumn()) if counted else columns,
        console=console.Console(stderr=True),
        transient=True,
    )
    told: set[str] = set()
    late, failed = "nothing was heard", 0
    with bar:
        task = bar.add_task(what, total=None)
        while True:
            try:
                found = ask()
            except Refused:
                failed += 1
                if failed >= TRIES or time.monotonic() > end:
                    raise
            else:
                failed, now = 0, look(found)
                for line in now.lines:
                    if line not in told:
                        told.add(line)
                        bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
                bar.update(task, completed=now.done, total=now.total or None)
                if now.late is None:
                    return found
                late = now.late
            if time.monotonic() > end:
                raise Refused(f"{late} after {within:g} s")
            # After each failure longer: what is away may need a moment to return.
            time.sleep(max(0.0, min(pause * 2**failed, end - time.monotonic())))
