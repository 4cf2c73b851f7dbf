# SPDX-License-Identifier: Apache-2.0
"""The event loop of libvirt. Connections receive events only if the process runs this loop."""

import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from cyborg.core.log import get_logger
from cyborg.threads.rate_limited_log import RateLimitedLogger

LOG = get_logger(__name__)

KEEPALIVE = 5  # seconds between two questions to the daemon
TICK = 1000  # milliseconds; libvirt waits without end if nothing is due
PAUSE = 0.5  # seconds after an error of the loop


@functools.cache
def start_event_loop(libvirt: Any) -> threading.Thread:
    """Start the thread of the event loop and return it. Call this before the first connection."""
    libvirt.virEventRegisterDefaultImpl()
    libvirt.virEventAddTimeout(TICK, lambda timer, data: None, None)
    thread = threading.Thread(
        target=run_events, args=(libvirt,), name="libvirt-events", daemon=True
    )
    thread.start()
    return thread


def keep_alive(libvirt: Any, connection: Any, seconds: float) -> None:
    """Let a connection end if its daemon does not answer; ``seconds`` is the limit of a call."""
    # More than one call may take: otherwise the call ends, and the daemon executes it later.
    max_unanswered = math.ceil(seconds / KEEPALIVE) + 1
    try:
        connection.setKeepAlive(KEEPALIVE, max_unanswered)
    except libvirt.libvirtError as exc:
        # Drivers inside this process, such as that of the tests, have no daemon to ask.
        LOG.debug("A connection to libvirt has no keepalive: %s", exc)


def run_events(libvirt: Any, sleep: Callable[[float], None] = time.sleep) -> None:
    """Call the functions for the events of libvirt, without end."""
    log = RateLimitedLogger(logger=LOG)
    while True:
        error: object = "unknown error"
        try:
            if libvirt.virEventRunDefaultImpl() == 0:
                continue
        except Exception as exc:  # noqa: BLE001  without this loop no start is noticed
            error = exc
        log.warn("Cannot wait for the events of libvirt, retrying: %s", error)
        sleep(PAUSE)
