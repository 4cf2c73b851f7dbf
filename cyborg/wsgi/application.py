# SPDX-License-Identifier: Apache-2.0
"""The API as a WSGI application: its configuration, and its connections in each process.

Importing this module reads no files and opens no connections.
"""

from collections.abc import Sequence
from importlib import metadata

from oslo_config import cfg
from oslo_log import log

from cyborg import conf as options
from cyborg.api import auth
from cyborg.api.app import Api, make_app
from cyborg.api.heartbeat import Heartbeat
from cyborg.db.reader import Reader
from cyborg.rpc.client import make_conductor_client
from cyborg.rpc.transport import make_transport
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
    log.setup(conf, "cyborg")
    return conf


def open_api(conf: cfg.ConfigOpts) -> Api:
    """Return the API with new connections for this process, and start its heartbeat."""
    conductor = make_conductor_client(make_transport(conf), conf)
    api = make_app(conf, conductor, Reader(conf))
    Heartbeat(conf, conductor, server_id(), api.health).start()
    return api


def make_application(arguments: Sequence[str]) -> Application:
    """Return the WSGI application with the configuration that the arguments select."""
    conf = configure(arguments)
    return Application(lambda: open_api(conf))
