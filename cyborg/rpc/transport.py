# SPDX-License-Identifier: Apache-2.0
"""The way to the message broker, and what happens while it is away.

``rabbit://`` is the bus of a real installation. ``kombu+memory:////`` stays in the process and
still puts every message through the wire format; 2 ms a call, where oslo.messaging's ``fake://``
polls every 50 ms.
"""

import logging
import threading
from typing import Any

import amqp
import oslo_messaging
from kombu.exceptions import KombuError
from oslo_config import cfg
from oslo_messaging._metrics import client as metrics
from oslo_messaging._tracing import client as tracing

from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.rpc import memory, quiet

OPENING = 5.0
"""Seconds that a call waits for a broker that has not been reached yet."""


def register_options(conf: cfg.ConfigOpts) -> None:
    """Register what oslo.messaging reads, ``transport_url`` among it, before it reads any.

    Only needed by who wants to override one of them before there is a transport.
    """
    oslo_messaging.TransportURL.parse(conf, "rabbit://")
    # It registers these two groups with the global ConfigOpts alone and reads them from ours.
    conf.register_opts(tracing.oslo_messaging_tracing, group="oslo_messaging_tracing")
    conf.register_opts(metrics.oslo_messaging_metrics, group="oslo_messaging_metrics")


# What a call or a server meets when the broker is away. The driver translates what happens to a
# connection it holds; of one more that its pool wants to open it lets the libraries' errors out.
FAULTS = (oslo_messaging.MessagingException, KombuError, amqp.AMQPError, OSError)


class Transport:
    """One process's way to the broker; shared by its clients and servers.

    Nothing is connected before the first use, so that a process may fork until then.
    """

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        self._conf = conf
        register_options(conf)
        if str(conf.transport_url).startswith("kombu+memory:"):
            _quieten()
            memory.install()
        quiet.install()
        try:
            self.oslo = oslo_messaging.get_rpc_transport(conf)
        except (oslo_messaging.MessagingException, ValueError) as bad:
            # The URL holds a password, so the cause, which quotes it, is not passed on.
            scheme = str(conf.transport_url).partition(":")[0]
            raise Misconfigured(
                f"[DEFAULT] transport_url: found a URL of scheme {scheme!r} that cannot be used; "
                "expected something like rabbit://user:password@host:5672/"
            ) from bad
        self._lock = threading.Lock()
        self._opened = threading.Event()
        self._opener: threading.Thread | None = None

    def ensure_open(self) -> None:
        """Reach the broker for the first time. Raises Unavailable when it does not answer soon.

        The rabbit driver makes its reply queue with the first call and tries for ever, whatever
        the call's timeout, holding a lock. So it tries in one thread that nobody waits for too
        long, instead of one for each caller. Once that is done the driver reconnects by itself.
        """
        if self._opened.is_set():
            return
        with self._lock:
            if self._opener is None or not self._opener.is_alive():
                self._opener = threading.Thread(target=self._open, name="bus", daemon=True)
                self._opener.start()
        if not self._opened.wait(min(self._conf.rpc.timeout, OPENING)):
            raise Unavailable(f"the message broker at {self.where} does not answer")

    @property
    def where(self) -> str:
        """Name the broker without its credentials."""
        parsed = oslo_messaging.TransportURL.parse(self._conf)
        hosts = [f"{host.hostname}:{host.port or 5672}" for host in parsed.hosts]
        return ", ".join(hosts) or str(parsed.transport)

    def cleanup(self) -> None:
        """Close all connections. A thread that still tries to connect is left to its fate."""
        if self._opener is None or self._opened.is_set():
            self.oslo.cleanup()

    def _open(self) -> None:
        make_reply_queue: Any = getattr(self.oslo._driver, "_get_reply_q", None)
        if make_reply_queue is not None:
            make_reply_queue()
        self._opened.set()


def _quieten() -> None:
    """Drop what kombu and the rabbit driver say of every in-process connection.

    That such a connection has no host name and no heartbeat is no news.
    """
    for name in ("kombu.connection", quiet.DRIVER):
        logging.getLogger(name).setLevel(logging.ERROR)


def make_transport(conf: cfg.ConfigOpts) -> Transport:
    """Return the way to ``[DEFAULT] transport_url``. Raises Misconfigured."""
    return Transport(conf)
