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
def test_it_serves_and_leaves_nothing(host: str) -> None:
    before = set(threading.enumerate())
    server = HttpServer(host, 0, "port")
    server.start(application)
    with requests.Session() as client:
        assert client.get(f"{server.url}/here").text == "/here"
        # The client's connection is still open: a stop must not wait for it.
        server.stop()
    assert set(threading.enumerate()) == before
    with pytest.raises(requests.ConnectionError):
        requests.get(server.url, timeout=5)


def test_one_that_never_started_gives_its_port_back() -> None:
    first = HttpServer("127.0.0.1", 0, "port")
    port = int(first.url.rpartition(":")[2])
    first.stop()
    again = HttpServer("127.0.0.1", port, "port")
    again.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", ""])
def test_only_loopback(host: str) -> None:
    with pytest.raises(Misconfigured, match=r"^\[standalone\] listen"):
        HttpServer(host, 0, "port")


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Misconfigured, match=f"127.0.0.1:{port}: Address already in use"):
            HttpServer("127.0.0.1", port, "port")
