# SPDX-License-Identifier: Apache-2.0
"""``cyborg-api``: the API under gunicorn, with the settings of the section [api].

Other WSGI servers load ``cyborg.wsgi.api:application``. systemd may pass the socket.
"""

import sys
from collections.abc import Sequence
from typing import Any

from gunicorn.app.base import BaseApplication
from gunicorn.glogging import Logger
from oslo_config import cfg

from cyborg.core.errors import Misconfigured
from cyborg.wsgi.application import Application, configure, make_application


class ServiceLog(Logger):  # type: ignore[misc]
    """gunicorn's logger over the handlers of this service: the same files, the same format."""

    def setup(self, config: Any) -> None:
        """Set the level, and pass each line on to the handlers of oslo.log."""
        super().setup(config)
        self.error_log.propagate = True


class Server(BaseApplication):  # type: ignore[misc]
    """gunicorn with the API; its master process and each new worker read the configuration."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        super().__init__()

    def load_config(self) -> None:
        """Set the settings of gunicorn, at the start and after SIGHUP."""
        for name, value in make_settings(configure(self._arguments)).items():
            # Older releases of gunicorn do not have all of them.
            if name in self.cfg.settings:
                self.cfg.set(name, value)

    def load(self) -> Application:
        """Return the application, in each worker."""
        return make_application(self._arguments)


def make_settings(conf: cfg.ConfigOpts) -> dict[str, Any]:
    """Return the settings of gunicorn for a configuration."""
    host = f"[{conf.api.host_ip}]" if ":" in conf.api.host_ip else conf.api.host_ip
    return {
        "bind": f"{host}:{conf.api.port}",
        "workers": conf.api.workers,
        "threads": conf.api.threads,
        "proc_name": "cyborg-api",
        # 0: no limit. A URL may have some hundred uuids; a reverse proxy limits its length.
        "limit_request_line": 0,
        # Nova waits that long for an answer at most.
        "graceful_timeout": 60,
        # No handler of gunicorn: with [DEFAULT] use_json its lines would not be JSON.
        "errorlog": None,
        "logger_class": ServiceLog,
        # The control socket is in the home directory, which the user of the service may not have.
        "control_socket_disable": True,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        # A check only, whose result is not used: gunicorn would show an error without the name of
        # this command.
        configure(arguments)
    except (Misconfigured, cfg.Error) as exc:
        # On one line: a message of oslo.config may have several.
        sys.stderr.write(f"cyborg-api: {' '.join(str(exc).split())}\n")
        return 1
    Server(arguments).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
