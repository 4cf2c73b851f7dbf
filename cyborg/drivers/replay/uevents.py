# SPDX-License-Identifier: Apache-2.0
"""Replay of the uevents that a capture has recorded, at their times since the start of the replay.

``remove`` removes the folder of the device; ``add`` restores it as it was recorded. Other actions
change nothing in the tree: what they changed on the host was not recorded.
"""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from cyborg.core.capture import model
from cyborg.core.capture.model import Capture, Uevent
from cyborg.drivers.replay.files import unpack
from cyborg.drivers.replay.kernel import SimulatedKernel


class RecordedUevents:
    """The uevents of a replayed host; sources share them, so each is replayed once."""

    def __init__(
        self,
        capture: Capture,
        kernel: SimulatedKernel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` is monotonic, in seconds."""
        self._capture = capture
        self._kernel = kernel
        self._clock = clock
        self._begin = clock()
        self._left = sorted(capture.uevents, key=lambda event: event.seconds)

    def open(self, subsystems: Iterable[str]) -> "RecordedSource":
        """Return a source of the uevents of some subsystems, as ``netlink.NetlinkSource``."""
        return RecordedSource(self, frozenset(subsystems))

    def replay_due(self) -> list[Uevent]:
        """Replay the uevents that are due, and return them."""
        with self._kernel.lock:
            elapsed = self._clock() - self._begin
            due: list[Uevent] = []
            while self._left and self._left[0].seconds <= elapsed:
                self._replay(self._left[0])
                due.append(self._left.pop(0))
        return due

    def seconds_left(self) -> float | None:
        """Return the seconds until the next uevent; None after the last."""
        with self._kernel.lock:
            if not self._left:
                return None
            return max(0.0, self._begin + self._left[0].seconds - self._clock())

    def _replay(self, event: Uevent) -> None:
        root = self._kernel.root.parent
        device = f"sys/{event.path.strip('/')}"
        physical = (root / device / "physfn").resolve()
        if event.action == "remove":
            self._kernel.remove_device(Path(root / device).resolve())
            self._kernel.count_virtual_functions(physical)
        elif event.action == "add" and not (root / device).exists():
            unpack(model.select_device(self._capture, device), root)
            self._kernel.count_virtual_functions((root / device / "physfn").resolve())


class RecordedSource:
    """Source of recorded uevents; implements ``agent.backends.netlink.EventSource``."""

    def __init__(self, events: RecordedUevents, subsystems: frozenset[str]) -> None:
        self._events = events
        self._subsystems = subsystems
        self._woken = threading.Event()

    def read(self, seconds: float | None) -> list[str]:
        """Return the subsystems of the uevents that are due; wait up to ``seconds`` for one."""
        due = self._events.replay_due()
        if not due:
            times = (seconds, self._events.seconds_left())
            self._woken.wait(min((t for t in times if t is not None), default=None))
            self._woken.clear()
            due = self._events.replay_due()
        return [event.subsystem for event in due if event.subsystem in self._subsystems]

    def wake(self) -> None:
        """Make ``read`` return soon. Thread-safe."""
        self._woken.set()

    def close(self) -> None:
        """Do nothing: nothing is open."""
