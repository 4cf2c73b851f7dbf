# SPDX-License-Identifier: Apache-2.0
"""A view that refreshes on the alternate screen of a terminal until the user quits.

The requests run in a thread, so that a service that does not answer does not delay the keys.
"""

import contextlib
import os
import select
import signal
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Generic, TextIO, TypeVar

from cyborg.cli.terminal.tables import is_terminal

if TYPE_CHECKING:
    from rich.text import Text

T = TypeVar("T")
# Seconds after which the size of the terminal is read again.
POLL_INTERVAL = 0.2
QUIT_KEYS = b"qQ\x03\x04"
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_TERMINALS_WITHOUT_CURSOR = ("", "dumb", "unknown")


class Terminated(BaseException):
    """A signal asks the program to end; ``number`` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Refresher(Generic[T]):
    """Fetches a value again and again in a thread; a failure keeps the last value.

    ``expected`` is the class of errors whose text is for the user.
    """

    def __init__(
        self, fetch: Callable[[], T], first: T, interval: float, expected: type[Exception]
    ) -> None:
        self._fetch = fetch
        self._expected = expected
        self._interval = interval
        self._stop = threading.Event()
        # Replaced as a whole: value, error, and the monotonic time of the value.
        self.state: tuple[T, str | None, float] = (first, None, time.monotonic())
        # A daemon, since a call can take until its timeout after the user has quit.
        self._thread = threading.Thread(target=self._run, name="refresh", daemon=True)

    def start(self) -> None:
        """Begin to fetch, for the first time after one interval."""
        self._thread.start()

    def stop(self) -> None:
        """Do not fetch again."""
        self._stop.set()

    def _run(self) -> None:
        """Fetch until ``stop``; keep the value and its time if a fetch fails."""
        while not self._stop.wait(self._interval):
            value, _, at = self.state
            error: str | None = None
            try:
                value, at = self._fetch(), time.monotonic()
            except self._expected as exc:
                error = str(exc)
            except Exception as exc:  # noqa: BLE001  without this thread nothing is refreshed
                error = f"{type(exc).__name__}: {exc}"
            # One assignment: the other thread never sees a value with the time of another.
            self.state = (value, error, at)


def is_interactive(stdout: TextIO) -> bool:
    """Return whether an output is a terminal whose cursor can be moved."""
    return is_terminal(stdout) and os.environ.get("TERM", "") not in _TERMINALS_WITHOUT_CURSOR


def show_until_quit(
    stdout: TextIO,
    stdin: TextIO,
    refresher: Refresher[T],
    build: Callable[[T, str | None, float, int, int], list["Text"]],
) -> int:
    """Show the lines of ``build`` until q or Ctrl-C; return the exit status.

    ``build`` gets the value, the error of the last try, the seconds since the value was fetched,
    and the columns and rows of the terminal. The terminal is restored in any case. The status is
    0, or 128 and the number of the signal that ended the view.
    """
    try:
        with _end_by_exception(), _single_keys(stdin) as keyboard, _screen(stdout) as draw:
            refresher.start()
            while True:
                value, error, at = refresher.state
                draw(lambda w, h: build(value, error, time.monotonic() - at, w, h))  # noqa: B023
                if _read_quit(keyboard):
                    return 0
    except KeyboardInterrupt:
        return 0
    except Terminated as exc:
        return 128 + exc.number
    finally:
        refresher.stop()


@contextlib.contextmanager
def _end_by_exception() -> Iterator[None]:
    """Raise Terminated in the main thread for the signals that end a process."""

    def end(number: int, frame: FrameType | None) -> None:
        # A second signal would interrupt the restore of the terminal.
        for each in _END_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Terminated(number)

    former = {number: signal.signal(number, end) for number in _END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _single_keys(stdin: TextIO) -> Iterator[int | None]:
    """Yield the descriptor of the keyboard, which then gives each key; None without a terminal."""
    try:
        descriptor = stdin.fileno()
        former = termios.tcgetattr(descriptor)
    except (OSError, ValueError, AttributeError, termios.error):
        yield None
        return
    try:
        tty.setcbreak(descriptor, termios.TCSADRAIN)
        changed = termios.tcgetattr(descriptor)
        # No key stops the program: it would leave the shell on the alternate screen.
        changed[tty.CC][termios.VSUSP] = b"\0"
        termios.tcsetattr(descriptor, termios.TCSADRAIN, changed)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, former)


@contextlib.contextmanager
def _screen(stdout: TextIO) -> Iterator[Callable[[Callable[[int, int], list["Text"]]], None]]:
    """Yield a function that draws lines on the alternate screen; they are made for its size."""
    from rich.console import Console, Group
    from rich.live import Live

    # With a size, the console does not read the variables COLUMNS and LINES.
    console = Console(file=stdout, force_terminal=True, width=80, height=24, legacy_windows=False)
    drawn: tuple[object, ...] = ()
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def draw(build: Callable[[int, int], list["Text"]]) -> None:
            nonlocal drawn
            # A terminal without a size, such as a serial console, has 0 columns and lines.
            size = os.get_terminal_size(stdout.fileno())
            width, height = size.columns or 80, size.lines or 24
            console.size = (width, height)
            lines = build(width, height)
            shown = (width, height, *((line.plain, *line.spans) for line in lines))
            if shown != drawn:
                drawn = shown
                live.update(Group(*lines), refresh=True)

        yield draw


def _read_quit(keyboard: int | None) -> bool:
    """Wait for a key for up to POLL_INTERVAL; return whether it ends the view."""
    if keyboard is None:
        time.sleep(POLL_INTERVAL)
        return False
    ready, _, _ = select.select([keyboard], [], [], POLL_INTERVAL)
    if not ready:
        return False
    keys = os.read(keyboard, 1024)
    # The end of the input: the terminal is gone.
    return not keys or any(key in QUIT_KEYS for key in keys)
