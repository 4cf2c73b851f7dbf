# SPDX-License-Identifier: Apache-2.0
"""The agent's socket against whatever a process may send to it."""

import os
import random
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.external.server import MAX_CONNECTIONS, MAX_REQUEST, RegistrationServer
from cyborg.core import external
from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.tests.fixtures.hosts.external_drivers import (
    hello_body,
    http_request,
    send_to_agent,
    socket_folder,
)
from cyborg.tests.fixtures.hosts.scripted_driver import CallRecorder

PATIENCE = 0.5


class HelloRecorder:
    def __init__(self) -> None:
        self.bodies: list[Any] = []

    def __call__(self, body: Any) -> dict[str, Any]:
        self.bodies.append(body)
        if body == "busy":
            raise Unavailable("wait")
        return {"name": external.parse_hello(body, "/x").name}


@pytest.fixture
def recorder() -> HelloRecorder:
    return HelloRecorder()


@pytest.fixture
def place(recorder: HelloRecorder) -> Iterator[Path]:
    with socket_folder() as path:
        server = RegistrationServer(
            external.socket_path(str(path), "agent"),
            os.getuid(),
            recorder,
            request_timeout=PATIENCE,
            stop_poll=0.01,
        )
        server.start()
        yield path
        server.stop()
        server.stop()
        assert not (path / "agent.sock").exists()


def test_server_hello_returns_response(place: Path, recorder: HelloRecorder) -> None:
    assert send_to_agent(place, http_request(hello_body())) == (200, {"name": "crypto"})
    assert recorder.bodies == [hello_body()]


def test_server_socket_is_private(place: Path) -> None:
    assert stat.S_IMODE((place / "agent.sock").stat().st_mode) == 0o600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (http_request({"status": "NO"}), 400),
        (http_request("busy"), 429),
        (http_request(b"{"), 400),
        (http_request(b"[" * 60_000), 400),
        (http_request(b"{}", target="/hardware"), 404),
        (http_request(b"", method="GET"), 501),
        (b"POST /hello HTTP/1.1\r\n\r\n", 400),
        (b"POST /hello HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /hello HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_REQUEST + 1), 413),
        (http_request(b"[" * 4 * 1024 * 1024), 413),
        (http_request(b"[" * 4 * 1024 * 1024, target="/hardware"), 404),
        (b"POST /hello HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
        (b"POST /hello HTTP/1.1\r\nContent-Length: 5\r\n\r\n", 0),
        (b"POST /hello HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"POST /" + b"x" * 70_000, 414),
        # Newer releases of Python answer it, older ones close.
        (b"\x00\xff\r\n\r\n", (0, 400)),
        (b"\r\n\r\n", 0),
        (b"\x16\x03\x01 TLS", 0),
        (b"", 0),
    ],
)
def test_server_malformed_request_is_rejected(
    place: Path, recorder: HelloRecorder, data: bytes, status: int | tuple[int, ...]
) -> None:
    expected = (status,) if isinstance(status, int) else status
    assert send_to_agent(place, data)[0] in expected
    assert send_to_agent(place, http_request(hello_body())) == (200, {"name": "crypto"}), (
        "it serves on"
    )


def test_server_handler_error_is_returned(place: Path) -> None:
    status, body = send_to_agent(
        place, http_request({"status": "NO", "endpoint": "a.sock", "type": "X"})
    )
    assert (status, body) == (400, {"error": "the hello has status 'NO': expected READY"})


def test_server_idle_connections_time_out(place: Path) -> None:
    with ExitStack() as open_:
        for _ in range(MAX_CONNECTIONS + 4):
            link = open_.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            link.settimeout(20)
            link.connect(str(place / "agent.sock"))
        assert link.recv(1) == b"", "one too many"
    # Those that were let in are cut at the end of their time at the latest.
    assert any(send_to_agent(place, http_request(hello_body()))[0] == 200 for _ in range(100_000))


def test_server_that_could_start_no_thread_answers_later(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures = threading.Thread.start, [None] * (MAX_CONNECTIONS + 1)

    def fail(thread: threading.Thread) -> None:
        if thread.name == "external-driver-request" and failures:
            failures.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    refused = [send_to_agent(place, http_request(hello_body())) for _ in tuple(failures)]
    assert refused == [(0, None)] * (MAX_CONNECTIONS + 1)
    assert send_to_agent(place, http_request(hello_body()))[0] == 200


def test_server_replaces_stale_socket_only(place: Path) -> None:
    path = str(place / "agent.sock")
    with pytest.raises(Misconfigured, match="another agent listens at"):
        RegistrationServer(path, os.getuid(), HelloRecorder())
    old = str(place / "old.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale_socket:
        stale_socket.bind(old)
    RegistrationServer(old, os.getuid(), HelloRecorder()).stop()
    assert not (place / "old.sock").exists()


@pytest.mark.slow
def test_server_other_user_is_rejected(place: Path, recorder: HelloRecorder) -> None:
    path = str(place / "b.sock")
    server = RegistrationServer(path, os.getuid(), recorder)
    server._users = (4_000_000,)
    server.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(20)
        link.connect(path)
        assert link.recv(1) == b""
    server.stop()
    assert recorder.bodies == []


def test_log_rejected_warns_once_per_interval(place: Path) -> None:
    now = [0.0]
    server = RegistrationServer(
        str(place / "c.sock"), os.getuid(), HelloRecorder(), clock=lambda: now[0]
    )
    logged = CallRecorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cyborg.agent.external.server.LOG.log", lambda level, *_: logged(level))
        for pid in (1, 1, 2):
            server.log_rejected(pid, "no")
        now[0] = 60.0
        server.log_rejected(1, "no")
    server.stop()
    assert logged.calls == [(30,), (20,), (30,), (30,)]


@pytest.mark.slow
def test_server_thousand_malformed_requests_keeps_serving(
    place: Path, recorder: HelloRecorder
) -> None:
    """Each request is answered or disconnected, and the server keeps working."""
    chance = random.Random(7)
    valid_request = http_request(hello_body())
    answers = set()
    for _ in range(1000):
        data = bytearray(valid_request)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data) - 4)] = chance.randrange(256)
        # What is still whole ends at once, and what is not must not wait for its time to be over.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(20)
            link.connect(str(place / "agent.sock"))
            response = b""
            try:
                link.sendall(data)
                link.shutdown(socket.SHUT_WR)
                while more := link.recv(4096):
                    response += more
            except ConnectionError:
                pass
        answers.add(response.split(b" ")[1] if response.startswith(b"HTTP") else b"cut")
    assert answers <= {b"200", b"400", b"404", b"501", b"505", b"cut"}
    assert {b"200", b"400"} <= answers
    assert send_to_agent(place, valid_request) == (200, {"name": "crypto"})


@pytest.mark.slow
def test_server_unexpected_error_closes_connection(place: Path, caplog: Any) -> None:
    def fail(_: Any) -> dict[str, Any]:
        raise RuntimeError("unforeseen")

    server = RegistrationServer(str(place / "d.sock"), os.getuid(), fail)
    server.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(20)
        link.connect(str(place / "d.sock"))
        link.sendall(http_request(hello_body()))
        assert link.recv(1) == b""
    server.stop()
    assert "unforeseen" in caplog.text
