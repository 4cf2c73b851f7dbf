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
from oslo_log import log
from oslo_messaging._drivers import impl_rabbit
from oslo_messaging._metrics import client as metrics
from oslo_messaging._tracing import client as tracing

from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.core.text import clean
from cyborg.rpc import gate, memory, quiet

LOG = log.getLogger(__name__)

OPENING = 5.0
"""Seconds that a call waits for a broker that has not been reached yet."""

MISSING = 5
"""Seconds that an answer waits for the queue of its caller to come back."""

LONGEST_PAUSE = 5
"""Seconds between two tries of a connection that was lost. The driver's own 30 would have calls
fail for that long after a broker is back, whatever else was mended meanwhile."""


def register_options(conf: cfg.ConfigOpts) -> None:
    """Register what oslo.messaging reads, ``transport_url`` among it, before it reads any.

    Only needed by who wants to override one of them before there is a transport.
    """
    oslo_messaging.TransportURL.parse(conf, "rabbit://")
    # Whose answer's queue is gone is gone too; a thread that waits for it serves nobody else.
    cfg.set_defaults(impl_rabbit.rabbit_opts, kombu_missing_consumer_retry_timeout=MISSING)
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
        conf.set_default("rabbit_interval_max", LONGEST_PAUSE, group="oslo_messaging_rabbit")
        gate.install(self.oslo._driver, conf)
        self._lock = threading.Lock()
        self._opened = threading.Event()
        self._opener: threading.Thread | None = None
        self._why = ""

    def ensure_open(self) -> None:
        """Reach the broker for the first time. Raises Unavailable when it does not answer soon.

        The rabbit driver makes its reply queue with the first call and tries for ever, whatever
        the call's timeout, holding a lock. So it tries in one thread that nobody waits for too
        long, instead of one for each caller. Once that is done the driver reconnects by itself.
        """
        if self._opened.is_set():
            return
        with self._lock:
            opener = self._opener
            if opener is None or not opener.is_alive():
                opener = threading.Thread(target=self._open, name="bus", daemon=True)
                self._opener = opener
                opener.start()
        opener.join(min(self._conf.rpc.timeout, OPENING))
        if not self._opened.is_set():
            why = f": {self._why}" if self._why else ""
            raise Unavailable(f"the message broker at {self.where} does not answer{why}")

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
        rabbit = self._conf.oslo_messaging_rabbit
        if rabbit.ssl and not rabbit.ssl_ca_file:
            LOG.warning(
                "[oslo_messaging_rabbit] ssl_ca_file is not set: whoever has a certificate that "
                "this system trusts, of whatever name, is taken for the message broker"
            )
        make_reply_queue: Any = getattr(self.oslo._driver, "_get_reply_q", None)
        try:
            with quiet.listening(self._note):
                if make_reply_queue is not None:
                    make_reply_queue()
        except FAULTS as bad:
            # Most get another try. One that the broker refuses must not go on trying passwords.
            self._note(str(bad))
            return
        except Exception as bad:
            LOG.exception("The message broker at %s cannot be used", self.where)
            self._note(f"{type(bad).__name__}: the log has more")
            return
        self._opened.set()

    def _note(self, why: str) -> None:
        """Remember what is in the way, and log it when it is news."""
        plain = clean(why.partition(" (retrying in")[0].replace("\n", " "), 500)
        if plain != self._why:
            LOG.error("The message broker at %s does not answer: %s", self.where, plain)
        self._why = plain


def _quieten() -> None:
    """Drop what kombu and the rabbit driver say of every in-process connection.

    That such a connection has no host name and no heartbeat is no news.
    """
    for name in ("kombu.connection", quiet.DRIVER):
        logging.getLogger(name).setLevel(logging.ERROR)


def make_transport(conf: cfg.ConfigOpts) -> Transport:
    """Return the way to ``[DEFAULT] transport_url``. Raises Misconfigured."""
    return Transport(conf)
