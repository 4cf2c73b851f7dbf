# SPDX-License-Identifier: Apache-2.0
"""Filters of the bus: messages that are not valid calls, and log lines of the libraries."""

import functools
import json
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from oslo_config import cfg

from cyborg.compat import rabbit
from cyborg.core import log, validation
from cyborg.core.errors import Invalid
from cyborg.core.text import sanitize
from cyborg.rpc import context, contract, publishing
from cyborg.rpc.publishing import FAULTS

LOG = log.get_logger(__name__)

DRIVER = "oslo.messaging._drivers.impl_rabbit"
TRACEBACK_LOGGERS = (
    "oslo_messaging.rpc.server",
    "oslo_messaging._drivers.amqpdriver",
    "oslo_messaging._drivers.common",
    DRIVER,
)
INTERVAL = 60.0  # seconds between two lines from the same place in the source


class RateLimitFilter(logging.Filter):
    """Logging filter that passes one warning or error a minute from each place in the source."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns monotonic seconds."""
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the line."""
        if record.levelno < logging.WARNING:
            return True
        # The place and not the text: the texts of one failure differ in addresses and numbers.
        place = (record.pathname, record.lineno)
        now = self._clock()
        with self._lock:
            last = self._last.get(place)
            if last is not None and now - last < INTERVAL:
                return False
            self._last[place] = now
            return True


@contextmanager
def capture_warnings(callback: Callable[[str], None]) -> Iterator[None]:
    """Call ``callback`` with each warning of the rabbit driver in this thread, logged or not."""
    # Other threads may use other connections of the driver at the same time.
    thread = threading.get_ident()

    def capture(record: logging.LogRecord) -> bool:
        if record.thread == thread and record.levelno >= logging.WARNING:
            callback(record.getMessage())
        return True

    logger = logging.getLogger(DRIVER)
    logger.filters.insert(0, capture)  # before the rate limit
    try:
        yield
    finally:
        logger.removeFilter(capture)


def limit_library_log() -> None:
    """Limit the log of oslo.messaging in this process. Idempotent."""
    log.drop_tracebacks(TRACEBACK_LOGGERS, FAULTS)
    logger = logging.getLogger(DRIVER)
    if not any(isinstance(item, RateLimitFilter) for item in logger.filters):
        logger.addFilter(RateLimitFilter())


ENVELOPE = "2.0"  # version of oslo.messaging's envelope
# The longest short string of AMQP 0-9-1.
MAX_NAME = 255  # characters of a valid name
_JSON = "application/json"
# As oslo.messaging names them: an answer must not be sent to any other queue.
_REPLY_QUEUE = re.compile(r"reply_[A-Za-z0-9_.:-]{1,200}")
_VERSION = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}")
_MAX_IDS = 64  # unique ids that are kept for a queue, to detect duplicates


def max_body_bytes(conf: cfg.ConfigOpts) -> int:
    """Return the maximum size of a message body in bytes."""
    # The arguments are JSON within JSON, which doubles quotes and backslashes; the context is
    # small.
    return 2 * max(int(conf.conductor.max_report_bytes), contract.MAX_MESSAGE_BYTES) + 65536


def filter_messages(transport: Any, conf: cfg.ConfigOpts) -> threading.Event:
    """Install the filter in a transport of oslo.messaging; do nothing if it is not RabbitMQ's.

    Return the event of ``rabbit.use_connections``, which ends connecting.
    """
    signature = f"{os.path.basename(sys.argv[0])}@{conf.host}"
    return rabbit.use_connections(
        transport, functools.partial(Connection, cyborg_conf=conf, signature=signature)
    )


class Connection(rabbit.Connection):
    """Connection that adds the sender to outgoing messages and filters incoming messages.

    The sender is the daemon's name, which any daemon may claim, and the broker user, which RabbitMQ
    checks against the authenticated user.
    """

    def __init__(
        self, *args: Any, cyborg_conf: cfg.ConfigOpts, signature: str, **kwargs: Any
    ) -> None:
        self._cyborg_conf = cyborg_conf
        self._signature = signature
        super().__init__(*args, **kwargs)

    def make_receiver(self, consumer: Any) -> "MessageFilter":
        """Return the message filter of a consumer."""
        decompress = bool(self._cyborg_conf.oslo_messaging_rabbit.kombu_compression)
        # Answers come over the default exchange, calls over that of the RPC topic.
        is_for_calls = bool(consumer.exchange_name)
        users = self._cyborg_conf.rpc.allowed_users if is_for_calls else ()
        check = check_call if is_for_calls else check_answer
        return MessageFilter(
            consumer,
            check,
            max_body_bytes(self._cyborg_conf),
            decompress=decompress,
            users=frozenset(users),
        )

    def make_sender(self, channel: Any, producer: Any) -> Callable[..., Any]:
        """Return the function that publishes a message with its sender."""
        rabbit.wrap_send(channel, functools.partial(publishing.counting, channel))
        # AMQP has no place for a longer text.
        sender = {"app_id": self._signature[:MAX_NAME]}
        # With a certificate instead of a password, the broker may map the name to another user.
        if self.connection.userid and self.login_method != "EXTERNAL":
            sender["user_id"] = self.connection.userid
        return functools.partial(publishing.publish, self, producer, **sender)


class Message(dict[str, Any]):
    """Accepted message, in the form that oslo.messaging expects."""

    def __init__(self, values: Mapping[str, Any], raw: Any) -> None:
        super().__init__(values)
        self._raw = raw

    def acknowledge(self) -> None:
        """Acknowledge the message to the broker."""
        self._raw.ack()

    def requeue(self) -> None:
        """Return the message to the broker."""
        self._raw.requeue()


@dataclass(eq=False)
class MessageFilter:
    """Filter of one queue: passes each message on, or discards and logs it.

    ``users`` are the broker users whose messages are accepted; empty means all.
    """

    consumer: Any
    check: Callable[[dict[str, Any]], None]
    max_bytes: int
    _: KW_ONLY
    decompress: bool = False
    users: Collection[str] = ()

    def __post_init__(self) -> None:
        # Of this queue only: the broker redelivers to a queue what was not acknowledged.
        self._recent_ids: deque[str] = deque(maxlen=_MAX_IDS)

    def __call__(self, raw: Any) -> None:
        """Validate a message and pass it on; reject an invalid message, which discards it."""
        fields: dict[str, Any] = {}
        try:
            # Before the body is decompressed and parsed, so that a refused message costs little.
            self._check_sender(raw)
            message = self.consumer.queue.channel.message_to_python(raw)
            fields.update(decode(message, self.max_bytes))
            self.check(fields)
            self._check_duplicate(fields)
        except Invalid as exc:
            LOG.warning(
                "Refused a message to %s from %s: %s",
                self.consumer.queue_name,
                describe_sender(raw, fields),
                sanitize(exc.message.replace("\n", " "), 1000),
            )
            # Without requeue: the broker would deliver it again for ever.
            self.consumer.queue.channel.basic_reject(raw.delivery_tag, requeue=False)
            return
        # oslo.messaging passes the fields with this prefix to the server as the context of a call.
        # The sender is that of the properties alone: the call itself has the other fields.
        fields[f"_context_{context.SENDER}"] = describe_sender(raw, {})
        try:
            self.consumer.callback(Message(fields, message))
        except FAULTS as exc:
            LOG.warning(
                "Lost a message on %s, its sender retries or times out: %s",
                self.consumer.queue_name,
                sanitize(f"{type(exc).__name__}: {exc}".replace("\n", " "), 500),
            )
        except Exception:
            LOG.exception("Failed to process message on %s, discarded", self.consumer.queue_name)

    def _check_sender(self, raw: Any) -> None:
        """Check size, compression and user, before the body is read. Raise Invalid."""
        check_body(raw, self.max_bytes, decompress=self.decompress)
        user = raw.properties.get("user_id")
        if self.users and user not in self.users:
            raise Invalid(f"broker user {user!r} is not one of [rpc] allowed_users")

    def _check_duplicate(self, fields: Mapping[str, Any]) -> None:
        unique = fields.get("_unique_id")
        if unique in self._recent_ids:
            raise Invalid("duplicate message: its unique id was received before")
        if unique:
            self._recent_ids.append(unique)


def describe_sender(raw: Any, fields: Mapping[str, Any]) -> str:
    """Return the sender of a message for the log, from its properties and fields."""
    properties = raw.properties
    user, message_id = properties.get("user_id"), properties.get("message_id")
    items = [_clean(properties.get("app_id")) or "an unknown sender"]
    items += [f"broker user {_clean(user)}"] if user else []
    items += [f"message {_clean(message_id)}"] if message_id else []
    items += [f"reply queue {_clean(fields['_reply_q'])}"] if fields.get("_reply_q") else []
    items += [_clean(fields["_context_request_id"])] if fields.get("_context_request_id") else []
    return ", ".join(items)


def check_call(fields: dict[str, Any]) -> None:
    """Raise Invalid for a call that cannot be dispatched or answered."""
    _check_name(fields, "method", needed=True)
    arguments = fields.get("args", {})
    if not isinstance(arguments, dict):
        raise Invalid(f"args are {type(arguments).__name__}, not an object")
    version = fields.get("version", "1.0")
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise Invalid(f"invalid version {str(version)[:MAX_NAME]!r}; expected something like 1.0")
    if fields.get("namespace") is not None:
        _check_name(fields, "namespace")
    _check_name(fields, "_unique_id")
    _check_name(fields, "_msg_id")
    queue = fields.get("_reply_q")
    if queue is not None and not (isinstance(queue, str) and _REPLY_QUEUE.fullmatch(queue)):
        raise Invalid(f"invalid reply queue {str(queue)[:MAX_NAME]!r}")
    if (queue is None) != (fields.get("_msg_id") is None):
        raise Invalid("only one of _msg_id and _reply_q is set")
    # With a timeout, a thread would send keep-alive messages for that long. Cyborg's clients do not
    # request them.
    fields.pop("_timeout", None)


def check_answer(fields: dict[str, Any]) -> None:
    """Raise Invalid for a malformed answer; reduce a failure to its class name and message.

    oslo.messaging would use the other parts of a failure to create an exception object in this
    process.
    """
    _check_name(fields, "_msg_id", needed=True)
    _check_name(fields, "_unique_id")
    fields["ending"] = fields.get("ending") is True
    failure = fields.setdefault("failure", None)
    if failure is None:
        return
    try:
        body = json.loads(failure)
        reduced = {"class": str(body["class"])[:MAX_NAME], "message": str(body["message"])[:1000]}
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise Invalid(f"malformed error in a reply: {type(exc).__name__}") from exc
    fields["failure"] = json.dumps({**reduced, "module": "", "tb": []})


def check_body(raw: Any, max_bytes: int, *, decompress: bool) -> None:
    """Check size and compression of a message before its body is read. Raise Invalid."""
    size = len(raw.body or b"")
    if size > max_bytes:
        raise Invalid(f"{size} bytes are more than the limit of {max_bytes}")
    headers = raw.headers
    if isinstance(headers, Mapping) and headers.get("compression") and not decompress:
        raise Invalid(
            "the message is compressed, but [oslo_messaging_rabbit] kombu_compression is unset"
        )


def decode(message: Any, max_bytes: int) -> dict[str, Any]:
    """Return the content of oslo.messaging's envelope. Raise Invalid."""
    if message.content_type != _JSON:
        raise Invalid(f"content type is {str(message.content_type)[:MAX_NAME]!r}, not {_JSON}")
    # kombu collects the errors of decompression, as sys.exc_info(), instead of raising them.
    if message.errors:
        _, error, _ = message.errors[0]
        raise Invalid(f"decompression failed: {error}")
    if len(message.body or b"") > max_bytes:
        raise Invalid(f"the decompressed body has more bytes than the limit of {max_bytes}")
    envelope = _parse_object(message.body, "the body")
    if envelope.get("oslo.version") != ENVELOPE:
        found = str(envelope.get("oslo.version"))[:MAX_NAME]
        raise Invalid(f"envelope version is {found!r}; expected {ENVELOPE}")
    inner = envelope.get("oslo.message")
    if not isinstance(inner, str):
        raise Invalid(f"oslo.message is {type(inner).__name__}, not a JSON string")
    return _parse_object(inner, "oslo.message")


def _parse_object(text: Any, subject: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError) as exc:
        raise Invalid(f"{subject} is not JSON: {type(exc).__name__} {exc}") from exc
    if not isinstance(value, dict):
        raise Invalid(f"{subject} is {type(value).__name__}, not an object")
    return value


def _check_name(fields: Mapping[str, Any], key: str, *, needed: bool = False) -> None:
    value = fields.get(key)
    if value is not None or needed:
        validation.check_text(key, value, MAX_NAME)


def _clean(value: Any) -> str:
    return sanitize(str(value or "")[:MAX_NAME].replace("\n", " "))
