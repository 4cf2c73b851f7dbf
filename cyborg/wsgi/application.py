# SPDX-License-Identifier: Apache-2.0
"""The API as a WSGI application: its configuration, identifier, and connections by process.

Importing this module reads no files and opens no connections.
"""

import contextlib
import functools
import importlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from oslo_config import cfg
from oslo_log import log

from cyborg import conf as options
from cyborg import tracing
from cyborg.api import auth
from cyborg.api.app import Api, make_app
from cyborg.api.body import STOP_READING
from cyborg.api.health import Heartbeat
from cyborg.compat.oslo import set_up_logging
from cyborg.core.errors import Misconfigured
from cyborg.db.clock import INTERVAL
from cyborg.db.engine import Reader
from cyborg.rpc.client import check_pins, make_conductor_client
from cyborg.rpc.transport import make_transport
from cyborg.telemetry.recorder import MetricRecorder
from cyborg.threads.heap import exclude_startup_objects
from cyborg.threads.periodic import PeriodicTask

CONFIG_FILE = "cyborg.conf"

App = Callable[..., Iterable[bytes]]


def config_arguments(environ: Mapping[str, str]) -> list[str]:
    """Return the oslo.config arguments for the files that the environment variables select."""
    directory = environ.get("OS_CYBORG_CONFIG_DIR", "").strip()
    names = environ.get("OS_CYBORG_CONFIG_FILES", "").split(";")
    files = [name.strip() for name in names if name.strip()]
    if not files and directory:
        if not (Path(directory) / CONFIG_FILE).exists():
            return ["--config-dir", directory]
        files = [CONFIG_FILE]
    # If name is an absolute path, ``/`` ignores the directory.
    return [arg for name in files for arg in ("--config-file", str(Path(directory) / name))]


class Application:
    """A WSGI application that is opened by the first request in each process.

    ``open_app`` is called once per process. If it raises an exception, the request fails and the
    next request retries.
    """

    # Servers may load the application before they fork workers; connections do not survive a fork.

    def __init__(self, open_app: Callable[[], App]) -> None:
        self._open = open_app
        self._lock = threading.Lock()
        self._pid = 0
        self._app: App
        # After a fork while another thread holds the lock, the child could never acquire it.
        os.register_at_fork(after_in_child=self._replace_lock)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request."""
        if self._pid != os.getpid():
            with self._lock:
                # The second check under the lock: several threads may have made the first one.
                if self._pid != os.getpid():
                    self._app = self._open()
                    self._pid = os.getpid()
                    # All modules are imported now: no garbage collection must look at them again.
                    exclude_startup_objects()
        if stop_reading := make_read_stopper(environ):
            environ[STOP_READING] = stop_reading
        return self._app(environ, start_response)

    def _replace_lock(self) -> None:
        self._lock = threading.Lock()


def make_read_stopper(environ: Mapping[str, Any]) -> Callable[[], None] | None:
    """Return a function that interrupts a blocked read of the body, None if not supported.

    The response can still be sent after the interruption.
    """
    connection: socket.socket | None = environ.get("gunicorn.socket")
    return None if connection is None else functools.partial(_shutdown_input, connection)


def _shutdown_input(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)


def server_id() -> str:
    """Return an identifier of the parent process: one run of the server, shared by its workers."""
    parent = os.getppid()
    try:
        # Field 22 is the start time in ticks since boot; field 2, in parentheses, may have spaces.
        stat = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8", errors="replace")
        start_time = stat.rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        start_time = "?"
    return f"{parent}/{start_time}"


def configure(arguments: Sequence[str]) -> cfg.ConfigOpts:
    """Read the configuration and set up logging. Raise Misconfigured with the invalid option.

    ``arguments`` are those of oslo.config, such as ``--config-file``; without any, oslo.config
    finds the files in ~/.cyborg and /etc/cyborg.
    """
    conf = cfg.ConfigOpts()
    options.register(conf, options.API_GROUPS)
    log.register_options(conf)
    conf(list(arguments), project="cyborg", prog="cyborg-api", version=metadata.version("cyborg"))
    options.check(conf)
    # Now and not at the first request: the server must not start with such options.
    auth.check_config(conf)
    tracing.check_config(conf)
    check_pins(conf)
    if conf.api.metrics_port:
        _import_metrics_server()
    set_up_logging(conf, "cyborg-api")
    return conf


def open_api(conf: cfg.ConfigOpts) -> Api:
    """Return the API with new connections for this process, and start its heartbeat."""
    tracing.start(conf, "cyborg-api")
    transport = make_transport(conf)
    reader = Reader(conf)
    primary = find_primary(conf, reader)
    # Without the time of the primary, calls tell the conductor no deadline.
    time_at = None if primary is None else primary.clock.earliest_at
    conductor = make_conductor_client(transport, conf, time_at)
    api = make_app(conf, conductor, reader, transport.recorder)
    if conf.api.metrics_port:
        _serve_metrics(conf, transport.recorder)
    Heartbeat(conf, conductor, server_id(), api.health).start()
    if primary is not None:
        # A thread, as no request may wait for the primary: without a measurement the calls of this
        # process have no deadline.
        PeriodicTask("clock", INTERVAL, primary.clock.measure).start()
    return api


def find_primary(conf: cfg.ConfigOpts, reader: Reader) -> Reader | None:
    """Return a reader of the database to which conductors connect, not of a replica.

    This is ``reader``, that of requests, unless it reads a replica. Return None if only the replica
    is configured.
    """
    if not conf.database.slave_connection:
        return reader
    return Reader(conf, use_replica=False) if conf.database.connection else None


def _serve_metrics(conf: cfg.ConfigOpts, recorder: MetricRecorder) -> None:
    """Record metrics, and serve those of all workers unless another worker does."""
    telemetry, options = _import_metrics_server(), conf.api
    server = telemetry.MetricsServer(
        options.metrics_listen, options.metrics_port, recorder, options.metrics_directory
    )
    server.ensure()  # before the first request, which is then counted
    PeriodicTask("metrics", telemetry.RETRY_INTERVAL, server.ensure).start()


def _import_metrics_server() -> ModuleType:
    """Return the module of the metrics server. Raise Misconfigured if its library is missing.

    Without metrics, a worker needs neither the time nor the memory for it.
    """
    try:
        return importlib.import_module("cyborg.telemetry.server")
    except ImportError as exc:
        raise Misconfigured(
            f"[api] metrics_port is set, but {exc.name} is not installed: install it, or set "
            "metrics_port to 0",
            option="[api] metrics_port",
        ) from exc


def make_application(arguments: Sequence[str]) -> Application:
    """Return the WSGI application with the configuration that the arguments select."""
    conf = configure(arguments)
    return Application(lambda: open_api(conf))
