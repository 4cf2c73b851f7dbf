# SPDX-License-Identifier: Apache-2.0
"""Listener for Nova's notifications, over a transport of its own."""

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import oslo_messaging
from oslo_config import cfg
from oslo_messaging.notify.listener import NotificationServer

from cyborg.compat import memory_broker, rabbit
from cyborg.core.errors import Invalid
from cyborg.core.log import get_logger
from cyborg.core.text import sanitize
from cyborg.rpc import filters
from cyborg.rpc.publishing import FAULTS
from cyborg.rpc.transport import checked_url, register_options
from cyborg.threads.failures import Backoff, RateLimitedLogger

LOG = get_logger(__name__)

MAX_BYTES = 1024 * 1024
"""Maximum size of a message body. A notification of Nova with many volumes has some 10 KB."""

MAX_RETRY_DELAY = 10.0  # seconds between two attempts to create the queue
PRIORITY = "info"
"""Nova sends the events of completed actions with this priority."""

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
        register_options(conf)
        filters.limit_library_log()
        self._conf = conf
        self._transport = _make_transport(conf)
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
        options = self._conf.nova
        target = oslo_messaging.Target(
            exchange=options.notification_exchange, topic=options.notification_topic
        )
        rate_limited_log = RateLimitedLogger(logger=LOG)
        backoff = Backoff(0.5, MAX_RETRY_DELAY)
        while not self._stopped.is_set():
            server = NotificationServer(
                self._transport, [target], _Dispatcher(), pool=queue_name(self._conf)
            )
            try:
                server.start()
                self._server = server
                break
            except FAULTS as exc:
                error = sanitize(str(exc), 500)
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
                if isinstance(exc, Invalid):
                    reason = sanitize(exc.message.replace("\n", " "), 500)
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


def _make_transport(conf: cfg.ConfigOpts) -> Any:
    url = conf.nova.notification_url or conf.transport_url
    memory_broker.install_for(str(url))
    with checked_url(str(url), "[nova] notification_url"):
        return oslo_messaging.get_notification_transport(conf, url=url)


def make_listener(conf: cfg.ConfigOpts) -> NotificationListener | None:
    """Return a listener, None if notifications are disabled or impossible. Raise Misconfigured."""
    if not conf.nova.notifications:
        return None
    register_options(conf)
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
