# SPDX-License-Identifier: Apache-2.0
"""What a process of a WSGI server needs of its own: configuration, connections, a name.

Importing this reads and opens nothing.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

FILE = "cyborg.conf"

App = Callable[..., Iterable[bytes]]


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


class Application:
    """An application that the first request of each process opens.

    A server may load it before it forks its workers, and connections do not survive a fork.
    ``open_app`` is called once a process; what it raises fails the request, and the next one tries
    again.
    """

    def __init__(self, open_app: Callable[[], App]) -> None:
        self._open = open_app
        self._lock = threading.Lock()
        self._pid = 0
        self._app: App
        # A fork while another thread holds the lock would leave it held for ever.
        os.register_at_fork(after_in_child=self._forked)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request."""
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._app = self._open()
                    self._pid = os.getpid()
        return self._app(environ, start_response)

    def _forked(self) -> None:
        self._lock = threading.Lock()


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
