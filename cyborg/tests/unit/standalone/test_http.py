# SPDX-License-Identifier: Apache-2.0
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import requests

from cyborg.core.errors import Misconfigured
from cyborg.standalone.http import HttpServer


def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    start("200 OK", [("Content-Type", "text/plain")])
    return [environ["PATH_INFO"].encode()]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost"])
def test_server_serves_and_stop_leaves_no_threads(host: str) -> None:
    threads = set(threading.enumerate())
    server = HttpServer(host, 0, "port")
    server.start(application)
    with requests.Session() as client:
        assert client.get(f"{server.url}/path").text == "/path"
        # The connection of the client is still open; stop() must not wait for it.
        server.stop()
    assert set(threading.enumerate()) == threads
    with pytest.raises(requests.ConnectionError):
        requests.get(server.url, timeout=5)


def test_server_stop_without_start_releases_port() -> None:
    first = HttpServer("127.0.0.1", 0, "port")
    port = int(first.url.rpartition(":")[2])
    first.stop()
    second = HttpServer("127.0.0.1", port, "port")
    second.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", ""])
def test_server_requires_loopback_address(host: str) -> None:
    with pytest.raises(Misconfigured, match=r"^\[standalone\] listen"):
        HttpServer(host, 0, "port")


def test_server_port_in_use_is_reported() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(Misconfigured, match=f"127.0.0.1:{port}: Address already in use"):
            HttpServer("127.0.0.1", port, "port")
