# SPDX-License-Identifier: Apache-2.0
"""Answering the methods of a contract, and nothing else."""

from collections.abc import Callable
from typing import Any

import oslo_messaging
from oslo_config import cfg
from oslo_context.context import RequestContext
from oslo_log import log

from cyborg.core.errors import CyborgError, Invalid, Unavailable
from cyborg.rpc import envelope
from cyborg.rpc.context import ContextSerializer
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
    return Server(
        transport,
        lambda: oslo_messaging.get_rpc_server(
            transport.oslo,
            target,
            [answers],
            serializer=ContextSerializer(),
            access_policy=oslo_messaging.ExplicitRPCAccessPolicy,
        ),
    )


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
    def answer(ctxt: RequestContext, **arguments: Any) -> dict[str, Any]:
        # The log shows the caller's request id while its thread is busy with it.
        ctxt.update_store()
        try:
            _check(what, method, limit, arguments)
            return _answer(what, most, work(ctxt, **arguments))
        except CyborgError as error:
            if type(error) is not CyborgError:
                LOG.info("%s refused: %s", what, error.message)
                return envelope.failure(error)
            LOG.exception("%s failed", what)
        except Exception:
            LOG.exception("%s failed for a reason nobody foresaw", what)
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
        raise Invalid(f"{what}: the argument {extra[0]} is unknown", field=extra[0])
