# SPDX-License-Identifier: Apache-2.0
"""Notifications over transports of their own: ours, and those of Nova."""

import atexit
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import oslo_messaging
from oslo_config import cfg
from oslo_messaging.notify.listener import NotificationServer

from cyborg.compat import memory_broker, rabbit
from cyborg.core import errors, log, text
from cyborg.rpc import filters, publishing, transport
from cyborg.threads.failures import Backoff, RateLimitedLogger

LOG = log.get_logger(__name__)

GROUP = rabbit.NOTIFICATIONS
DRIVERS = "oslo.messaging.notify.drivers"
DISABLED_DRIVERS = frozenset({"", "noop"})
RETRIES = 1  # of one send: a lost connection is opened again

_LOGGER = "oslo_messaging.notify.messaging"


def is_enabled(conf: cfg.ConfigOpts) -> bool:
    """Return whether a notification driver is configured."""
    transport.register_options(conf)
    return bool(set(conf[GROUP].driver) - DISABLED_DRIVERS)


@dataclass(slots=True)
class _Progress:
    """What a thread has sent: the error of each message, or None, and why the broker failed."""

    results: list[str | None] = field(default_factory=list)
    broker_error: str | None = None


class Notifier:
    """Sender of the notifications of one publisher; a send takes at most ``timeout`` seconds."""

    def __init__(self, conf: cfg.ConfigOpts, publisher: str = "cyborg-conductor") -> None:
        """Create the sender, which connects at the first message. Raise Misconfigured.

        ``publisher`` is the service that the notifications name, with its host.
        """
        transport.register_options(conf)
        # oslo.messaging only logs a driver that it does not know, and then sends nothing.
        installed = {entry.name for entry in metadata.entry_points(group=DRIVERS)}
        if unknown := sorted(set(conf[GROUP].driver) - installed - {""}):
            raise errors.Misconfigured(
                f"[{GROUP}] driver: found {unknown[0]!r}; expected one of "
                f"{', '.join(sorted(installed))}",
                option=f"[{GROUP}] driver",
            )
        filters.limit_library_log()
        self.timeout = float(conf.rpc.timeout)
        logging.getLogger(_LOGGER).addFilter(_is_no_send_failure)
        own_url = conf[GROUP].transport_url
        self._transport = _make_transport(conf, own_url, f"[{GROUP}] transport_url")
        self._errors: list[Exception] = []
        rabbit.record_send_errors(self._transport, self._errors)
        self._oslo = oslo_messaging.Notifier(
            self._transport, publisher_id=f"{publisher}:{conf.host}", retry=RETRIES
        )
        self._thread: threading.Thread | None = None

    def send(self, messages: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Send messages of ``core.notification``; return, for each message, its error or None.

        After an invalid message, the next messages are sent. After an error of the broker, the next
        messages are not sent. Raise Unavailable if the broker did not accept the first message, and
        TimedOut if it did not answer in time: the message may be sent later.
        """
        # The driver is not made for two sends at a time, and the order of notifications would be
        # lost.
        if self._thread is not None and self._thread.is_alive():
            raise errors.Unavailable(
                "the notification broker has not answered an earlier notification yet"
            )
        progress = _Progress()
        # Some calls of the driver have no timeout.
        self._thread = threading.Thread(
            target=self._send, args=(messages, progress), name="notifier", daemon=True
        )
        self._thread.start()
        # Not the timeout of the driver, which has none for a connection that is being opened.
        self._thread.join(self.timeout)
        # A copy, because the thread may add results after the timeout.
        sent = list(progress.results)
        if len(sent) == len(messages):
            return sent
        refusal = progress.broker_error
        if refusal is not None:
            error = f"the notification broker accepts no message: {refusal}"
        else:
            error = f"the notification broker did not answer in {self.timeout:g} s"
        if not sent:
            raise errors.TimedOut(error) if refusal is None else errors.Unavailable(error)
        return sent + [error] * (len(messages) - len(sent))

    def cleanup(self) -> None:
        """Close all connections, except while a thread is still connecting."""
        if self._thread is None or not self._thread.is_alive():
            self._transport.cleanup()

    def _send(self, messages: Sequence[Mapping[str, Any]], progress: _Progress) -> None:
        """Send messages until the broker fails."""
        for message in messages:
            self._errors.clear()
            send = self._oslo.error if message["priority"] == "ERROR" else self._oslo.info
            try:
                send({}, message["event_type"], message["payload"])
            except Exception as exc:  # noqa: BLE001  drivers may raise any error
                self._errors.append(exc)
            if not all(map(_is_message_error, self._errors)):
                progress.broker_error = _describe(self._errors[0])
                return
            progress.results.append(_describe(self._errors[0]) if self._errors else None)


def make_notifier(conf: cfg.ConfigOpts) -> Notifier | None:
    """Return a notifier, None if notifications are disabled. Raise Misconfigured."""
    return Notifier(conf) if is_enabled(conf) else None


def _describe(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


def _is_message_error(exc: Exception) -> bool:
    """Return whether an error is about the message and not about the broker."""
    # An SSL certificate error is both a ValueError and an OSError.
    return isinstance(exc, LookupError | TypeError | ValueError) and not isinstance(exc, OSError)


def _is_no_send_failure(record: logging.LogRecord) -> bool:
    # Drop the driver's errors about lost notifications: the sender logs them, rate-limited.
    return record.levelno < logging.ERROR


def _make_transport(conf: cfg.ConfigOpts, own_url: str | None, option: str) -> Any:
    """Return a transport to the URL of an option, by default to that of [DEFAULT]."""
    url = str(own_url or conf.transport_url)
    memory_broker.install_for(url)
    with transport.checked_url(url, option):
        return oslo_messaging.get_notification_transport(conf, url=url)


# Events that wait while the broker does not answer; later events are lost.
MAX_QUEUED = 4096

# Seconds between two attempts to send the oldest event.
RETRY_DELAY = 2.0

# Seconds for the remaining events when the process ends.
FLUSH_TIMEOUT = 2.0


class AuditNotifier:
    """Sender of the audit events of one process, in their order."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        """Create the sender, which connects at the first event. Raise Misconfigured."""
        if not is_enabled(conf):
            raise errors.Misconfigured(
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
        # Web servers have no common hook for the end of a worker.
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
        """Send the events in their order until none is left; retry one that fails."""
        while True:
            with self._lock:
                # The thread ends without events, so that an idle worker has none.
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
        except errors.Unavailable as exc:
            self._failures.warn(f"Cannot send audit events, retrying: {exc.message}")
            return False
        self._failures.recovered("The notification broker")
        if invalid is not None:
            LOG.error("An audit event cannot be sent and is lost: %s", invalid)
        return True


# Maximum size of a message body. A notification of Nova with many volumes has some 10 KB.
MAX_BYTES = 1024 * 1024

MAX_RETRY_DELAY = 10.0  # seconds between two attempts to create the queue
# Nova sends the events of completed actions with this priority.
PRIORITY = "info"

_Receive = Callable[[Mapping[str, Any]], None]
_Refuse = Callable[[str], None]


def queue_name(conf: cfg.ConfigOpts) -> str:
    """Return the queue that the conductors share.

    With a pool of oslo.messaging, the exchange copies each message to the queue of the pool, and
    the queues of other consumers of the topic keep theirs. Without a pool it is the topic's queue.
    """
    options = conf.nova
    return str(options.notification_pool or f"{options.notification_topic}.{PRIORITY}")


class NotificationListener:
    """Listener that passes each notification to a function in the thread that receives it."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        """Create the listener without connecting. Raise Misconfigured."""
        transport.register_options(conf)
        filters.limit_library_log()
        self._conf = conf
        own_url = conf.nova.notification_url
        self._transport = _make_transport(conf, own_url, "[nova] notification_url")
        self._server: Any = None
        self._starter: threading.Thread | None = None
        self._stopped = threading.Event()
        self._closing = threading.Event()

    def start(self, receive: _Receive, refuse: _Refuse) -> None:
        """Start to connect and to receive, in threads.

        ``receive`` gets the fields of a message, and raises Invalid for a malformed one; ``refuse``
        gets the reason for each message that is discarded. Both must return soon.
        """
        self._closing = rabbit.use_connections(
            self._transport,
            functools.partial(_Connection, cyborg_conf=self._conf, receive=receive, refuse=refuse),
        )
        # The driver retries for ever while the broker is away, so it starts in a thread.
        self._starter = threading.Thread(target=self._start, name="nova listener", daemon=True)
        self._starter.start()

    def stop(self) -> None:
        """Receive no more messages; those that are not acknowledged stay in the queue."""
        self._stopped.set()
        if self._server is None:
            self._closing.set()
        else:
            self._server.stop()
            self._server.wait()

    def cleanup(self) -> None:
        """Close the connections, except while a thread is still connecting."""
        if self._starter is None or not self._starter.is_alive():
            self._transport.cleanup()

    def _start(self) -> None:
        """Listen as soon as the broker answers, unless stopped before."""
        options = self._conf.nova
        target = oslo_messaging.Target(
            exchange=options.notification_exchange, topic=options.notification_topic
        )
        rate_limited_log = RateLimitedLogger(logger=LOG)
        backoff = Backoff(initial=0.5, maximum=MAX_RETRY_DELAY)
        while not self._stopped.is_set():
            # A new one for each attempt: one that failed to start counts as started.
            server = NotificationServer(
                self._transport, [target], _Dispatcher(), pool=queue_name(self._conf)
            )
            try:
                server.start()
                self._server = server
                break
            except publishing.FAULTS as exc:
                error = text.sanitize(str(exc), 500)
            except Exception as exc:
                LOG.exception("Unexpected error while listening for Nova's notifications")
                error = type(exc).__name__
            # A connection that a stop has interrupted is no failure.
            if not self._stopped.is_set():
                rate_limited_log.warn(f"Cannot listen for Nova's notifications, retrying: {error}")
            self._stopped.wait(backoff.next_delay())
        if self._server is None:
            return
        rate_limited_log.recovered("The listener for Nova's notifications")
        LOG.info(
            "Listening for Nova's notifications on the queue %s, exchange %s, topic %s.%s",
            queue_name(self._conf),
            options.notification_exchange,
            options.notification_topic,
            PRIORITY,
        )
        # A stop before ``_server`` was set above has not stopped this server.
        if self._stopped.is_set():
            self._server.stop()


class _Dispatcher:
    """Dispatcher that names the priority to listen to; no message reaches it."""

    supported_priorities = (PRIORITY,)

    def dispatch(self, incoming: Any) -> Any:
        """Do nothing: the receiver of the connection has handled the message."""


# oslo.messaging's listener opens the connection, declares the queue and reconnects. Its dispatch is
# not used: the driver would keep messages in memory, and log a traceback for a malformed one.
class _Connection(rabbit.Connection):
    """Connection whose consumer handles and acknowledges each message at once."""

    # The driver's default is no limit: after an outage the whole backlog would be in memory.
    prefetch = 100

    def __init__(
        self,
        *args: Any,
        cyborg_conf: cfg.ConfigOpts,
        receive: _Receive,
        refuse: _Refuse,
        **kwargs: Any,
    ) -> None:
        self._cyborg_conf = cyborg_conf
        self._receive = receive
        self._refuse = refuse
        super().__init__(*args, **kwargs)

    def make_receiver(self, consumer: Any) -> Callable[[Any], None]:
        """Return the function that handles each message of the queue."""
        # A small message may decompress to gigabytes, so that only an operator can allow it.
        decompress = bool(self._cyborg_conf.oslo_messaging_rabbit.kombu_compression)

        def handle(raw: Any) -> None:
            channel = consumer.queue.channel
            try:
                filters.check_body(raw, MAX_BYTES, decompress=decompress)
                message = channel.message_to_python(raw)
                self._receive(filters.decode(message, MAX_BYTES))
            except Exception as exc:
                reason = type(exc).__name__
                if isinstance(exc, errors.Invalid):
                    reason = text.sanitize(exc.message.replace("\n", " "), 500)
                else:
                    LOG.exception("Unexpected error while receiving a notification, discarded")
                self._refuse(f"{reason} (from {filters.describe_sender(raw, {})})")
            # Also a malformed message: it would be delivered again for ever. After a crash before
            # this line the broker delivers the message again, which does no harm.
            channel.basic_ack(raw.delivery_tag)

        return handle

    def make_sender(self, channel: Any, producer: Any) -> Callable[..., Any]:
        """Return the driver's own function: nothing is sent over this connection."""
        return producer.publish  # type: ignore[no-any-return]


def make_listener(conf: cfg.ConfigOpts) -> NotificationListener | None:
    """Return a listener, None if notifications are disabled or impossible. Raise Misconfigured."""
    if not conf.nova.notifications:
        return None
    transport.register_options(conf)
    url = str(conf.nova.notification_url or conf.transport_url)
    if not url.startswith("rabbit:"):
        LOG.warning(
            "[nova] notifications is enabled, but the message bus is %s:, and Nova sends its "
            "notifications to RabbitMQ; set [nova] notification_url to receive them. The orphan "
            "collector checks all instances",
            url.partition(":")[0],
        )
        return None
    return NotificationListener(conf)
