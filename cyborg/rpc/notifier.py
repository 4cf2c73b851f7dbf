# SPDX-License-Identifier: Apache-2.0
"""Telling listeners by oslo.messaging's notifications, on a way of their own to the broker.

oslo.messaging logs a notification that it cannot send and drops it. This one finds out, so that
what was not sent can be sent later.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import oslo_messaging
from oslo_config import cfg
from oslo_messaging.notify import notifier as oslo_notifier

from cyborg.core.errors import Misconfigured, TimedOut, Unavailable
from cyborg.rpc import memory, quiet
from cyborg.rpc.transport import register_options

GROUP = "oslo_messaging_notifications"
DRIVERS = "oslo.messaging.notify.drivers"
SILENT = frozenset({"", "noop"})
RETRIES = 1  # of one send: a connection that was lost since the last one is made again

_LOGGER = "oslo_messaging.notify.messaging"


def is_wanted(conf: cfg.ConfigOpts) -> bool:
    """Tell whether any driver is to get notifications."""
    conf.register_opts(oslo_notifier._notifier_opts, group=GROUP)
    return bool(set(conf[GROUP].driver) - SILENT)


class Notifier:
    """Sends notifications of one publisher; ``seconds`` is the longest that a send takes."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        """Nothing is connected before the first send. Raises Misconfigured."""
        is_wanted(conf)
        register_options(conf)
        known = {entry.name for entry in metadata.entry_points(group=DRIVERS)}
        if unknown := sorted(set(conf[GROUP].driver) - known - {""}):
            raise Misconfigured(
                f"[{GROUP}] driver: found {unknown[0]!r}; expected one of "
                f"{', '.join(sorted(known))}",
                option=f"[{GROUP}] driver",
            )
        quiet.install()
        self.seconds = float(conf.rpc.timeout)
        self._transport = _transport(conf)
        self._wrong: list[Exception] = []
        self._transport._send_notification = self._noting(self._transport._send_notification)
        self._oslo = oslo_messaging.Notifier(
            self._transport, publisher_id=f"cyborg-conductor:{conf.host}", retry=RETRIES
        )
        self._thread: threading.Thread | None = None

    def send(self, messages: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Send messages of ``core.notification``; return for each why it was not sent, or None.

        What follows one that the broker did not take is not tried; one that cannot be sent at all
        keeps no other. Raises Unavailable when the broker did not take the first, and TimedOut when
        that took too long: it may then be sent after all.
        """
        if self._thread is not None and self._thread.is_alive():
            raise Unavailable("the broker still has not answered to an earlier notification")
        answers: list[str | None] = []
        broken: list[str] = []
        # The driver waits for some things as long as the broker pleases.
        self._thread = threading.Thread(
            target=self._send, args=(messages, answers, broken), name="notifier", daemon=True
        )
        self._thread.start()
        self._thread.join(self.seconds)
        found = list(answers)
        if len(found) == len(messages):
            return found
        if broken:
            why = f"the broker of notifications takes none: {broken[0]}"
        else:
            why = f"the broker of notifications did not answer in {self.seconds:g} s"
        if not found:
            raise Unavailable(why) if broken else TimedOut(why)
        return found + [why] * (len(messages) - len(found))

    def cleanup(self) -> None:
        """Close all connections. A thread that still tries to connect is left to its fate."""
        if self._thread is None or not self._thread.is_alive():
            self._transport.cleanup()

    def _send(
        self, messages: Sequence[Mapping[str, Any]], answers: list[str | None], broken: list[str]
    ) -> None:
        for message in messages:
            self._wrong.clear()
            tell = self._oslo.error if message["priority"] == "ERROR" else self._oslo.info
            try:
                tell({}, message["event_type"], message["payload"])
            except Exception as bad:  # noqa: BLE001  drivers may be anybody's
                self._wrong.append(bad)
            if not all(map(_is_its_own, self._wrong)):
                broken.append(_told(self._wrong[0]))
                return
            answers.append(_told(self._wrong[0]) if self._wrong else None)

    def _noting(self, send: Callable[..., None]) -> Callable[..., None]:
        def noting(*args: Any, **kwargs: Any) -> None:
            try:
                send(*args, **kwargs)
            except Exception as bad:
                self._wrong.append(bad)
                raise

        return noting


def make_notifier(conf: cfg.ConfigOpts) -> Notifier | None:
    """Return what sends notifications, None when there are to be none. Raises Misconfigured."""
    return Notifier(conf) if is_wanted(conf) else None


def _told(bad: Exception) -> str:
    return f"{type(bad).__name__}: {bad}"


def _is_its_own(bad: Exception) -> bool:
    """Tell whether something is wrong with the message and not with the broker."""
    # The error of a certificate is both a ValueError and an OSError.
    return isinstance(bad, LookupError | TypeError | ValueError) and not isinstance(bad, OSError)


def _is_news(record: logging.LogRecord) -> bool:
    # What the driver says of a notification that it drops, whoever sends it says once a minute.
    return record.levelno < logging.ERROR


def _transport(conf: cfg.ConfigOpts) -> Any:
    url = conf[GROUP].transport_url or conf.transport_url
    if str(url).startswith("kombu+memory:"):
        memory.install()
    logging.getLogger(_LOGGER).addFilter(_is_news)
    try:
        return oslo_messaging.get_notification_transport(conf)
    except (oslo_messaging.MessagingException, ValueError) as bad:
        # The URL holds a password, so the cause, which quotes it, is not passed on.
        scheme = str(url).partition(":")[0]
        raise Misconfigured(
            f"[{GROUP}] transport_url: found a URL of scheme {scheme!r} that cannot be used; "
            "expected something like rabbit://user:password@host:5672/",
            option=f"[{GROUP}] transport_url",
        ) from bad
