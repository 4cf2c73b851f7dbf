# SPDX-License-Identifier: Apache-2.0
"""``cyborg.wsgi.api:application``: the API for any WSGI server.

The configuration is read when the server loads this module, from the environment alone: a server's
own command line is none of ours, and sys.argv is not looked at.

::

    OS_CYBORG_CONFIG_FILES    files, parted by semicolons
    OS_CYBORG_CONFIG_DIR      where those files are that are named without a directory; by itself
                              it stands for its cyborg.conf, or else for all *.conf in it

Without either, the files are those that oslo.config finds: ~/.cyborg, /etc/cyborg.
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
from cyborg.rpc.conductor import ConductorClient
from cyborg.rpc.transport import make_transport
from cyborg.wsgi.process import Application, arguments, life


def configure(environ: Mapping[str, str]) -> cfg.ConfigOpts:
    """Read the configuration and set up the log. Raises Misconfigured, naming the option."""
    conf = cfg.ConfigOpts()
    options.register(conf)
    log.register_options(conf)
    conf(arguments(environ), project="cyborg", prog="cyborg-api")
    options.check(conf)
    auth.check(conf)
    log.setup(conf, "cyborg")
    return conf


def open_api(conf: cfg.ConfigOpts) -> Api:
    """Return the API with connections of this process's own, which says hello from now on."""
    conductor = ConductorClient(make_transport(conf), conf)
    api = make_app(conf, conductor, Reader(conf))
    Heartbeat(conf, conductor, life(), api.health).start()
    return api


def make_application(environ: Mapping[str, str]) -> Application:
    """Return the application that the environment configures."""
    conf = configure(environ)
    return Application(lambda: open_api(conf))


application = make_application(os.environ)
