# SPDX-License-Identifier: Apache-2.0
"""Transports of oslo.messaging, and the connections of its rabbit driver."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import oslo_messaging
from oslo_config import cfg
from oslo_messaging._drivers import amqpdriver, common, impl_rabbit
from oslo_messaging._metrics import client as metrics
from oslo_messaging._tracing import client as tracing
from oslo_messaging.notify import notifier

NOTIFICATIONS = "oslo_messaging_notifications"


def register_options(conf: cfg.ConfigOpts, **defaults: Any) -> None:
    """Register the options of oslo.messaging.

    ``defaults`` are new defaults for options of the rabbit driver.
    """
    cfg.set_defaults(impl_rabbit.rabbit_opts, **defaults)
    # oslo.messaging registers these two groups only with the global ConfigOpts, and reads them from
    # the given one.
    conf.register_opts(tracing.oslo_messaging_tracing, group="oslo_messaging_tracing")
    conf.register_opts(metrics.oslo_messaging_metrics, group="oslo_messaging_metrics")
    conf.register_opts(notifier._notifier_opts, group=NOTIFICATIONS)


def use_connections(transport: Any, make: Callable[..., "Connection"]) -> threading.Event:
    """Make the rabbit driver create each connection with ``make``; do not change other drivers.

    While the returned event is set, a connection that waits for the broker raises
    MessagingException within a second instead of trying for ever.
    """
    closing = threading.Event()
    pool = getattr(transport._driver, "_connection_pool", None)
    if pool is not None:
        # The driver has no option for the class of its connections.
        pool.connection_cls = functools.partial(make, closing=closing)
    return closing


def open_reply_queue(transport: Any) -> None:
    """Create the queue for the answers to this process, with the rabbit driver."""
    make = getattr(transport._driver, "_get_reply_q", None)
    if make is not None:
        make()


def close_listener(server: Any) -> None:
    """Close the connection of a stopped RPC server, with the rabbit driver."""
    # The driver would close it after the last call has been answered. Until then the broker would
    # send it calls that it does not read.
    listener = getattr(server.listener, "_poll_style_listener", None)
    if isinstance(listener, amqpdriver.AMQPListener):
        listener.conn.close()


@contextlib.contextmanager
def exclusive_connection(transport: Any) -> Iterator["Connection"]:
    """Lock a connection of the pool for this thread.

    The lock also excludes the heartbeat thread of the connection.
    """
    with (
        transport._driver._get_connection(common.PURPOSE_SEND, retry=1) as pooled,
        pooled.connection._connection_lock,
    ):
        yield pooled.connection


def record_send_errors(transport: Any, errors: list[Exception]) -> None:
    """Append each error of sending a notification to ``errors``.

    oslo.messaging logs such an error, and does not raise it to the caller.
    """
    send = transport._send_notification

    def send_recording(*args: Any, **kwargs: Any) -> None:
        try:
            send(*args, **kwargs)
        except Exception as exc:
            errors.append(exc)
            raise

    transport._send_notification = send_recording


def wrap_send(channel: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the method that sends a message on an AMQP channel by ``wrap(method)``.

    A second call for the same channel has no effect. Channels of other protocols are not changed.
    """
    send = getattr(channel, "_basic_publish", None)
    if send is None or hasattr(send, "wrapped"):
        return
    wrapped: Any = wrap(send)
    wrapped.wrapped = send
    channel._basic_publish = wrapped


class Connection(impl_rabbit.Connection):  # type: ignore[misc]
    """Connection of the rabbit driver; a subclass can handle all messages in both directions.

    ``prefetch`` is the number of messages that the broker sends before they are acknowledged, None
    for the value of ``[oslo_messaging_rabbit] rabbit_qos_prefetch_count``.
    """

    prefetch: int | None = None
    # Error of the last message that the broker returned. The function of ``make_sender`` sets it to
    # None before it publishes, and raises it after the broker has confirmed the message.
    returned: oslo_messaging.MessageUndeliverable | None = None

    _is_closing = False

    def __init__(self, *args: Any, closing: threading.Event, **kwargs: Any) -> None:
        self._transport_closing = closing
        super().__init__(*args, **kwargs)

    def make_receiver(self, consumer: Any) -> Callable[[Any], None]:
        """Return the function that receives each message for a consumer of the driver."""
        raise NotImplementedError

    def make_sender(self, channel: Any, producer: Any) -> Callable[..., Any]:
        """Return the function that publishes a message on a channel, for a kombu producer."""
        raise NotImplementedError

    def on_return(self, exception: Any, exchange: str, routing_key: str, message: Any) -> None:
        """Record that the broker returned a message, because no queue takes it."""
        # The driver raises the error here, before the confirmation that follows is read. The next
        # message on the channel could then get this confirmation instead of its own.
        self.returned = oslo_messaging.MessageUndeliverable(
            exception, exchange, routing_key, message
        )

    def ensure_connection(self) -> None:
        """Replace the connection by a new one."""
        # The driver calls this when the connection has failed, and while it holds the lock of the
        # connection. kombu takes a connection that receives no bytes for an open one: the driver
        # would wait on it for two answers, each for the interval of the heartbeats.
        self.close_abruptly()
        connection = self.connection
        # kombu calls the callback in each second between two attempts; the driver passes none.
        connection.ensure_connection = functools.partial(
            connection.ensure_connection, callback=self._check_transport
        )
        try:
            super().ensure_connection()
        finally:
            del connection.ensure_connection

    def close_abruptly(self) -> None:
        """Close the connection without the closing handshake, which would wait for an answer."""
        if self.connection.connected:
            self.connection.collect()

    def discard_channel(self) -> None:
        """Close the channel. The driver opens another one, and declares its exchanges again."""
        self._set_current_channel(None)

    def declare_consumer(self, consumer: Any) -> Any:
        """Start a consumer, with the function of ``make_receiver`` as its callback."""
        receive = self.make_receiver(consumer)

        def receive_until_close(message: Any) -> None:
            if not self._is_closing:
                receive(message)

        consumer._callback = receive_until_close
        return super().declare_consumer(consumer)

    def close(self) -> None:
        """Close the connection; the broker gives messages that were not read to other consumers."""
        # To delete its fanout queue, the driver reads from the connection what the broker has sent
        # meanwhile. It would acknowledge calls that nobody answers any more.
        self._is_closing = True
        super().close()

    def _check_transport(self) -> None:
        if self._transport_closing.is_set():
            raise oslo_messaging.MessagingException("the transport is closed")

    def _set_qos(self, channel: Any) -> None:
        if self.prefetch is None:
            super()._set_qos(channel)
        else:
            channel.basic_qos(0, self.prefetch, False)

    def _set_current_channel(self, new_channel: Any) -> None:
        super()._set_current_channel(new_channel)
        if self._producer is not None:
            self._producer.publish = self.make_sender(new_channel, self._producer)
