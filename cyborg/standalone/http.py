# SPDX-License-Identifier: Apache-2.0
"""A WSGI application on a loopback port, served by threads of this process."""

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

from waitress import server, wasyncore

from cyborg.core.errors import Misconfigured

# Seconds that stop() waits for requests in progress.
REQUEST_GRACE_PERIOD = 1.0


class HttpServer:
    """An HTTP server on one loopback port, which is bound at creation; ``url`` is its address.

    Raise Misconfigured if the address is not loopback or the port is in use. ``option`` is the
    name of the option for the port, for the error message.
    """

    def __init__(self, host: str, port: int, option: str) -> None:
        self._socket = listen(host, port, option)
        address, bound_port, *_ = self._socket.getsockname()  # IPv6 has two more fields
        netloc = f"[{address}]" if ":" in address else address
        self.url = f"http://{netloc}:{bound_port}"
        self._map: dict[int, Any] = {}
        self._server: Any = None
        self._loop: threading.Thread | None = None

    def start(self, app: Callable[..., Iterable[bytes]], threads: int = 4) -> None:
        """Serve ``app`` until stop() is called, with up to ``threads`` concurrent requests."""
        self._server = server.create_server(
            app,
            map=self._map,
            sockets=[self._socket],
            threads=threads,
            ident="cyborg",
            # There is no trusted proxy on loopback.
            clear_untrusted_proxy_headers=True,
        )
        self._loop = threading.Thread(target=self._server.run, name=f"http-{self.url}")
        self._loop.start()

    def stop(self) -> None:
        """Close the port, wait for requests in progress, and join all threads."""
        if self._loop is None:
            self._socket.close()
            return
        trigger = self._server.trigger
        # Only the thread of the loop may change its map. Not server.close(): that also closes the
        # trigger, which is needed below.
        trigger.pull_trigger(lambda: wasyncore.dispatcher.close(self._server))
        # The loop runs until here: it sends the responses, and a request that ends wakes it by
        # writing to the pipe of the trigger.
        self._server.task_dispatcher.shutdown(timeout=REQUEST_GRACE_PERIOD)
        # A request that did not end in time must not write to the closed pipe.
        self._server.pull_trigger = lambda: None
        # The loop ends when its map is empty. The lock delays this until pull_trigger has returned,
        # because close_all also closes the pipe.
        trigger_lock = threading.Lock()

        def close() -> None:
            with trigger_lock:
                wasyncore.close_all(self._map)

        with trigger_lock:
            trigger.pull_trigger(close)
        self._loop.join()
        self._loop = None


def listen(host: str, port: int, option: str) -> socket.socket:
    """Return a listening socket. Raise Misconfigured if the host is not a loopback address."""
    try:
        addresses = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except OSError as exc:
        raise Misconfigured(f"[standalone] listen = {host}: {exc.strerror or exc}") from exc
    # All of them: a name may resolve to loopback and to another address.
    if not all(ipaddress.ip_address(ip).is_loopback for *_, (ip, *_) in addresses):
        raise Misconfigured(
            f"[standalone] listen = {host}: the stand-alone service treats every caller as an "
            "administrator, so it requires a loopback address such as 127.0.0.1 or ::1"
        )
    family, kind, protocol, _, address = addresses[0]
    server_socket = socket.socket(family, kind, protocol)
    try:
        # A restart must not wait a minute for the connections of the former process.
        server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server_socket.bind(address)
        server_socket.listen(128)
    except OSError as exc:
        server_socket.close()
        raise Misconfigured(
            f"[standalone] {option}: cannot listen on {host}:{port}: {exc.strerror}"
        ) from exc
    return server_socket
