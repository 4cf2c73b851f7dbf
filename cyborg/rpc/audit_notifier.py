# SPDX-License-Identifier: Apache-2.0
"""Notifier of audit events, whose caller never waits for the broker.

An event waits in a queue of bounded size until a thread has sent it. The thread ends when the queue
is empty, so that a process without events has none.
"""

import atexit
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from oslo_config import cfg

from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.core.log import get_logger
from cyborg.rpc.notifier import GROUP, Notifier, is_enabled
from cyborg.threads.rate_limited_log import RateLimitedLogger

LOG = get_logger(__name__)

MAX_QUEUED = 4096
"""Events that wait while the broker does not answer; later events are lost."""

RETRY_DELAY = 2.0
"""Seconds between two attempts to send the oldest event."""

FLUSH_TIMEOUT = 2.0
"""Seconds for the remaining events when the process ends."""


class AuditNotifier:
    """Sender of the audit events of one process, in their order."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        """Create the sender, which connects at the first event. Raise Misconfigured."""
        if not is_enabled(conf):
            raise Misconfigured(
                f"[api] audit_map_file is set, but [{GROUP}] driver is not: set it to messagingv2 "
                "or log",
                option=f"[{GROUP}] driver",
            )
        self._notifier = Notifier(conf, "cyborg-api")
        self._events: deque[Mapping[str, Any]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._retry = threading.Event()
        self._losses = RateLimitedLogger(logger=LOG)
        self._failures = RateLimitedLogger(logger=LOG)
        atexit.register(self.flush, FLUSH_TIMEOUT)

    def notify(self, context: Any, event_type: str, payload: Mapping[str, Any]) -> None:
        """Enqueue an event without waiting."""
        event = {"priority": "INFO", "event_type": event_type, "payload": payload}
        with self._lock:
            is_full = len(self._events) >= MAX_QUEUED
            if not is_full:
                self._events.append(event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
                self._thread.start()
        if is_full:
            self._losses.warn(
                f"{MAX_QUEUED} audit events wait for the broker, the next ones are lost"
            )

    def flush(self, seconds: float) -> bool:
        """Wait until all events are sent; return whether they are."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return not self._events

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._events:
                    self._thread = None
                    return
                event = self._events[0]
            if self._send(event):
                with self._lock:
                    self._events.popleft()
            else:
                self._retry.wait(RETRY_DELAY)

    def _send(self, event: Mapping[str, Any]) -> bool:
        """Send an event; return False if it must be sent again."""
        try:
            (invalid,) = self._notifier.send([event])
        except Unavailable as exc:
            error = exc.message
        else:
            self._failures.recovered("The notification broker")
            if invalid is not None:
                LOG.error("An audit event cannot be sent and is lost: %s", invalid)
            return True
        self._failures.warn(f"Cannot send audit events, retrying: {error}")
        return False
