# SPDX-License-Identifier: Apache-2.0
"""RPC server: serves only the methods of a contract, with checked arguments."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import oslo_messaging
from oslo_config import cfg
from oslo_messaging import opts
from oslo_messaging.rpc.server import RPCServer

from cyborg import tracing
from cyborg.compat import rabbit
from cyborg.core.errors import CyborgError, Invalid, Stale, Unavailable
from cyborg.core.log import get_logger
from cyborg.core.text import sanitize
from cyborg.rpc import envelope, publishing
from cyborg.rpc.context import CallContext, ContextSerializer
from cyborg.rpc.contract import CONTRACTS, MAX_MESSAGE_BYTES, Contract, Method
from cyborg.rpc.transport import Transport
from cyborg.telemetry.recorder import RPC_SERVER_CALLS, RPC_SERVER_SECONDS, MetricRecorder

LOG = get_logger(__name__)

POOL_OPTION = "executor_thread_pool_size"  # of oslo.messaging, in [DEFAULT]


class ReportAdmission:
    """Limit of concurrent reports: one for each host, ``max_concurrent_reports`` for all hosts."""

    # Each report uses much memory. One over the limit is refused before it is parsed, so that it
    # uses none while it waits: its agent sends its current report later, and the delay doubles with
    # each refusal. A queue would keep reports that are old when their turn comes.

    def __init__(self, max_concurrent_reports: int) -> None:
        self._max = max_concurrent_reports
        self._lock = threading.Lock()
        self._hosts: set[str] = set()

    @contextlib.contextmanager
    def admitted(self, report: Any) -> Iterator[None]:
        """Count a report within the block. Raise Unavailable if the limit is reached."""
        name = report.get("host") if isinstance(report, Mapping) else None
        # A report without a host name is refused later as malformed; here it has the name "".
        host = name if isinstance(name, str) else ""
        with self._lock:
            if host in self._hosts:
                raise Unavailable(f"a report of host {host[:255]!r} is being recorded, retry")
            if len(self._hosts) >= self._max:
                raise Unavailable(f"{self._max} reports are being recorded, retry")
            self._hosts.add(host)
        try:
            yield
        finally:
            with self._lock:
                self._hosts.discard(host)


@dataclass(eq=False)
class Server:
    """RPC server on the bus: ``start``, then ``stop`` and ``wait``."""

    transport: Transport
    make: Callable[[], Any]

    def __post_init__(self) -> None:
        self._oslo: Any = None

    def start(self) -> None:
        """Start to serve calls. Raise Unavailable if the broker refuses the server."""
        self.transport.ensure_open()
        # Create a new server for each attempt: one that failed to start counts as started.
        oslo = self.make()
        try:
            oslo.start()
        except publishing.FAULTS as exc:
            raise Unavailable(
                f"the message broker at {self.transport.broker_address} refused the server: {exc}"
            ) from exc
        self._oslo = oslo

    def stop(self) -> None:
        """Stop taking messages; other servers get those that were not taken."""
        if self._oslo is not None:
            self._oslo.stop()
            rabbit.close_listener(self._oslo)

    def wait(self) -> None:
        """Wait until all taken messages are answered."""
        if self._oslo is not None:
            self._oslo.wait()


def count_threads(conf: cfg.ConfigOpts) -> int:
    """Return the number of calls that a server answers at the same time."""
    # oslo.messaging registers this option only when a server is created.
    found = {
        opt.name: opt for group, options in opts.list_opts() if group is None for opt in options
    }
    conf.register_opt(found[POOL_OPTION])
    return int(conf[POOL_OPTION])


def make_server(
    transport: Transport, conf: cfg.ConfigOpts, topic: str, host: str, endpoint: Any
) -> Server:
    """Return a server of the contract named by the end of the topic: ``conductor`` or ``agent``.

    ``endpoint`` has each method of the contract. A method takes the caller's context and the
    arguments, returns plain values and raises ``cyborg.core.errors``. Each call runs in its own
    thread.
    """
    contract = CONTRACTS[topic.rpartition(".")[2]]
    target = oslo_messaging.Target(
        exchange=conf.rpc.topic, topic=topic, server=host, version=contract.version
    )
    answers = _Endpoint(conf, contract, endpoint, transport.recorder)
    # The default would also serve each public attribute of the endpoint.
    policy = oslo_messaging.ExplicitRPCAccessPolicy
    return Server(
        transport,
        lambda: RPCServer(
            transport.oslo,
            target,
            _Dispatcher(contract.name, [answers], ContextSerializer(), policy),
        ),
    )


class _Dispatcher(oslo_messaging.RPCDispatcher):  # type: ignore[misc]
    """Dispatcher to the method that a message calls; logs an unknown method once."""

    def __init__(self, name: str, *args: Any) -> None:
        super().__init__(*args)
        self._name = name

    def dispatch(self, incoming: Any) -> Any:
        """Answer a call. Raise ExpectedException for an unknown method.

        The caller, which may have a newer version, gets the error; no traceback is logged.
        """
        try:
            return super().dispatch(incoming)
        except oslo_messaging.RPCDispatcherError as exc:
            ctxt = self.serializer.deserialize_context(incoming.ctxt)
            ctxt.update_store()
            LOG.warning("cyborg-%s refused a call %s: %s", self._name, _sender(ctxt, {}), exc)
            # The constructor takes the exception in progress with its traceback, which the answer
            # would show to the caller.
            refusal = oslo_messaging.ExpectedException()
            refusal.exc_info = (type(exc), exc, None)
            raise refusal from None


class _Endpoint:
    """Endpoint for oslo.messaging: the methods of the contract, with checks before each."""

    def __init__(
        self, conf: cfg.ConfigOpts, contract: Contract, endpoint: Any, recorder: MetricRecorder
    ) -> None:
        self.target = oslo_messaging.Target(version=contract.version)
        admission = ReportAdmission(conf.conductor.max_concurrent_reports)
        for name, method in contract.methods.items():
            limit = conf.conductor.max_report_bytes if method.is_report else MAX_MESSAGE_BYTES
            subject = f"{contract.name}.{name}"
            max_answer = conf.conductor.max_report_bytes
            func = _with_checks(subject, method, limit, max_answer, getattr(endpoint, name))
            # Around the checks: a report that is refused must not be encoded first to find its
            # size.
            handler = _with_admission(admission, subject, func) if method.is_report else func
            measured = _with_metrics(recorder, subject, handler)
            setattr(self, name, oslo_messaging.expose(measured))


def _with_metrics(
    recorder: MetricRecorder, subject: str, func: Callable[..., dict[str, Any]]
) -> Callable[..., dict[str, Any]]:
    """Return a handler that counts the calls by result, and observes their duration."""

    def handler(ctxt: CallContext, /, **arguments: Any) -> dict[str, Any]:
        started = time.monotonic()
        answer = func(ctxt, **arguments)
        # Of the answer, not of exceptions: the inner handler has turned each into an answer.
        result = answer["error"]["code"] if "error" in answer else "ok"
        recorder.count(RPC_SERVER_CALLS, subject, result)
        recorder.observe(RPC_SERVER_SECONDS, time.monotonic() - started, subject)
        return answer

    return handler


def _with_admission(
    admission: ReportAdmission, subject: str, func: Callable[..., dict[str, Any]]
) -> Callable[..., dict[str, Any]]:
    """Return a handler that refuses a report before it is parsed, if too many are in progress."""

    def handler(ctxt: CallContext, /, **arguments: Any) -> dict[str, Any]:
        try:
            with admission.admitted(arguments.get("report")):
                return func(ctxt, **arguments)
        except Unavailable as exc:
            ctxt.update_store()
            return _refuse(logging.INFO, subject, ctxt, arguments, exc)

    return handler


def _with_checks(
    subject: str, method: Method, limit: int, max_answer: int, func: Callable[..., Any]
) -> Callable[..., dict[str, Any]]:
    """Return a handler that checks arguments and result, and returns errors as answers.

    ``limit`` and ``max_answer`` are in bytes.
    """

    # ``ctxt`` is positional only, since a caller may send an argument of that name.
    def handler(ctxt: CallContext, /, **arguments: Any) -> dict[str, Any]:
        # Log lines of this thread show the caller's request id.
        ctxt.update_store()
        if LOG.isEnabledFor(logging.DEBUG):
            LOG.debug("Serving %s %s", subject, _sender(ctxt, arguments))
        try:
            _check_arguments(subject, method, limit, arguments)
        except Invalid as exc:
            return _refuse(logging.WARNING, subject, ctxt, arguments, exc)
        try:
            with tracing.remote_span(
                subject,
                ctxt.trace_context,
                tracing.SpanKind.SERVER,
                request_id=ctxt.request_id,
                host=_host(arguments),
            ):
                return _wrap_result(subject, max_answer, func(ctxt, **arguments))
        except Exception as exc:
            # A plain CyborgError is a defect of this service: each error for callers has a class.
            if isinstance(exc, CyborgError) and type(exc) is not CyborgError:
                # Errors of users are no concern of the operator; malformed reports of daemons are.
                is_warning = method.is_report or isinstance(exc, Stale)
                level = logging.WARNING if is_warning else logging.INFO
                return _refuse(level, subject, ctxt, arguments, exc)
            sender = _sender(ctxt, arguments)
            LOG.exception("Unexpected error in %s %s", subject, sender, host=_host(arguments))
        return envelope.wrap_error(
            CyborgError(f"internal error: see the log, request id {ctxt.request_id}")
        )

    return handler


def _refuse(
    level: int, subject: str, ctxt: CallContext, arguments: Mapping[str, Any], error: CyborgError
) -> dict[str, Any]:
    """Log a refused call; return the error as the answer."""
    LOG.log(
        level,
        "Refused call %s %s: %s",
        subject,
        _sender(ctxt, arguments),
        _line(error),
        host=_host(arguments),
    )
    return envelope.wrap_error(error)


def _wrap_result(subject: str, max_answer: int, value: Any) -> dict[str, Any]:
    """Return the response for a result. A result that cannot be sent is an internal error."""
    try:
        envelope.check_size(value, max_answer, f"answer of {subject}")
    except Invalid as exc:
        # Not Invalid, which would blame the caller.
        raise CyborgError(exc.message) from exc
    return envelope.wrap_result(value)


def _check_arguments(subject: str, method: Method, limit: int, arguments: dict[str, Any]) -> None:
    envelope.check_size(arguments, limit, subject)
    names = set(arguments)
    if missing := sorted(set(method.arguments) - method.optional - names):
        raise Invalid(f"{subject}: the argument {missing[0]} is missing", field=missing[0])
    if extra := sorted(names - set(method.arguments)):
        # It comes from the bus, and goes into the log and to the caller.
        name = sanitize(extra[0], 64)
        raise Invalid(f"{subject}: the argument {name} is unknown", field=name)


def _sender(ctxt: CallContext, arguments: Mapping[str, Any]) -> str:
    """Return the sender of a call for the log: the daemon, its host and epoch, the request id."""
    fields = _sender_fields(arguments)
    items = [
        f"{key} {sanitize(str(fields[key])[:64])}" for key in ("host", "epoch") if fields.get(key)
    ]
    # A name with a line break must not look like a line of the log.
    items = [item.replace("\n", " ") for item in items]
    return f"from {', '.join([ctxt.sender, *items, str(ctxt.request_id)])}"


def _host(arguments: Mapping[str, Any]) -> str | None:
    """Return the host of a call for the log; None if the call is not about a host."""
    host = _sender_fields(arguments).get("host")
    return host if isinstance(host, str) and host else None


def _sender_fields(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    report = arguments.get("report")
    return report if isinstance(report, Mapping) else arguments


def _line(error: CyborgError) -> str:
    """Return the message of an error as one line for the log."""
    return sanitize(error.message.replace("\n", " "), 2000)
