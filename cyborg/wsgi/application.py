# SPDX-License-Identifier: Apache-2.0
"""The API as a WSGI application: its configuration, and its connections in each process.

Importing this module reads no files and opens no connections.
"""

import importlib
from collections.abc import Sequence
from importlib import metadata
from types import ModuleType

from oslo_config import cfg
from oslo_log import log

from cyborg import conf as options
from cyborg.api import auth
from cyborg.api.app import Api, make_app
from cyborg.api.heartbeat import Heartbeat
from cyborg.compat.log_setup import set_up_logging
from cyborg.core.errors import Misconfigured
from cyborg.db.reader import Reader
from cyborg.rpc.client import make_conductor_client
from cyborg.rpc.transport import make_transport
from cyborg.telemetry.recorder import MetricRecorder
from cyborg.threads.periodic import PeriodicTask
from cyborg.tracing import service as tracing
from cyborg.wsgi.process import Application, server_id


def configure(arguments: Sequence[str]) -> cfg.ConfigOpts:
    """Read the configuration and set up logging. Raise Misconfigured with the invalid option.

    ``arguments`` are those of oslo.config, such as ``--config-file``; without any, oslo.config
    finds the files in ~/.cyborg and /etc/cyborg.
    """
    conf = cfg.ConfigOpts()
    options.register(conf, options.API_GROUPS)
    log.register_options(conf)
    conf(
        list(arguments),
        project="cyborg",
        prog="cyborg-api",
        version=metadata.version("cyborg"),
    )
    options.check(conf)
    auth.check_config(conf)
    tracing.check_config(conf)
    if conf.api.metrics_port:
        _import_metrics_server()
    set_up_logging(conf, "cyborg-api")
    return conf


def open_api(conf: cfg.ConfigOpts) -> Api:
    """Return the API with new connections for this process, and start its heartbeat."""
    tracing.start(conf, "cyborg-api")
    transport = make_transport(conf)
    conductor = make_conductor_client(transport, conf)
    api = make_app(conf, conductor, Reader(conf), transport.recorder)
    if conf.api.metrics_port:
        _serve_metrics(conf, transport.recorder)
    Heartbeat(conf, conductor, server_id(), api.health).start()
    return api


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
