# SPDX-License-Identifier: Apache-2.0
"""Calling a method of a contract: bounded in size and time, answered by a value or our errors."""

from typing import Any

import oslo_messaging
from oslo_config import cfg

from cyborg.core.errors import TimedOut, Unavailable
from cyborg.rpc import context, envelope
from cyborg.rpc.contract import OTHER_BYTES, Contract
from cyborg.rpc.transport import FAULTS, Transport

# With one more try a connection that went stale is replaced; more would hold the caller up for
# longer than it said it would wait.
_RETRIES = 1


class Client:
    """Calls the servers of one contract."""

    def __init__(self, contract: Contract, transport: Transport, conf: cfg.ConfigOpts) -> None:
        self._contract = contract
        self._transport = transport
        self._conf = conf
        target = oslo_messaging.Target(
            exchange=conf.rpc.topic,
            topic=f"{conf.rpc.topic}.{contract.name}",
            version=contract.version,
        )
        self._oslo = oslo_messaging.get_rpc_client(
            transport.oslo,
            target,
            timeout=conf.rpc.timeout,
            serializer=context.ContextSerializer(),
            retry=_RETRIES,
            # RabbitMQ then says at once that no server has ever listened, instead of dropping the
            # message and leaving the caller to wait for its whole timeout.
            transport_options=oslo_messaging.TransportOptions(at_least_once=True),
        )

    def call(self, method: str, server: str | None = None, /, **arguments: Any) -> Any:
        """Call a method, of any server or of the one on that host, and return its answer.

        Raises what the method raised, Invalid for a message that is too large, TimedOut and
        Unavailable.
        """
        known = self._contract.methods[method]
        limit = self._conf.conductor.max_report_bytes if known.report else OTHER_BYTES
        what = f"{self._contract.name}.{method}"
        envelope.bounded(arguments, limit, what)
        self._transport.ensure_open()
        there = f" on {server}" if server else ""
        version, sent = self._contract.needed(method, arguments)
        to = {"version": version} | ({"server": server} if server else {})
        try:
            body = self._oslo.prepare(**to).call(context.current(), method, **sent)
        except oslo_messaging.MessagingTimeout as bad:
            raise TimedOut(f"{what}{there} did not answer in {self._conf.rpc.timeout:g} s") from bad
        except oslo_messaging.RemoteError as bad:
            raise Unavailable(
                f"{what}{there} is not understood there: {bad.exc_type}; is it of another version?"
            ) from bad
        except oslo_messaging.MessageUndeliverable as bad:
            raise Unavailable(
                f"{what}{there} cannot be called: no cyborg-{self._contract.name} listens at the "
                f"message broker at {self._transport.where}"
            ) from bad
        except FAULTS as bad:
            raise Unavailable(
                f"{what}{there} cannot be reached by way of the message broker at "
                f"{self._transport.where}: {type(bad).__name__}"
            ) from bad
        return envelope.opened(body, f"{what}{there}")
