# SPDX-License-Identifier: Apache-2.0
"""Waiting for work of the service, with its progress on stderr."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cyborg.cli.rest import Refused


@dataclass(frozen=True, slots=True)
class Progress:
    """How far some work is: ``late`` is what to say when it takes too long, None when it is over.

    ``total`` is 0 while nobody knows it.
    """

    done: int
    total: int
    late: str | None


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

    ``counted`` shows the numbers beside the bar. Raises Refused after ``within`` seconds.
    """
    from rich import console, progress

    end = time.monotonic() + within
    columns = progress.Progress.get_default_columns()
    bar = progress.Progress(
        *(*columns, progress.MofNCompleteColumn()) if counted else columns,
        console=console.Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None)
        while True:
            found = ask()
            now = look(found)
            bar.update(task, completed=now.done, total=now.total or None)
            if now.late is None:
                return found
            if time.monotonic() > end:
                raise Refused(f"{now.late} after {within:g} s")
            time.sleep(pause)
