# SPDX-License-Identifier: Apache-2.0
"""One backend: a loop of discoveries in a thread of its own, and a watch over each of them.

A driver that raises or takes too long puts its own backend into ERROR, and its devices stay as they
were seen last. A call that hangs cannot be ended in Python; its thread is left alone and no other
call is made until it returns, so that a sick driver never costs more than one thread.
"""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oslo_log import log

from cyborg.core import wire
from cyborg.core.device import Device
from cyborg.core.errors import CyborgError, DriverFailed
from cyborg.core.names import is_resource_class, is_trait
from cyborg.core.report import BackendState, BackendStatus
from cyborg.core.text import clean
from cyborg.drivers.base import Driver

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
    ) -> None:
        """``interval`` is between discoveries, ``timeout`` for one of them; both in seconds."""
        self.driver = driver
        self.name = driver.backend
        self._interval = interval
        self._timeout = timeout
        self._changed = changed
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._number = 0  # of the discovery that began last
        self._busy = False  # it has not ended
        self._overdue = False  # ... in time
        self._next: list[Done] = []
        self._waiting: list[Done] = []
        self._view = View(BackendState(self.name, driver.name, BackendStatus.DISCOVERING))
        self._thread = threading.Thread(target=self._run, name=f"backend-{self.name}", daemon=True)

    @property
    def view(self) -> View:
        """Return what is known now."""
        return self._view

    def start(self) -> None:
        """Begin, with a discovery at once."""
        self._thread.start()

    def stop(self) -> None:
        """Begin no more discoveries."""
        self._stopped.set()
        self._wake.set()

    def join(self, seconds: float) -> bool:
        """Wait for the discovery in progress; tell whether it ended in time."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def rediscover(self, done: Done = lambda _: None) -> None:
        """Have a discovery begin soon; ``done`` gets the state that it, or its hanging, leads to.

        A discovery that is in progress does not count: it may have looked too early.
        """
        with self._lock:
            hanging = self._overdue
            if not hanging:
                self._next.append(done)
        if hanging:
            done(self._view.state)
        self._wake.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.clear()
            with self._lock:
                self._number += 1
                self._busy = True
                self._waiting, self._next = self._next, []
            watch = threading.Timer(self._timeout, self._hangs, (self._number,))
            watch.daemon = True
            watch.start()
            view = self._look()
            watch.cancel()
            self._settle(self._number, view, over=True)
            self._wake.wait(self._interval)

    def _look(self) -> View:
        """Ask the driver; whatever it does ends here."""
        try:
            devices, complaints = _usable(self.name, self.driver.discover())
            able = frozenset(self.driver.abilities)
            devices = tuple(
                d if d.abilities == able else replace(d, abilities=able) for d in devices
            )
        except Exception as bad:
            LOG.debug("%s: discovery failed", self.name, exc_info=True)
            return self._failed(words(bad))
        error = "; ".join(complaints)[:MAX_ERROR] or None
        state = BackendState(self.name, self.driver.name, BackendStatus.READY, error)
        return View(state, devices)

    def _hangs(self, number: int) -> None:
        """Tell that a discovery takes too long; it may still return some day, and counts then."""
        self._settle(number, self._failed(f"discovery takes longer than {self._timeout:g} s"))

    def _failed(self, message: str) -> View:
        state = BackendState(self.name, self.driver.name, BackendStatus.ERROR, message[:MAX_ERROR])
        return View(state, self._view.devices)

    def _settle(self, number: int, view: View, *, over: bool = False) -> None:
        """Take a new view, unless the discovery of this number ended before it."""
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
