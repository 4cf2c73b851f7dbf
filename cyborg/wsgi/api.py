# SPDX-License-Identifier: Apache-2.0
"""``cyborg.wsgi.api:application``: the API for any WSGI server.

The configuration is read when the server loads this module. Only environment variables select its
files: sys.argv is the command line of the server and is ignored.

::

    OS_CYBORG_CONFIG_FILES    configuration files, separated by semicolons
    OS_CYBORG_CONFIG_DIR      the directory of the files that are given by a relative path. If no
                              files are given, cyborg.conf in this directory is read; if it does
                              not exist, all files *.conf in this directory

If neither variable is set, oslo.config finds the files in ~/.cyborg and /etc/cyborg.
"""

import os
from collections.abc import Mapping

from oslo_config import cfg
from oslo_log import log

from cyborg import conf as options
from cyborg.api import auth
from cyborg.api.app import Api, make_app
from cyborg.api.heartbeat import Heartbeat
from cyborg.db.reader import Reader
from cyborg.rpc.client import make_conductor_client
from cyborg.rpc.transport import make_transport
from cyborg.wsgi.process import Application, config_arguments, server_id


def configure(environ: Mapping[str, str]) -> cfg.ConfigOpts:
    """Read the configuration and set up logging. Raise Misconfigured with the invalid option."""
    conf = cfg.ConfigOpts()
    options.register(conf, options.API_GROUPS)
    log.register_options(conf)
    conf(config_arguments(environ), project="cyborg", prog="cyborg-api")
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


def make_application(environ: Mapping[str, str]) -> Application:
    """Return the WSGI application with the configuration that the environment selects."""
    conf = configure(environ)
    return Application(lambda: open_api(conf))


application = make_application(os.environ)
