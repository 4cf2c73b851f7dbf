# SPDX-License-Identifier: Apache-2.0
"""Publishing of calls: whether a failed call was sent, whether it is sent again, and to whom.

A call that was not sent has certainly not been carried out. A call that was sent, and that the
broker did not confirm, may have been carried out. A conductor that has taken a call may end before
it answers. So the client sends a call of ``DEDUPLICATED_METHODS`` again, with the same id, if no
answer comes: another conductor executes it, or returns the answer that the first one has recorded
(``cyborg.conductor.common.calls``).
"""

import select
import threading
from collections.abc import Callable
from typing import Any

import amqp
import kombu
import oslo_messaging
from amqp.exceptions import MessageNacked, NotFound
from kombu.exceptions import KombuError

from cyborg.rpc.contract import CONDUCTOR

# Errors of calls and servers while the broker is unavailable.
#
# The driver translates the errors of open connections; when its pool opens another connection, it
# passes on the errors of the libraries.
FAULTS = (oslo_messaging.MessagingException, KombuError, amqp.AMQPError, OSError)

# Methods that may be repeated: each reads, or reports a state identified by an epoch or a uuid.
IDEMPOTENT_METHODS = frozenset(
    {
        *("hello", "report", "service_hello", "discovery_done", "job_done"),
        *("get_desired_backends", "get_guest_devices", "find_function_owners", "limits_get"),
        *("report_backend_outcomes", "device_context_candidates", "report_active_partitions"),
    }
)

# All others, so that a new method is deduplicated unless somebody decides that it need not be.
# Methods whose effect and answer are recorded for each call; a copy gets the same answer.
DEDUPLICATED_METHODS = frozenset(CONDUCTOR.methods) - IDEMPOTENT_METHODS

# Seconds for the broker to confirm a message. The driver's own limit is that of the heartbeat.
CONFIRM_TIMEOUT = 5.0

# Seconds for the broker to answer whether a queue has a consumer.
QUERY_TIMEOUT = 3.0

_CLOSED = select.POLLRDHUP | select.POLLHUP | select.POLLERR


# Of the thread, because a call is published in the thread of its caller.
class _State(threading.local):
    sent = 0


_state = _State()


class SentCounter:
    """Counter of the messages that this thread has sent since the counter was created."""

    def __init__(self) -> None:
        self._start = _state.sent

    @property
    def count(self) -> int:
        """Return the number of messages that were written to the network completely."""
        return _state.sent - self._start


def counting(channel: Any, send: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sends a message on a channel and counts it for its thread."""

    def publish(*args: Any, **kwargs: Any) -> Any:
        _check_open(channel)
        # An exception of it counts nothing: a message that was written in part is not processed.
        result = send(*args, **kwargs)
        _state.sent += 1
        return result

    return publish


class Unconfirmed(oslo_messaging.MessagingException):  # type: ignore[misc]
    """The broker did not confirm a call in time. The driver does not resend such a call."""


def publish(connection: Any, producer: Any, *args: Any, **kwargs: Any) -> Any:
    """Send a message on the driver's connection. Raise Unconfirmed if a call is not confirmed.

    Raise MessageUndeliverable if no queue takes the message. The message counts as sent even then,
    so that a caller knows from the count whether a copy was sent before.
    The driver resends answers and notifications, which have no expiration.
    """
    sent = SentCounter()
    is_call = kwargs.get("expiration") is not None
    connection.returned = None
    try:
        result = kombu.Producer.publish(producer, *args, confirm_timeout=CONFIRM_TIMEOUT, **kwargs)
    except (amqp.ChannelError, MessageNacked) as exc:
        if is_call and isinstance(exc, NotFound):
            # The exchange was deleted with its last queue. The driver would send all later calls on
            # this channel to it, because it declares an exchange once for each channel.
            connection.discard_channel()
            raise oslo_messaging.MessageUndeliverable(
                exc, str(kwargs.get("exchange")), kwargs.get("routing_key"), None
            ) from exc
        # The broker refused the message and has no copy, so the message does not count as sent.
        _state.sent -= sent.count
        raise
    except TimeoutError as exc:
        # After this error the driver sends the message again.
        if not sent.count or not is_call:
            raise
        # A late confirmation must not be read as that of the next message.
        connection.close_abruptly()
        raise Unconfirmed(
            f"the message broker did not confirm the message in {CONFIRM_TIMEOUT:g} s"
        ) from exc
    # Set while kombu waited for the confirmation, if the broker returned the message.
    if connection.returned is not None:
        raise connection.returned
    return result


def count_consumers(connection: Any, queue: str) -> int:
    """Return how many consumers a queue has, 0 if there is no such queue.

    ``connection`` is a connection of the rabbit driver that only the caller uses. Raise the errors
    of the connection; a failed connection is closed, so that its next user opens a new one.
    """
    channel: Any = None
    try:
        if connection.channel is None or not connection.connection.connected:
            connection.ensure_connection()
        connection.set_transport_socket_timeout(QUERY_TIMEOUT)
        channel = connection.connection.channel()
        return int(channel.queue_declare(queue, passive=True).consumer_count)
    except NotFound:
        return 0
    except (OSError, amqp.ConnectionError):
        connection.close_abruptly()
        raise
    finally:
        if channel is not None and channel.is_open:
            channel.close()
        if connection.connection.connected:
            connection.set_transport_socket_timeout()  # back to the default of the driver


def _check_open(channel: Any) -> None:
    """Raise ConnectionResetError if the broker has closed the connection.

    Otherwise the kernel would accept the message, and it would be unknown whether it arrived.
    """
    sock = getattr(channel.connection, "sock", None)
    if sock is None or sock.fileno() < 0:
        return
    poller = select.poll()
    poller.register(sock.fileno(), _CLOSED)
    if poller.poll(0):
        raise ConnectionResetError("the message broker has closed the connection")
