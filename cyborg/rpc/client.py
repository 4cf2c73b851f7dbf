# SPDX-License-Identifier: Apache-2.0
"""RPC clients of a contract: calls with bounded size and time, which return a value or an error."""

import inspect
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import oslo_messaging
from oslo_config import cfg

from cyborg import tracing
from cyborg.core.errors import TimedOut, Unavailable
from cyborg.core.log import get_logger
from cyborg.rpc import context, envelope, publishing
from cyborg.rpc.contract import (
    AGENT,
    CONDUCTOR,
    MAX_MESSAGE_BYTES,
    AgentAPI,
    ConductorAPI,
    Contract,
)
from cyborg.rpc.faults import FAULTS
from cyborg.rpc.transport import Transport
from cyborg.telemetry.families import RPC_CLIENT_CALLS, RPC_CLIENT_SECONDS

LOG = get_logger(__name__)

# One retry replaces a stale connection; more retries would exceed the timeout of the caller.
_RETRIES = 1

SERVER_WAIT = 4.0
"""Seconds that a call waits for a server to listen: as long as a conductor takes to restart."""

SERVER_PAUSE = 0.5
"""Seconds between two checks for a server."""

_NOT_SENT = object()
"""Result of a call that no queue took. A server may answer with any other value, also with None."""

_pause = threading.Event().wait


class Client:
    """RPC client of the servers of one contract."""

    def __init__(self, contract: Contract, transport: Transport, conf: cfg.ConfigOpts) -> None:
        self._contract = contract
        self._transport = transport
        self._conf = conf
        self._topic = f"{conf.rpc.topic}.{contract.name}"
        target = oslo_messaging.Target(
            exchange=conf.rpc.topic,
            topic=self._topic,
            version=contract.version,
        )
        self._oslo = oslo_messaging.get_rpc_client(
            transport.oslo,
            target,
            timeout=conf.rpc.timeout,
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
        name = f"{self._contract.name}.{method}"
        measured = self._transport.recorder.measure(RPC_CLIENT_CALLS, RPC_CLIENT_SECONDS, name)
        with measured, tracing.child_span(f"rpc {name}", tracing.SpanKind.CLIENT, host=server):
            return self._call(method, server, arguments)

    def _call(self, method: str, server: str | None, arguments: Mapping[str, Any]) -> Any:
        definition = self._contract.methods[method]
        limit = MAX_MESSAGE_BYTES
        if definition.is_report:
            limit = self._conf.conductor.max_report_bytes
        name = f"{self._contract.name}.{method}"
        envelope.check_size(arguments, limit, name)
        self._transport.ensure_open()
        subject = name + (f" on {server}" if server else "")
        given = {key for key, value in arguments.items() if value is not None}
        version, left_out = self._contract.minimal_call(method, given)
        values = {key: value for key, value in arguments.items() if key not in left_out}
        target = {"version": version} | ({"server": server} if server else {})
        queue = self._topic + (f".{server}" if server else "")
        client = self._oslo.prepare(**target)
        end = time.monotonic() + min(SERVER_WAIT, self._conf.rpc.timeout)
        while (body := self._send(client, queue, subject, method, values, end)) is _NOT_SENT:
            # The queue was deleted since its server answered, perhaps with its exchange. The call
            # was not carried out.
            self._transport.forget_answer(queue)
            _pause(SERVER_PAUSE)
        self._transport.record_answer(queue)
        return envelope.unwrap(body, subject)

    def _send(
        self,
        client: Any,
        queue: str,
        subject: str,
        method: str,
        values: Mapping[str, Any],
        end: float,
    ) -> Any:
        """Send a call and return the body of its answer; _NOT_SENT if no queue took the call.

        After ``end``, in monotonic seconds, raise Unavailable instead of returning _NOT_SENT.
        """
        sent = publishing.SentCounter()
        try:
            self._await_server(queue, subject, end)
            ctxt = context.current()
            LOG.debug("Calling %s", subject, context=ctxt)
            return client.call(ctxt, method, **values)
        except oslo_messaging.MessagingTimeout as exc:
            raise TimedOut(f"{subject} did not answer in {self._conf.rpc.timeout:g} s") from exc
        except oslo_messaging.RemoteError as exc:
            raise Unavailable(
                f"{subject} was rejected by the server: {exc.exc_type}; check the server's version"
            ) from exc
        except oslo_messaging.MessageUndeliverable as exc:
            if sent.count > 1:  # only the last copy was returned
                raise self._unconfirmed_error(subject) from exc
            if time.monotonic() >= end:
                raise self._no_server_error(subject) from exc
            return _NOT_SENT
        except FAULTS as exc:
            if sent.count:
                raise self._unconfirmed_error(subject) from exc
            raise Unavailable(
                f"{subject} cannot be called: error of the message broker at "
                f"{self._transport.broker_address}: {type(exc).__name__}"
            ) from exc

    def _await_server(self, queue: str, subject: str, end: float) -> None:
        """Wait for a server, at most until ``end``. Raise Unavailable if none listens.

        Without a server the message would stay in the queue. The caller would wait for the whole
        timeout and not know whether the call was carried out.
        """
        while not self._transport.has_server(queue):
            if time.monotonic() >= end:
                raise self._no_server_error(subject)
            _pause(SERVER_PAUSE)

    def _no_server_error(self, subject: str) -> Unavailable:
        return Unavailable(
            f"{subject} cannot be called: no cyborg-{self._contract.name} listens at the "
            f"message broker at {self._transport.broker_address}"
        )

    def _unconfirmed_error(self, subject: str) -> TimedOut:
        return TimedOut(
            f"{subject} was sent, but the message broker at {self._transport.broker_address} did "
            "not confirm it: it may have been carried out"
        )


def make_conductor_client(transport: Transport, conf: cfg.ConfigOpts) -> ConductorAPI:
    """Return an RPC client that calls any conductor with the thread's request context."""
    return cast(ConductorAPI, _Proxy(CONDUCTOR, ConductorAPI, transport, conf))


def make_agent_client(transport: Transport, conf: cfg.ConfigOpts) -> AgentAPI:
    """Return an RPC client that calls the agent of a host with the thread's request context."""
    return cast(AgentAPI, _Proxy(AGENT, AgentAPI, transport, conf))


class _Proxy:
    """Client with the methods that an API declares."""

    def __init__(
        self, contract: Contract, api: type, transport: Transport, conf: cfg.ConfigOpts
    ) -> None:
        client = Client(contract, transport, conf)
        for name in contract.methods:
            setattr(self, name, _make_method(client, contract, name, getattr(api, name)))


def _make_method(
    client: Client, contract: Contract, name: str, declared: Callable[..., Any]
) -> Callable[..., Any]:
    signature = inspect.signature(declared)

    def method(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        _self, *items = bound.arguments.items()
        arguments = dict(items)
        server = arguments.pop(contract.server_argument) if contract.server_argument else None
        return client.call(name, server, **arguments)

    return method
