# SPDX-License-Identifier: Apache-2.0
"""A WSGI application on a loopback port, served by threads of this process."""

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

from waitress import server, wasyncore

from cyborg.core.errors import Misconfigured

# How long requests in work may take to end when the server stops.
GRACE = 1.0


class HttpServer:
    """One listening port; ``url`` is its address once it is made. Nothing is served before start.

    Raises Misconfigured for an address that is not loopback or a port that is taken; ``option`` is
    the one that says the port.
    """

    def __init__(self, host: str, port: int, option: str) -> None:
        self._listening = listen(host, port, option)
        address, number = self._listening.getsockname()[:2]
        self.url = (
            f"http://[{address}]:{number}" if ":" in address else f"http://{address}:{number}"
        )
        self._map: dict[int, Any] = {}
        self._server: Any = None
        self._loop: threading.Thread | None = None

    def start(self, app: Callable[..., Iterable[bytes]], threads: int = 4) -> None:
        """Serve ``app`` until stop() is called; ``threads`` requests at once."""
        self._server = server.create_server(
            app,
            map=self._map,
            sockets=[self._listening],
            threads=threads,
            ident="cyborg",
            # Nothing on loopback is a proxy that could be believed.
            clear_untrusted_proxy_headers=True,
        )
        self._loop = threading.Thread(target=self._server.run, name=f"http-{self.url}")
        self._loop.start()

    def stop(self) -> None:
        """Close the port, let requests in work end for a moment, and join every thread."""
        if self._loop is None:
            self._listening.close()
            return
        # The loop ends when its map is empty, and only its own thread may empty it; not before we
        # have pulled, though: the pipe that we write to is one of the things it closes.
        pulling = threading.Lock()

        def close() -> None:
            with pulling:
                wasyncore.close_all(self._map)

        with pulling:
            self._server.trigger.pull_trigger(close)
        self._loop.join()
        self._server.task_dispatcher.shutdown(timeout=GRACE)
        self._loop = None


def listen(host: str, port: int, option: str) -> socket.socket:
    """Return a socket bound to a loopback address. Raises Misconfigured."""
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except OSError as bad:
        raise Misconfigured(f"[standalone] listen = {host}: {bad.strerror or bad}") from bad
    if not all(ipaddress.ip_address(name[4][0]).is_loopback for name in found):
        raise Misconfigured(
            f"[standalone] listen = {host}: the stand-alone service takes every caller for an "
            "administrator, so it listens on a loopback address only, such as 127.0.0.1 or ::1"
        )
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as bad:
        listening.close()
        raise Misconfigured(
            f"[standalone] {option}: cannot listen on {host}:{port}: {bad.strerror}"
        ) from bad
    return listening
