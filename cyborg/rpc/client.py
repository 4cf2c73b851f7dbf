# SPDX-License-Identifier: Apache-2.0
"""RPC clients of a contract: calls with bounded size and time, which return a value or an error."""

import inspect
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import oslo_messaging
from oslo_config import cfg
from oslo_context.context import RequestContext

from cyborg import tracing
from cyborg.core.errors import Misconfigured, TimedOut, Unavailable
from cyborg.core.log import get_logger
from cyborg.rpc import context, envelope, publishing
from cyborg.rpc.agent_api import AgentAPI
from cyborg.rpc.contract import (
    AGENT,
    CONDUCTOR,
    MAX_MESSAGE_BYTES,
    ConductorAPI,
    Contract,
    is_newer,
)
from cyborg.rpc.transport import Transport
from cyborg.telemetry.recorder import RPC_CLIENT_CALLS, RPC_CLIENT_SECONDS

LOG = get_logger(__name__)

# One retry replaces a stale connection; more retries would exceed the timeout of the caller.
_RETRIES = 1

# Seconds that a call waits for a server to listen.
SERVER_WAIT = 4.0

# Seconds that a call which an API makes for its caller waits for a conductor to listen.
#
# A conductor that was killed is started again by its service manager, and needs seconds itself.
# Nova sets a server to ERROR if it gets an error earlier.
RESTART_WAIT = 20.0

# Seconds without an answer after which such a call is sent again: its conductor may have ended.
#
# A copy costs what the call costs, so a slow conductor must have its time: with the default timeout
# a call is sent twice at most.
REPEAT_AFTER = 15.0

# Calls of a process that wait so long at a time: others need its threads, such as reads.
MAX_RESTART_WAITS = 4

# Seconds between two checks for a server.
SERVER_PAUSE = 0.5

# Result of a call that no queue took. A server may answer with any other value, also with None.
_NOT_SENT = object()
# Result of a call that was not answered in time.
_NO_ANSWER = object()

# Of the process, not of a client: the threads of the process must stay free.
_RESTART_WAITS = threading.BoundedSemaphore(MAX_RESTART_WAITS)
_pause = threading.Event().wait


@dataclass(slots=True)
class _Call:
    """A call, of which one or more copies are sent.

    ``end`` is the time until which it waits for a server, in monotonic seconds. ``may_be_executed``
    is set after a copy without an answer.
    """

    method: str
    values: Mapping[str, Any]
    target: Mapping[str, Any]
    queue: str
    subject: str
    context: RequestContext
    is_repeatable: bool = False
    may_be_executed: bool = False
    end: float | None = None


@dataclass(eq=False)
class Client:
    """RPC client of the servers of one contract.

    ``time_at`` is for calls that tell the server until when their caller waits.

    It returns the database's time at a reading of the monotonic clock, or a little less, None
    if it does not know it. It must not wait.
    """

    contract: Contract
    transport: Transport
    conf: cfg.ConfigOpts
    time_at: Callable[[float], datetime | None] | None = None

    def __post_init__(self) -> None:
        self._pin = _read_pin(self.contract, self.conf)
        self._topic = f"{self.conf.rpc.topic}.{self.contract.name}"
        target = oslo_messaging.Target(
            exchange=self.conf.rpc.topic, topic=self._topic, version=self.contract.version
        )
        self._oslo = oslo_messaging.get_rpc_client(
            self.transport.oslo,
            target,
            timeout=self.conf.rpc.timeout,
            serializer=context.CallSerializer(),
            retry=_RETRIES,
            # RabbitMQ then returns a message without a queue at once, instead of dropping it while
            # the caller waits for its whole timeout.
            transport_options=oslo_messaging.TransportOptions(at_least_once=True),
        )

    def call(self, method: str, server: str | None = None, /, **arguments: Any) -> Any:
        """Call a method of any server, or of the server on one host, and return its result.

        Raise the error of the method, Invalid if the message is too large, TimedOut and
        Unavailable.
        """
        name = f"{self.contract.name}.{method}"
        measured = self.transport.recorder.measure(RPC_CLIENT_CALLS, RPC_CLIENT_SECONDS, name)
        with measured, tracing.child_span(f"rpc {name}", tracing.SpanKind.CLIENT, host=server):
            return self._call(method, server, arguments)

    def supports(self, method: str, arguments: Collection[str]) -> bool:
        """Return whether the pin allows a call with these optional arguments."""
        version, _ = self.contract.minimal_call(method, arguments)
        return self._allows(version)

    def _allows(self, version: str) -> bool:
        return self._pin is None or not is_newer(version, self._pin)

    def _call(self, method: str, server: str | None, arguments: Mapping[str, Any]) -> Any:
        """Send a call with the lowest version that has its arguments; return the answer."""
        definition = self.contract.methods[method]
        limit = MAX_MESSAGE_BYTES
        if definition.is_report:
            limit = self.conf.conductor.max_report_bytes
        name = f"{self.contract.name}.{method}"
        envelope.check_size(arguments, limit, name)
        subject = name + (f" on {server}" if server else "")
        given = {key for key, value in arguments.items() if value is not None}
        version, left_out = self.contract.minimal_call(method, given)
        # Before the broker is asked: any server may be of the former release.
        if not self._allows(version):
            raise Unavailable(
                f"{subject} needs RPC version {version}, but [upgrade_levels] {self.contract.name} "
                f"is {self._pin}: an upgrade is in progress"
            )
        self.transport.ensure_open()
        # An argument of a newer version that is None: an older server would reject its name.
        values = {key: value for key, value in arguments.items() if key not in left_out}
        target = {"version": version} | ({"server": server} if server else {})
        queue = self._topic + (f".{server}" if server else "")
        # Conductors record the answers of these calls for their copies. Agents record none.
        is_repeatable = self.contract is CONDUCTOR and method in publishing.DEDUPLICATED_METHODS
        deadline = time.monotonic() + self.conf.rpc.timeout
        # Not the time of this host: the clocks of two hosts may differ by more than the timeout.
        # Converted from the deadline itself: the server must not have more time than this client.
        answer_by = self.time_at(deadline) if is_repeatable and self.time_at else None
        call_context = context.for_call(answer_by)
        call = _Call(
            method=method,
            values=values,
            target=target,
            queue=queue,
            subject=subject,
            context=call_context,
            is_repeatable=is_repeatable,
        )
        return self._finish(call, deadline)

    def _finish(self, call: "_Call", deadline: float) -> Any:
        """Return the result of a call; its error says if an earlier copy may have been executed."""
        try:
            return self._deliver(call, deadline)
        except TimedOut:
            # A kind of Unavailable that already says that the call may have been carried out.
            raise
        except Unavailable as exc:
            if not call.may_be_executed:
                raise
            # Not Unavailable, after which callers repeat the call as one that was certainly not
            # carried out.
            raise TimedOut(f"{exc.message}; an earlier copy may have been carried out") from exc

    def _deliver(self, call: "_Call", deadline: float) -> Any:
        """Send copies of a call until one is answered; return its result. Raise its error."""
        queue, subject = call.queue, call.subject
        while True:
            body = self._send(call, deadline)
            if body is _NO_ANSWER:
                call.may_be_executed = True
                if not call.is_repeatable or time.monotonic() >= deadline:
                    raise TimedOut(f"{subject} did not answer in {self.conf.rpc.timeout:g} s")
                LOG.warning("%s has no answer yet, sending it again", subject)
            elif body is not _NOT_SENT:
                is_final = not (call.is_repeatable and envelope.is_stopping(body))
                if is_final or time.monotonic() >= deadline:
                    break
                LOG.info("The server of %s stops, sending the call to another one", subject)
                # The wait for this server must not shorten the wait for the next one.
                call.end = None
            # The last answer no longer shows that the queue has a server: the queue was deleted
            # since then, or the server stops or may have ended.
            self.transport.forget_answer(queue)
            _pause(SERVER_PAUSE)
        self.transport.record_answer(queue)
        return envelope.unwrap(body, subject)

    def _send(self, call: "_Call", deadline: float) -> Any:
        """Send a call and return the body of its answer; _NOT_SENT if no queue took the call.

        Return _NO_ANSWER if no answer came in time. Raise Unavailable if no server listens in
        time or the broker fails, and TimedOut if the broker did not confirm the call or this
        process closed its connections.
        """
        subject, queue = call.subject, call.queue
        sent = publishing.SentCounter()
        now = time.monotonic()
        # A copy after no answer waits anew: the conductor may have been killed and starts again.
        if call.end is None or call.may_be_executed:
            wait = RESTART_WAIT if call.is_repeatable else SERVER_WAIT
            call.end = min(now + wait, max(deadline, now))
        try:
            self._await_server(queue, subject, call.end)
            timeout = self.conf.rpc.timeout
            if call.is_repeatable:
                # At least a second, also if the wait for a server has used up the time.
                timeout = min(REPEAT_AFTER, max(deadline - time.monotonic(), 1.0))
            client = self._oslo.prepare(timeout=timeout, **call.target)
            LOG.debug("Calling %s", subject, context=call.context)
            return client.call(call.context, call.method, **call.values)
        except oslo_messaging.MessagingTimeout:
            return _NO_ANSWER
        except oslo_messaging.RemoteError as exc:
            raise Unavailable(
                f"{subject} was rejected by the server: {exc.exc_type}; check the server's version"
            ) from exc
        except oslo_messaging.MessageUndeliverable as exc:
            if sent.count > 1:  # only the last copy was returned
                raise self._unconfirmed_error(subject) from exc
            if time.monotonic() >= call.end:
                raise self._no_server_error(subject) from exc
            return _NOT_SENT
        except publishing.FAULTS as exc:
            if sent.count:
                raise self._unconfirmed_error(subject) from exc
            raise Unavailable(
                f"{subject} cannot be called: error of the message broker at "
                f"{self.transport.broker_address}: {type(exc).__name__}"
            ) from exc
        except AttributeError as exc:
            # The driver forgets its queue of replies when it is closed, also that of calls that
            # still wait for one.
            if not self.transport.is_closed:
                raise
            raise TimedOut(
                f"{subject} has no answer: this process stops and has closed its connections to "
                "the message broker; it may have been carried out"
            ) from exc

    def _await_server(self, queue: str, subject: str, end: float) -> None:
        """Wait for a server, at most until ``end``. Raise Unavailable if none listens.

        A wait of more than SERVER_WAIT takes one of the few slots of _RESTART_WAITS.

        Without a server the message would stay in the queue. The caller would wait for the whole
        timeout and not know whether the call was carried out.
        """
        has_slot = False
        slot_needed_at = time.monotonic() + SERVER_WAIT
        try:
            while not self.transport.has_server(queue):
                now = time.monotonic()
                needs_slot = now >= slot_needed_at and not has_slot
                # Without a wait for a slot: the caller would wait for others to wait.
                if needs_slot:
                    has_slot = _RESTART_WAITS.acquire(blocking=False)
                if now >= end or (needs_slot and not has_slot):
                    raise self._no_server_error(subject)
                _pause(SERVER_PAUSE)
        finally:
            if has_slot:
                _RESTART_WAITS.release()

    def _no_server_error(self, subject: str) -> Unavailable:
        return Unavailable(
            f"{subject} cannot be called: no cyborg-{self.contract.name} listens at the "
            f"message broker at {self.transport.broker_address}"
        )

    def _unconfirmed_error(self, subject: str) -> TimedOut:
        return TimedOut(
            f"{subject} was sent, but the message broker at {self.transport.broker_address} did "
            "not confirm it: it may have been carried out"
        )


def make_conductor_client(
    transport: Transport,
    conf: cfg.ConfigOpts,
    time_at: Callable[[float], datetime | None] | None = None,
) -> ConductorAPI:
    """Return an RPC client that calls any conductor with the thread's request context.

    With ``time_at``, which is that of ``Client``, the conductor learns until when the caller of a
    changing call waits: a bind never commits after that.
    """
    return cast(ConductorAPI, _Proxy(Client(CONDUCTOR, transport, conf, time_at), ConductorAPI))


def make_agent_client(transport: Transport, conf: cfg.ConfigOpts) -> AgentAPI:
    """Return an RPC client that calls the agent of a host with the thread's request context."""
    return cast(AgentAPI, _Proxy(Client(AGENT, transport, conf), AgentAPI))


def supports(api: ConductorAPI | AgentAPI, method: str, *arguments: str) -> bool:
    """Return whether the pinned version has a method with these optional arguments.

    Without it, the caller must do what the former release does: its servers may receive the call.
    An ``api`` that is no RPC client has the methods of this release. Raise ValueError if the method
    has no such argument: otherwise the pin would refuse the call that was said to be allowed.
    """
    if not isinstance(api, _Proxy):
        return True
    if unknown := {*arguments}.difference(api.client.contract.methods[method].arguments):
        raise ValueError(f"{method} has no arguments {sorted(unknown)}")
    return api.client.supports(method, arguments)


def check_pins(conf: cfg.ConfigOpts) -> None:
    """Raise Misconfigured if a pin is of another major version than this release."""
    for contract in (AGENT, CONDUCTOR):
        _read_pin(contract, conf)


def _read_pin(contract: Contract, conf: cfg.ConfigOpts) -> str | None:
    """Return the highest version of a call, None without a limit. Raise Misconfigured."""
    pin: str | None = conf.upgrade_levels[contract.name]
    if pin is not None and pin.partition(".")[0] != contract.version.partition(".")[0]:
        option = f"[upgrade_levels] {contract.name}"
        raise Misconfigured(
            f"{option} is {pin}, expected a version of the same major version as "
            f"{contract.version}, that of this release",
            option=option,
        )
    return pin


class _Proxy:
    """Client with the methods that an API declares."""

    def __init__(self, client: Client, api: type) -> None:
        self.client = client
        # No __getattr__: a call of a method that the contract lacks must fail as for any object.
        for name in client.contract.methods:
            setattr(self, name, _make_method(client, name, getattr(api, name)))


def _make_method(client: Client, name: str, declared: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method with the declared signature that calls ``name`` by RPC."""
    contract = client.contract
    signature = inspect.signature(declared)

    def method(*args: Any, **kwargs: Any) -> Any:
        # To the declared signature, so that a wrong argument fails here and not in the server.
        # None stands for ``self``.
        bound = signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        _self, *items = bound.arguments.items()
        arguments = dict(items)
        server = arguments.pop(contract.server_argument) if contract.server_argument else None
        return client.call(name, server, **arguments)

    return method
