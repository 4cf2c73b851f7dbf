# SPDX-License-Identifier: Apache-2.0
"""``cyborg.wsgi.api:application``: the API for any WSGI server.

The configuration is read when the server loads this module, from the environment alone: a server's
own command line is none of ours, and sys.argv is not looked at.

::

    OS_CYBORG_CONFIG_FILES    files, parted by semicolons
    OS_CYBORG_CONFIG_DIR      where those files are that are named without a directory; of its own
                              it stands for its cyborg.conf, or else for all *.conf in it

Without either, the files are those that oslo.config finds: ~/.cyborg, /etc/cyborg.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from oslo_config import cfg
from oslo_log import log

from cyborg import conf as options
from cyborg.api.app import Api, make_app
from cyborg.api.heartbeat import Heartbeat
from cyborg.db.reader import Reader
from cyborg.rpc.conductor import ConductorClient
from cyborg.rpc.transport import make_transport

FILE = "cyborg.conf"


def arguments(environ: Mapping[str, str]) -> list[str]:
    """Return the configuration that the environment names, as arguments of oslo.config."""
    folder = environ.get("OS_CYBORG_CONFIG_DIR", "").strip()
    named = environ.get("OS_CYBORG_CONFIG_FILES", "").split(";")
    files = [name.strip() for name in named if name.strip()]
    if not files and folder:
        if not (Path(folder) / FILE).exists():
            return ["--config-dir", folder]
        files = [FILE]
    # An absolute name stands for itself.
    return [word for name in files for word in ("--config-file", str(Path(folder) / name))]


def configure(environ: Mapping[str, str]) -> cfg.ConfigOpts:
    """Read the configuration and set up the log. Raises oslo.config's errors, naming the option."""
    conf = cfg.ConfigOpts()
    options.register(conf)
    log.register_options(conf)
    conf(arguments(environ), project="cyborg", prog="cyborg-api")
    log.setup(conf, "cyborg")
    return conf


class Application:
    """The API, opened by the first request of each process.

    A server may load this module before it forks its workers, and connections do not survive a
    fork. ``open_api`` is called once a process.
    """

    def __init__(self, open_api: Callable[[], Callable[..., Iterable[bytes]]]) -> None:
        self._open = open_api
        self._lock = threading.Lock()
        self._pid = 0
        self._api: Callable[..., Iterable[bytes]]
        # A fork while another thread holds the lock would leave it held for ever.
        os.register_at_fork(after_in_child=self._forked)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request."""
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._api = self._open()
                    self._pid = os.getpid()
        return self._api(environ, start_response)

    def _forked(self) -> None:
        self._lock = threading.Lock()


def open_api(conf: cfg.ConfigOpts) -> Api:
    """Return the API with connections of this process's own, which says hello from now on."""
    conductor = ConductorClient(make_transport(conf), conf)
    api = make_app(conf, conductor, Reader(conf))
    Heartbeat(conf, conductor, life(), api.health).start()
    return api


def life() -> str:
    """Return what the workers of one server share and two runs of it do not: their parent."""
    parent = os.getppid()
    try:
        # The 22nd field is the start, in ticks since the boot; the second may hold spaces.
        status = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8", errors="replace")
        started = status.rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = "?"
    return f"{parent}/{started}"


def make_application(environ: Mapping[str, str]) -> Application:
    """Return the application that the environment configures."""
    conf = configure(environ)
    return Application(lambda: open_api(conf))


application = make_application(os.environ)
