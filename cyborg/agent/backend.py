# SPDX-License-Identifier: Apache-2.0
"""One backend: a loop in a thread of its own that discovers and measures, and a watch over it.

A driver that raises or takes too long puts its own backend into ERROR, and its devices stay as they
were seen last. A call that hangs cannot be ended in Python; its thread is left alone and no other
call is made until it returns, so that a sick driver never costs more than one thread.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oslo_log import log

from cyborg.agent.measuring import Measuring
from cyborg.core import wire
from cyborg.core.device import Device
from cyborg.core.errors import CyborgError, DriverFailed
from cyborg.core.names import is_resource_class, is_trait
from cyborg.core.report import BackendState, BackendStatus
from cyborg.core.text import clean
from cyborg.drivers.base import Driver, Setup

LOG = log.getLogger(__name__)

MAX_ERROR = 1000  # characters of a driver's error that are shown
Done = Callable[[BackendState], None]


@dataclass(frozen=True, slots=True)
class View:
    """A backend's state and devices as of one moment."""

    state: BackendState
    devices: tuple[Device, ...] = ()


class Backend:
    """One configured driver. ``changed`` is called, from any thread, after each new view."""

    def __init__(
        self,
        driver: Driver,
        interval: float,
        timeout: float,
        changed: Callable[[], None] = lambda: None,
        *,
        health_interval: float = 10.0,
        health_quiet: float = 60.0,
        set_up: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``interval`` is between discoveries, ``timeout`` for one of them; both in seconds.

        ``health_interval`` is between measurements, if the driver measures; a device that was sick
        must be well for ``health_quiet``, by ``clock``. ``set_up`` has the driver get the host
        ready before its first discovery, if it can; ``timeout`` is for that, too.
        """
        self.driver = driver
        self.name = driver.backend
        self._interval = interval
        self._timeout = timeout
        self._changed = changed
        self._health_interval = health_interval
        self._measuring = Measuring(driver, health_quiet, clock)
        self._measures = False  # as far as the driver said last
        self._setup: Setup | None = driver if set_up and isinstance(driver, Setup) else None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._number = 0  # of the discovery or measurement that began last
        self._busy = False  # it has not ended
        self._overdue = False  # ... in time
        self._gone = False  # nothing begins any more
        self._next: list[Done] = []
        self._waiting: list[Done] = []
        self._found = View(BackendState(self.name, driver.name, BackendStatus.DISCOVERING))
        self._view = self._found
        self._thread = threading.Thread(target=self._run, name=f"backend-{self.name}", daemon=True)

    @property
    def view(self) -> View:
        """Return what is known now."""
        return self._view

    @property
    def is_set_up(self) -> bool:
        """Tell whether the host is ready for it, as far as that was asked for."""
        return self._setup is None

    def start(self) -> None:
        """Begin, with a discovery at once."""
        self._thread.start()

    def inherit(self, other: "Backend") -> None:
        """Know from before the start which devices were sick under the backend that it replaces."""
        self._measuring.inherit(other._measuring)

    def stop(self) -> None:
        """Begin no more discoveries."""
        self._stopped.set()
        self._wake.set()

    def join(self, seconds: float) -> bool:
        """Wait for what is in progress; tell whether it ended in time."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def rediscover(self, done: Done = lambda _: None) -> None:
        """Have a discovery begin soon; ``done`` gets the state that it, or its hanging, leads to.

        A discovery that is in progress does not count: it may have looked too early. Of a backend
        that was stopped, ``done`` gets the state that it was left in.
        """
        with self._lock:
            idle = self._overdue or self._gone
            if not idle:
                self._next.append(done)
        if idle:
            done(self._view.state)
        self._wake.set()

    def _run(self) -> None:
        while True:
            # In this order: a stop that comes between the two must not be forgotten.
            self._wake.clear()
            if self._stopped.is_set():
                self._leave()
                return
            if self._setup is not None:
                self._watched("setup", self._get_ready, discovers=True)
            if self._setup is None and not self._stopped.is_set():
                self._watched("discovery", self._look, discovers=True)
            self._pause()

    def _leave(self) -> None:
        """Tell those who wait for a discovery that there will be none."""
        with self._lock:
            self._gone = True
            done, self._next = self._next, []
        for tell in done:
            tell(self._view.state)

    def _pause(self) -> None:
        """Wait until the next discovery is due or wanted, and measure meanwhile."""
        end = time.monotonic() + self._interval
        while not self._wake.is_set() and (left := end - time.monotonic()) > 0:
            if not self._measures or left <= self._health_interval:
                # A discovery measures too.
                self._wake.wait(left)
            elif not self._wake.wait(self._health_interval):
                self._watched("measuring health", self._measure)

    def _watched(
        self, what: str, act: Callable[[], View | None], *, discovers: bool = False
    ) -> None:
        """Take the view that an act comes to, or, once that takes too long, an error.

        One that comes to none leaves the word to the act that follows.
        """
        with self._lock:
            self._number += 1
            self._busy = True
            if discovers:
                self._waiting, self._next = self._next, []
        watch = threading.Timer(self._timeout, self._hangs, (self._number, what))
        watch.daemon = True
        watch.start()
        view = act()
        watch.cancel()
        if view is not None:
            self._settle(self._number, view, over=True)
            return
        with self._lock:
            self._busy = self._overdue = False
            self._next, self._waiting = self._waiting + self._next, []

    def _get_ready(self) -> View | None:
        """Have the driver set the host up; return what to show if it cannot."""
        if self._setup is not None:
            try:
                self._setup.setup()
            except BaseException as bad:  # a SystemExit is a failure too
                LOG.debug("%s: setup failed", self.name, exc_info=True)
                return View(self._error(f"setup: {words(bad)}"), self._found.devices)
        self._setup = None
        return None

    def _look(self) -> View:
        """Ask the driver; whatever it does ends here."""
        try:
            devices, complaints = _usable(self.name, self.driver.discover())
            able = frozenset(self.driver.abilities)
            devices = tuple(
                d if d.abilities == able else replace(d, abilities=able) for d in devices
            )
        except BaseException as bad:  # a SystemExit is a failure too
            LOG.debug("%s: discovery failed", self.name, exc_info=True)
            self._found = View(self._error(words(bad)), self._found.devices)
        else:
            error = "; ".join(complaints)[:MAX_ERROR] or None
            state = BackendState(self.name, self.driver.name, BackendStatus.READY, error)
            self._found = View(state, devices)
        # Before anybody sees them: a sick device must not be open for a moment at the start.
        return self._measure()

    def _measure(self) -> View:
        """Return what was discovered last, in the health that it is in now."""
        state, devices = self._found.state, self._found.devices
        try:
            self._measures = self._measuring.look(devices)
        except BaseException as bad:  # a SystemExit is a failure too
            LOG.debug("%s: measuring health failed", self.name, exc_info=True)
            said = [*([state.error] if state.error else []), f"health: {words(bad)}"]
            state = replace(state, error="; ".join(said)[:MAX_ERROR])
        return View(state, self._measuring.over(devices))

    def _hangs(self, number: int, what: str) -> None:
        """Tell that an act takes too long; it may still return some day, and counts then."""
        state = self._error(f"{what} takes longer than {self._timeout:g} s")
        self._settle(number, View(state, self._view.devices))

    def _error(self, message: str) -> BackendState:
        return BackendState(self.name, self.driver.name, BackendStatus.ERROR, message[:MAX_ERROR])

    def _settle(self, number: int, view: View, *, over: bool = False) -> None:
        """Take a new view, unless the act of this number ended before it."""
        with self._lock:
            if number != self._number or not self._busy:
                return
            self._busy, self._overdue = not over, not over
            done, self._waiting = self._waiting, []
            if not over:
                done, self._next = done + self._next, []
            before, self._view = self._view, view
        if view != before:
            LOG.log(
                logging.INFO if view.state.error is None else logging.WARNING,
                "%s: %s, %d devices%s",
                self.name,
                view.state.status,
                len(view.devices),
                f": {view.state.error}" if view.state.error else "",
            )
            self._changed()
        for tell in done:
            tell(view.state)


def words(bad: BaseException) -> str:
    """Return what is shown of what a driver raised."""
    return clean(bad.message if isinstance(bad, CyborgError) else f"{type(bad).__name__}: {bad}")


def _usable(backend: str, found: Sequence[Any]) -> tuple[tuple[Device, ...], list[str]]:
    """Return the devices that can be reported, and why each other one cannot.

    One device that a driver gets wrong must not cost the host its report.
    """
    devices: dict[str, Device] = {}
    complaints: list[str] = []
    for device in found:
        if (wrong := _wrong(backend, device)) is not None:
            complaints.append(wrong)
        elif device.address in devices:
            raise DriverFailed(f"the driver reports the device {device.address} twice")
        else:
            devices[device.address] = device
    return tuple(devices.values()), complaints


def _wrong(backend: str, device: Any) -> str | None:
    if not isinstance(device, Device):
        return f"the driver reports a {type(device).__name__} as a device"
    where = f"device {device.address}"
    if device.backend != backend:
        return f"{where} says that it is of backend {device.backend}"
    for part in device.deployables:
        if not is_resource_class(part.resource_class):
            return f"{where} has the resource class {part.resource_class}: not one of Placement's"
        if unknown := sorted(name for name in part.traits if not is_trait(name)):
            return f"{where} has the trait {unknown[0]}: not one of Placement's"
    try:
        if wire.load_device(json.loads(json.dumps(wire.dump_device(device)))) != device:
            return f"{where} does not come out of a message as it went in"
    except (CyborgError, TypeError, ValueError, KeyError, AttributeError) as bad:
        return f"{where} cannot be told in a message: {bad}"
    return None
