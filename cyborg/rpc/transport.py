# SPDX-License-Identifier: Apache-2.0
"""Transport to the message broker, and its behaviour while the broker is unavailable.

``rabbit://`` is the bus of a real installation. ``kombu+memory:////`` stays in the process and
still encodes every message; a call takes 2 ms, while oslo.messaging's ``fake://`` polls every
50 ms.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import amqp
import oslo_messaging
from oslo_config import cfg

from cyborg.compat import memory_broker, rabbit
from cyborg.core import log, text
from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.rpc import filters, publishing
from cyborg.rpc.publishing import FAULTS
from cyborg.telemetry.recorder import MetricRecorder

LOG = log.get_logger(__name__)

# Seconds that a call waits for the first connection to the broker.
OPEN_TIMEOUT = 5.0

# Seconds that an answer waits for the reply queue of its caller to exist again.
REPLY_QUEUE_WAIT = 5

# Seconds between two attempts to reconnect. With the driver's default of 30, calls would fail for
# up to 30 s after the broker is back.
MAX_RETRY_DELAY = 3

# Seconds between heartbeats of a broker connection; after twice this time without one, the
# connection is replaced. With the driver's default of 60, a connection that receives no bytes
# blocks all calls for two minutes. With 15, twice the interval plus the pause between two checks is
# more than 30 s: an outage of 30 s would be detected only after its end.
HEARTBEAT = 12

# Seconds after an answer from a queue in which the queue is assumed to have a server.
ANSWER_FRESH = 1.0


def register_options(conf: cfg.ConfigOpts) -> None:
    """Register the options of oslo.messaging, such as ``transport_url``.

    Only needed to override an option before a transport is created.
    """
    oslo_messaging.TransportURL.parse(conf, "rabbit://")
    # If the reply queue is gone, so is the caller; a thread that waits for the queue is blocked.
    rabbit.register_options(
        conf,
        kombu_missing_consumer_retry_timeout=REPLY_QUEUE_WAIT,
        heartbeat_timeout_threshold=HEARTBEAT,
    )


@contextmanager
def checked_url(url: str, option: str) -> Iterator[None]:
    """Raise Misconfigured if the block cannot create a transport to the URL of an option."""
    try:
        yield
    except (oslo_messaging.MessagingException, ValueError) as exc:
        # The URL has a password; the message of the cause quotes it, so it is not used.
        raise Misconfigured(
            f"{option}: found a URL of scheme {url.partition(':')[0]!r} that cannot be used; "
            "expected something like rabbit://user:password@host:5672/",
            option=option,
        ) from exc


class Transport:
    """Transport to the broker, shared by the clients and servers of a process.

    It connects at its first use, so that a process can fork before that. ``recorder`` records the
    metrics of the process; its owner opens it.
    """

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        self._conf = conf
        self.recorder = MetricRecorder()
        register_options(conf)
        if str(conf.transport_url).startswith("kombu+memory:"):
            # They warn of the missing host name and heartbeat, which such a connection never has.
            for name in ("kombu.connection", filters.DRIVER):
                logging.getLogger(name).setLevel(logging.ERROR)
            memory_broker.install()
        filters.limit_library_log()
        with checked_url(str(conf.transport_url), "[DEFAULT] transport_url"):
            self.oslo = oslo_messaging.get_rpc_transport(conf)
        # Only now: the driver registers its options when its first transport is created.
        conf.set_default("rabbit_interval_max", MAX_RETRY_DELAY, group="oslo_messaging_rabbit")
        self._closing = filters.filter_messages(self.oslo, conf)
        self._lock = threading.Lock()
        self._opened = threading.Event()
        self._opener: threading.Thread | None = None
        self._last_error = ""
        self._answered: dict[str, float] = {}  # monotonic time of the last answer by queue
        # Set before the connections are closed: a call that fails by that must see it.
        self.is_closed = False

    def ensure_open(self) -> None:
        """Connect to the broker if not done yet. Raise Unavailable if it does not answer in time.

        Wait up to OPEN_TIMEOUT seconds for the answer.
        """
        # The rabbit driver creates its reply queue with the first call. It retries forever, for any
        # timeout of the call, and holds a lock. So one thread does that instead of each caller.
        # Once the queue exists, the driver reconnects by itself.
        if self._opened.is_set():
            return
        with self._lock:
            opener = self._opener
            if opener is None or not opener.is_alive():
                opener = threading.Thread(target=self._open, name="bus", daemon=True)
                self._opener = opener
                opener.start()
        # Each caller waits for the same thread, and may give up while it goes on.
        opener.join(min(self._conf.rpc.timeout, OPEN_TIMEOUT))
        if not self._opened.is_set():
            error = f": {self._last_error}" if self._last_error else ""
            raise Unavailable(f"the message broker at {self.broker_address} does not answer{error}")

    def record_answer(self, queue: str) -> None:
        """Record that a server that listens to a queue has just answered."""
        self._answered[queue] = time.monotonic()

    def forget_answer(self, queue: str) -> None:
        """Record that the servers that listened to a queue have left."""
        self._answered.pop(queue, None)

    def has_server(self, queue: str) -> bool:
        """Return whether a server listens to a queue, as far as the broker knows.

        Takes one round trip, unless a server answered within the last ANSWER_FRESH seconds. Always
        True for the in-process bus. Raise FAULTS if the broker is unavailable.
        """
        if time.monotonic() - self._answered.get(queue, float("-inf")) < ANSWER_FRESH:
            return True
        # The servers of the in-process bus end with their process.
        if not str(self._conf.transport_url).startswith("rabbit:"):
            return True
        try:
            with rabbit.exclusive_connection(self.oslo) as connection:
                return publishing.count_consumers(connection, queue) > 0
        except amqp.ChannelError:
            # A broker user without the permission to check may still have that to call.
            return True

    @property
    def broker_address(self) -> str:
        """Return the addresses of the broker without credentials."""
        parsed = oslo_messaging.TransportURL.parse(self._conf)
        # The URL may leave out the default port of AMQP.
        hosts = [f"{host.hostname}:{host.port or 5672}" for host in parsed.hosts]
        return ", ".join(hosts) or str(parsed.transport)

    def cleanup(self) -> None:
        """Close all connections, without a wait for a thread that is still connecting.

        That thread closes what it opens, and ends within a second after an attempt that fails.
        """
        self.is_closed = True
        with self._lock:
            # An opener that has ended with an error closes nothing.
            is_connecting = (
                self._opener is not None and self._opener.is_alive() and not self._opened.is_set()
            )
            if is_connecting:
                self._closing.set()
        if not is_connecting:
            try:
                self.oslo.cleanup()
            finally:
                self._closing.set()

    def _open(self) -> None:
        """Connect and open the reply queue; a failure is logged and kept as the last error."""
        tls = self._conf.oslo_messaging_rabbit
        if tls.ssl and not tls.ssl_ca_file:
            LOG.warning(
                "[oslo_messaging_rabbit] ssl_ca_file is not set: any server with a certificate "
                "that this system trusts is accepted as the message broker, the host name is not "
                "checked; set ssl_ca_file"
            )
        try:
            with filters.capture_warnings(self._log_error):
                rabbit.open_reply_queue(self.oslo)
        except FAULTS as exc:
            # The cleanup has interrupted the attempt, which is no failure.
            if self._closing.is_set():
                return
            # The next call retries. The thread ends, so that it does not go on with a refused
            # password.
            self._log_error(str(exc))
            return
        except Exception as exc:
            LOG.exception(
                "Unexpected error while connecting to the broker at %s", self.broker_address
            )
            self._log_error(f"{type(exc).__name__}: see the log")
            return
        with self._lock:
            self._opened.set()
            is_closed = self._closing.is_set()
        # A cleanup that came first has left the connections to this thread.
        if is_closed:
            self.oslo.cleanup()

    def _log_error(self, error: str) -> None:
        """Log the error if it differs from the last logged error."""
        message = text.sanitize(error.partition(" (retrying in")[0].replace("\n", " "), 500)
        if message != self._last_error:
            LOG.error("The message broker at %s does not answer: %s", self.broker_address, message)
        self._last_error = message


def make_transport(conf: cfg.ConfigOpts) -> Transport:
    """Return the transport to ``[DEFAULT] transport_url``. Raise Misconfigured."""
    return Transport(conf)
