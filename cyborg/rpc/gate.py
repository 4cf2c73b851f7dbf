# SPDX-License-Identifier: Apache-2.0
"""The gate of the bus: what is no call and no answer of ours goes no further, and is logged once.

oslo.messaging believes what it is sent: it unpacks archives of any size, keeps a thread for a
caller that never existed, and shows a traceback for each word that it does not understand. So a
message is read here before the driver sees it.
"""

import functools
import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import kombu
from oslo_config import cfg
from oslo_log import log
from oslo_messaging._drivers import impl_rabbit

from cyborg.core.errors import Invalid
from cyborg.core.text import clean
from cyborg.rpc.context import SENDER
from cyborg.rpc.contract import OTHER_BYTES

LOG = log.getLogger(__name__)

ENVELOPE = "2.0"  # oslo.messaging's own, of the JSON around the JSON
WORDS = 255  # characters of a name that is ours
_JSON = "application/json"
_REPLIES = re.compile(r"reply_[A-Za-z0-9_.:-]{1,200}")
_VERSION = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}")
_SEEN = 64  # unique ids that a queue remembers


def longest(conf: cfg.ConfigOpts) -> int:
    """Return the bytes of the longest body that one of ours may have.

    The arguments are JSON in JSON, which doubles quotes and backslashes; the context is small.
    """
    return 2 * max(int(conf.conductor.max_report_bytes), OTHER_BYTES) + 65536


def install(driver: Any, conf: cfg.ConfigOpts) -> None:
    """Have all that the rabbit driver takes in come through a gate. Raises nothing."""
    pool = getattr(driver, "_connection_pool", None)
    if pool is not None:
        signature = f"{os.path.basename(sys.argv[0])}@{conf.host}"
        pool.connection_cls = functools.partial(Connection, own=conf, signature=signature)


class Connection(impl_rabbit.Connection):  # type: ignore[misc]
    """A connection that signs what it sends and judges what it takes.

    It signs with the daemon's name, which anybody may claim, and with the broker's user, which
    RabbitMQ holds against the user that logged in.
    """

    def __init__(self, *args: Any, own: cfg.ConfigOpts, signature: str, **more: Any) -> None:
        self._own = own
        self._signature = signature
        super().__init__(*args, **more)

    def declare_consumer(self, consumer: Any) -> Any:
        """Begin to listen, behind a gate."""
        packed = bool(self._own.oslo_messaging_rabbit.kombu_compression)
        # Answers come by the default exchange, calls by ours.
        calls = bool(consumer.exchange_name)
        users = self._own.rpc.callers if calls else ()
        check = check_call if calls else check_answer
        consumer._callback = Gate(
            consumer, check, longest(self._own), unpack=packed, users=frozenset(users)
        )
        return super().declare_consumer(consumer)

    def _set_current_channel(self, new_channel: Any) -> None:
        super()._set_current_channel(new_channel)
        if self._producer is None:
            return
        said = {"app_id": self._signature[:WORDS]}
        # With a certificate instead of a password the broker may know us by another name.
        if self.connection.userid and self.login_method != "EXTERNAL":
            said["user_id"] = self.connection.userid
        self._producer.publish = functools.partial(kombu.Producer.publish, self._producer, **said)


class Message(dict[str, Any]):
    """A message that was let in, as oslo.messaging wants to have it."""

    def __init__(self, values: Mapping[str, Any], raw: Any) -> None:
        super().__init__(values)
        self._raw = raw

    def acknowledge(self) -> None:
        """Tell the broker that it has come."""
        self._raw.ack()

    def requeue(self) -> None:
        """Give it back to the broker."""
        self._raw.requeue()


class Gate:
    """Takes each message of one queue; passes it on, or says once what is wrong with it."""

    def __init__(
        self,
        consumer: Any,
        check: Callable[[dict[str, Any]], None],
        most: int,
        *,
        unpack: bool = False,
        users: Collection[str] = (),
    ) -> None:
        """``most`` is in bytes. ``users`` are the broker's users to be heard; none hears all."""
        self._consumer = consumer
        self._check = check
        self._most = most
        self._unpack = unpack
        self._users = users
        self._seen: deque[str] = deque(maxlen=_SEEN)

    def __call__(self, raw: Any) -> None:
        """Judge a message. One that is refused is gone."""
        said: dict[str, Any] = {}
        message = raw
        try:
            self._admit(raw)
            message = self._consumer.queue.channel.message_to_python(raw)
            said.update(_read(message, self._most))
            self._check(said)
            self._once(said)
        except Invalid as bad:
            LOG.warning(
                "Refused a message to %s from %s: %s",
                self._consumer.queue_name,
                sender(raw, said),
                clean(bad.message.replace("\n", " "), 1000),
            )
            _drop(self._consumer.queue.channel, raw)
            return
        said[f"_context_{SENDER}"] = sender(raw, {})
        try:
            self._consumer.callback(Message(said, message))
        except Exception:
            LOG.exception("A message to %s is lost", self._consumer.queue_name)

    def _admit(self, raw: Any) -> None:
        """Refuse by what can be seen from outside."""
        size = len(raw.body or b"")
        if size > self._most:
            raise Invalid(f"{size} bytes are more than the limit of {self._most}")
        headers = raw.headers
        if isinstance(headers, Mapping) and headers.get("compression") and not self._unpack:
            raise Invalid("it is compressed, and [oslo_messaging_rabbit] kombu_compression is not")
        user = raw.properties.get("user_id")
        if self._users and user not in self._users:
            raise Invalid(f"the broker's user {user!r} is not one of [rpc] callers")

    def _once(self, said: Mapping[str, Any]) -> None:
        unique = said.get("_unique_id")
        if unique in self._seen:
            raise Invalid("it came before, under the same unique id")
        if unique:
            self._seen.append(unique)


def sender(raw: Any, said: Mapping[str, Any]) -> str:
    """Return in words who sent a message, as far as it and the broker tell."""
    told = raw.properties
    user = told.get("user_id")
    words = [_word(told.get("app_id")) or "an unknown sender"]
    words += [f"broker user {_word(user)}"] if user else []
    words += [f"message {_word(told['message_id'])}"] if told.get("message_id") else []
    words += [f"answers to {_word(said['_reply_q'])}"] if said.get("_reply_q") else []
    words += [_word(said["_context_request_id"])] if said.get("_context_request_id") else []
    return ", ".join(words)


def check_call(said: dict[str, Any]) -> None:
    """Refuse what cannot be dispatched or answered. Raises Invalid."""
    _name(said, "method", needed=True)
    arguments = said.get("args", {})
    if not isinstance(arguments, dict):
        raise Invalid(f"args are {type(arguments).__name__}, not an object")
    version = said.get("version", "1.0")
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise Invalid(f"its version is {str(version)[:WORDS]!r}; expected something like 1.0")
    if said.get("namespace") is not None:
        _name(said, "namespace")
    _name(said, "_unique_id")
    _name(said, "_msg_id")
    where = said.get("_reply_q")
    if where is not None and not (isinstance(where, str) and _REPLIES.fullmatch(where)):
        raise Invalid(f"it wants its answer at {str(where)[:WORDS]!r}, which is no reply queue")
    if (where is None) != (said.get("_msg_id") is None):
        raise Invalid("it has one of _msg_id and _reply_q, and they need each other")
    # A thread would send signs of life for as long as the caller says. Our callers ask for none.
    said.pop("_timeout", None)


def check_answer(said: dict[str, Any]) -> None:
    """Refuse what no caller could understand. Raises Invalid.

    A failure that another oslo.messaging raised keeps its name and words, and nothing else: from
    more than that an exception would be built here.
    """
    _name(said, "_msg_id", needed=True)
    _name(said, "_unique_id")
    said["ending"] = said.get("ending") is True
    failure = said.setdefault("failure", None)
    if failure is None:
        return
    try:
        told = json.loads(failure)
        its = {"class": str(told["class"])[:WORDS], "message": str(told["message"])[:1000]}
    except (ValueError, TypeError, KeyError, RecursionError) as bad:
        raise Invalid(f"its failure is malformed: {type(bad).__name__}") from bad
    said["failure"] = json.dumps({**its, "module": "", "tb": []})


def _read(message: Any, most: int) -> dict[str, Any]:
    if message.content_type != _JSON:
        raise Invalid(f"its content type is {str(message.content_type)[:WORDS]!r}, not {_JSON}")
    if message.errors:
        raise Invalid(f"it cannot be unpacked: {message.errors[0][1]}")
    if len(message.body or b"") > most:
        raise Invalid(f"unpacked it has more bytes than the limit of {most}")
    envelope = _object(message.body, "the body")
    if envelope.get("oslo.version") != ENVELOPE:
        found = str(envelope.get("oslo.version"))[:WORDS]
        raise Invalid(f"its envelope has version {found!r}; expected {ENVELOPE}")
    inner = envelope.get("oslo.message")
    if not isinstance(inner, str):
        raise Invalid(f"the envelope holds {type(inner).__name__}, not JSON in a string")
    return _object(inner, "what is in the envelope")


def _object(text: Any, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError) as bad:
        raise Invalid(f"{what} is no JSON: {type(bad).__name__} {bad}") from bad
    if not isinstance(found, dict):
        raise Invalid(f"{what} is {type(found).__name__}, not an object")
    return found


def _name(said: Mapping[str, Any], key: str, *, needed: bool = False) -> None:
    value = said.get(key)
    if value is None and not needed:
        return
    if not isinstance(value, str) or not 1 <= len(value) <= WORDS or not value.isprintable():
        raise Invalid(f"{key} is {repr(value)[:WORDS]}; expected a name")


def _word(value: Any) -> str:
    return clean(str(value or "")[:WORDS].replace("\n", " "))


def _drop(channel: Any, raw: Any) -> None:
    """Take a message off its queue without taking it."""
    channel.basic_reject(raw.delivery_tag, requeue=False)
