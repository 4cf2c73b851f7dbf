# SPDX-License-Identifier: Apache-2.0
"""Give running guests their devices again, after a start of the guest or of the host.

The conductor is asked for the devices each time: a copy on this host could have a device that was
detached since.
"""

import time
from collections.abc import Callable
from typing import Any

from cyborg.agent.guests.devices import GuestDevice, GuestDevices
from cyborg.core.errors import CyborgError, Invalid, Stale
from cyborg.core.jobs.guest_device import parse_guest_arq
from cyborg.core.log import get_logger
from cyborg.core.validation import parse_uuid
from cyborg.rpc.contract import ConductorAPI
from cyborg.threads.backoff import Backoff
from cyborg.threads.loop import LoopThread
from cyborg.threads.rate_limited_log import RateLimitedLogger

LOG = get_logger(__name__)

FIRST_RETRY = 2.0  # seconds until the next check if a guest lacks a device, doubled each time


class Reasserter(LoopThread):
    """Thread that compares the running guests with the devices that they must have."""

    def __init__(
        self,
        host: str,
        epoch: str,
        conductor: ConductorAPI,
        guests: GuestDevices,
        watch: Callable[[], None],
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``watch`` makes sure that starts of guests are noticed; ``interval`` is in seconds."""
        super().__init__("reasserter")
        self._host = host
        self._epoch = epoch
        self._conductor = conductor
        self._guests = guests
        self._watch = watch
        self._interval = interval
        self._backoff = Backoff(min(FIRST_RETRY, interval), interval)
        self._log = RateLimitedLogger(clock, LOG)

    def notice_start(self) -> None:
        """Check the guests now, and again soon if a guest lacks a device. Thread-safe."""
        self._backoff.reset()
        self.wake()

    def run_once(self) -> float:
        """Check all guests; return the seconds until the next check."""
        failure: str | None = None
        complete = False
        try:
            # First, so that a start during the check is not missed.
            self._watch()
            answer = self._conductor.get_guest_devices(self._host, self._epoch)
            devices = load_devices(answer)
            is_whole = len(devices) == len(answer["devices"])
            complete = self._guests.reassert(devices) and is_whole
        except Stale as exc:
            # No heartbeat of this agent has arrived yet, or another agent has replaced it.
            LOG.debug("The conductor does not know this agent: %s", exc.message)
            return self._backoff.next_delay()
        except CyborgError as exc:
            failure = exc.message
        except (KeyError, TypeError, ValueError) as exc:
            failure = f"malformed answer of the conductor: {type(exc).__name__} {exc}"
        if failure is not None:
            self._log.warn("Cannot check the devices of guests, retrying: %s", failure)
        elif self._log.reset():
            LOG.info("Checking the devices of guests works again")
        if complete:
            self._backoff.reset()
            return self._interval
        return self._backoff.next_delay()


def load_devices(answer: Any) -> list[GuestDevice]:
    """Parse the answer of the conductor; skip malformed devices. Raise KeyError, TypeError."""
    devices: list[GuestDevice] = []
    for item in answer["devices"]:
        error: str | None = None
        try:
            instance, ready = parse_uuid(item["instance"], "instance"), item["ready"] is True
            devices.append(GuestDevice(instance, parse_guest_arq(item["arq"]), ready))
        except (Invalid, KeyError, TypeError) as exc:
            error = f"{type(exc).__name__} {exc}"
        if error is not None:
            # The guests get their other devices nevertheless.
            LOG.warning("Malformed device of a guest: %s", error)
    return devices
