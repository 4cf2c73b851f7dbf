# SPDX-License-Identifier: Apache-2.0
"""Requests whose connection the server closes before it answers."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from keystoneauth1 import adapter, noauth, session

from cyborg.clients.nova import Nova
from cyborg.core.errors import Unavailable

SERVER = "7b0e4d19-c2a6-4f85-8e3b-0d5a91c4f7e2"


class BreakingServer(HTTPServer):
    """A server that closes the connections of its first ``broken`` requests without a response."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.broken = 0
        self.requests: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: BreakingServer

    def do_GET(self) -> None:
        self.server.requests.append(self.command)
        if len(self.server.requests) > self.server.broken:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b'{"itemNotFound": {"code": 404, "message": "no server"}}')

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[BreakingServer]:
    with BreakingServer() as new_server:
        thread = threading.Thread(target=new_server.serve_forever, args=(0.01,))
        thread.start()
        yield new_server
        new_server.shutdown()
        thread.join()


def nova(server: BreakingServer) -> Nova:
    auth = noauth.NoAuth(endpoint=server.url)
    return Nova(adapter.Adapter(session.Session(auth), service_type="compute"), 10.0)


def test_get_is_repeated_once_on_a_new_connection(server: BreakingServer) -> None:
    server.broken = 1
    assert nova(server).list_actions(SERVER) == ()
    assert server.requests == ["GET", "GET"]


def test_get_fails_if_the_repeated_request_fails_too(server: BreakingServer) -> None:
    server.broken = 2
    with pytest.raises(Unavailable, match="Nova cannot be reached"):
        nova(server).list_actions(SERVER)
    assert server.requests == ["GET", "GET"]


def test_post_is_not_repeated(server: BreakingServer) -> None:
    server.broken = 1
    with pytest.raises(Unavailable, match="Nova cannot be reached"):
        nova(server).hard_reboot(SERVER)
    assert server.requests == ["POST"]
