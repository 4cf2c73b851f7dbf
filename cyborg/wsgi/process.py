# SPDX-License-Identifier: Apache-2.0
"""Per-process state of the API in a WSGI server: configuration, connections, identifier.

Importing this module reads no files and opens no connections.
"""

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from cyborg.api.body import STOP_READING
from cyborg.threads.heap import exclude_startup_objects

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
                if self._pid != os.getpid():
                    self._app = self._open()
                    self._pid = os.getpid()
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
