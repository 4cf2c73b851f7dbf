# SPDX-License-Identifier: Apache-2.0
"""Answering the methods of a contract, and nothing else."""

from collections.abc import Callable, Mapping
from typing import Any

import oslo_messaging
from oslo_config import cfg
from oslo_log import log
from oslo_messaging.rpc.server import RPCServer

from cyborg.core.errors import CyborgError, Invalid, Stale, Unavailable
from cyborg.core.text import clean
from cyborg.rpc import envelope
from cyborg.rpc.context import CallContext, ContextSerializer
from cyborg.rpc.contract import CONTRACTS, OTHER_BYTES, Contract, Method
from cyborg.rpc.transport import FAULTS, Transport

LOG = log.getLogger(__name__)


class Server:
    """One server on the bus: ``start``, then ``stop`` and ``wait``."""

    def __init__(self, transport: Transport, make: Callable[[], Any]) -> None:
        self._transport = transport
        self._make = make
        self._oslo: Any = None

    def start(self) -> None:
        """Begin to answer. Raises Unavailable when the broker does not let us: try again later."""
        self._transport.ensure_open()
        # A new one for each try: one that failed to start takes itself for started.
        oslo = self._make()
        try:
            oslo.start()
        except FAULTS as bad:
            raise Unavailable(
                f"the message broker at {self._transport.where} refuses: {bad}"
            ) from bad
        self._oslo = oslo

    def stop(self) -> None:
        """Take no more messages."""
        if self._oslo is not None:
            self._oslo.stop()

    def wait(self) -> None:
        """Wait until what was taken has been answered."""
        if self._oslo is not None:
            self._oslo.wait()


def make_server(
    transport: Transport, conf: cfg.ConfigOpts, topic: str, host: str, endpoint: Any
) -> Server:
    """Return a server of the contract that the topic ends with, ``conductor`` or ``agent``.

    ``endpoint`` has a method for each of the contract's, which takes the caller's context and the
    arguments, returns plain values and raises ``cyborg.core.errors``. Each call has a thread.
    """
    contract = CONTRACTS[topic.rpartition(".")[2]]
    target = oslo_messaging.Target(
        exchange=conf.rpc.topic, topic=topic, server=host, version=contract.version
    )
    answers = _Endpoint(conf, contract, endpoint)
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
    """Finds the method that a message calls, or says once that there is none."""

    def __init__(self, name: str, *parts: Any) -> None:
        super().__init__(*parts)
        self._name = name

    def dispatch(self, incoming: Any) -> Any:
        """Answer a call. Raises ExpectedException for one of a method that is not there.

        Its caller is told, who may be of a newer version; how our program looks it is not told.
        """
        try:
            return super().dispatch(incoming)
        except oslo_messaging.RPCDispatcherError as bad:
            ctxt = self.serializer.deserialize_context(incoming.ctxt)
            ctxt.update_store()
            LOG.warning("cyborg-%s refused a call %s: %s", self._name, _sender(ctxt, {}), bad)
            refusal = oslo_messaging.ExpectedException()
            refusal.exc_info = (type(bad), bad, None)
            raise refusal from None


class _Endpoint:
    """What oslo.messaging sees: the contract's methods, each behind the checks of all."""

    def __init__(self, conf: cfg.ConfigOpts, contract: Contract, endpoint: Any) -> None:
        self.target = oslo_messaging.Target(version=contract.version)
        for name, method in contract.methods.items():
            limit = conf.conductor.max_report_bytes if method.report else OTHER_BYTES
            what = f"{contract.name}.{name}"
            most = conf.conductor.max_report_bytes
            answer = _answering(what, method, limit, most, getattr(endpoint, name))
            setattr(self, name, oslo_messaging.expose(answer))


def _answering(
    what: str, method: Method, limit: int, most: int, work: Callable[..., Any]
) -> Callable[..., dict[str, Any]]:
    # By position: an argument of any name may come.
    def answer(ctxt: CallContext, /, **arguments: Any) -> dict[str, Any]:
        # The log shows the caller's request id while its thread is busy with it.
        ctxt.update_store()
        try:
            _check(what, method, limit, arguments)
        except Invalid as error:
            LOG.warning("%s refused %s: %s", what, _sender(ctxt, arguments), _line(error))
            return envelope.failure(error)
        try:
            return _answer(what, most, work(ctxt, **arguments))
        except CyborgError as error:
            if type(error) is not CyborgError:
                # What users do wrong is no matter of the operator's; what daemons do wrong is.
                level = log.WARNING if method.report or isinstance(error, Stale) else log.INFO
                LOG.log(level, "%s refused %s: %s", what, _sender(ctxt, arguments), _line(error))
                return envelope.failure(error)
            LOG.exception("%s failed %s", what, _sender(ctxt, arguments))
        except Exception:
            LOG.exception(
                "%s failed for a reason nobody foresaw %s", what, _sender(ctxt, arguments)
            )
        return envelope.failure(
            CyborgError(f"internal error: the log has it under request id {ctxt.request_id}")
        )

    return answer


def _answer(what: str, most: int, value: Any) -> dict[str, Any]:
    """Wrap an answer. One that cannot be sent is our mistake, not the caller's."""
    try:
        envelope.bounded(value, most, f"answer of {what}")
    except Invalid as bad:
        raise CyborgError(bad.message) from bad
    return envelope.answer(value)


def _check(what: str, method: Method, limit: int, arguments: dict[str, Any]) -> None:
    envelope.bounded(arguments, limit, what)
    given = set(arguments)
    if missing := sorted(set(method.arguments) - method.optional - given):
        raise Invalid(f"{what}: the argument {missing[0]} is missing", field=missing[0])
    if extra := sorted(given - set(method.arguments)):
        name = clean(extra[0], 64)
        raise Invalid(f"{what}: the argument {name} is unknown", field=name)


def _sender(ctxt: CallContext, arguments: Mapping[str, Any]) -> str:
    """Return in words who calls: the daemon, the host it speaks for, the request."""
    report = arguments.get("report")
    told = report if isinstance(report, Mapping) else arguments
    words = [f"{key} {clean(str(told[key])[:64])}" for key in ("host", "epoch") if told.get(key)]
    words = [word.replace("\n", " ") for word in words]
    return f"from {', '.join([ctxt.sender, *words, str(ctxt.request_id)])}"


def _line(error: CyborgError) -> str:
    """Return an error's message as one line of a log."""
    return clean(error.message.replace("\n", " "), 2000)
