# SPDX-License-Identifier: Apache-2.0
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from cyborg.core.errors import Misconfigured
from cyborg.standalone import http
from cyborg.standalone.http import HttpServer
from cyborg.tests.fixtures.machine.processes import wait_until


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


class SlowApplication:
    """An application whose requests wait for an event."""

    def __init__(self) -> None:
        self.entered, self.proceed = threading.Event(), threading.Event()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        self.entered.set()
        assert self.proceed.wait(120)
        return application(environ, start)


def _is_closed(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_stop_sends_the_response_of_a_request_in_progress(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "REQUEST_GRACE_PERIOD", 20.0)
    server, app = HttpServer("127.0.0.1", 0, "port"), SlowApplication()
    server.start(app)
    with ThreadPoolExecutor(2) as pool:
        request = pool.submit(requests.get, server.url, timeout=20)
        assert app.entered.wait(120)
        stop = pool.submit(server.stop)
        wait_until("the port is closed", lambda: _is_closed(int(server.url.rpartition(":")[2])))
        app.proceed.set()
        stop.result(120)
        assert request.result(120).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.name == "waitress"] == []


def test_request_that_outlasts_the_stop_logs_no_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "REQUEST_GRACE_PERIOD", 0.1)
    threads = set(threading.enumerate())
    server, app = HttpServer("127.0.0.1", 0, "port"), SlowApplication()
    server.start(app)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(requests.get, server.url, timeout=20)
        assert app.entered.wait(120)
        server.stop()
        app.proceed.set()
        assert isinstance(request.exception(20), requests.ConnectionError)
    wait_until("the request has ended", lambda: set(threading.enumerate()) <= threads)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
