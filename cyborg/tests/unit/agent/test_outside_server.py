# SPDX-License-Identifier: Apache-2.0
"""The agent's socket against whatever a process may send to it."""

import os
import random
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.outside_server import MAX_LINKS, MAX_REQUEST, HelloServer
from cyborg.core import outside
from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.fixtures.drivers import Told
from cyborg.fixtures.outside import folder, hello, request, say

PATIENCE = 0.5


class Taker:
    def __init__(self) -> None:
        self.bodies: list[Any] = []

    def __call__(self, body: Any) -> dict[str, Any]:
        self.bodies.append(body)
        if body == "busy":
            raise Unavailable("wait")
        return {"name": outside.hello(body, "/x").name}


@pytest.fixture
def taker() -> Taker:
    return Taker()


@pytest.fixture
def place(taker: Taker) -> Iterator[Path]:
    with folder() as path:
        server = HelloServer(
            outside.endpoint(str(path), "agent"), os.getuid(), taker, patience=PATIENCE
        )
        server.start()
        yield path
        server.stop()
        server.stop()
        assert not (path / "agent.sock").exists()


def test_a_hello(place: Path, taker: Taker) -> None:
    assert say(place, request(hello())) == (200, {"name": "crypto"})
    assert taker.bodies == [hello()]


def test_its_socket_is_for_its_owner_alone(place: Path) -> None:
    assert stat.S_IMODE((place / "agent.sock").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request({"status": "NO"}), 400),
        (request("busy"), 429),
        (request(b"{"), 400),
        (request(b"[" * 60_000), 400),
        (request(b"{}", target="/hardware"), 404),
        (request(b"", method="GET"), 501),
        (b"POST /hello HTTP/1.1\r\n\r\n", 400),
        (b"POST /hello HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /hello HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_REQUEST + 1), 400),
        (b"POST /hello HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
        (b"POST /hello HTTP/1.1\r\nContent-Length: 5\r\n\r\n", 0),
        (b"POST /hello HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"POST /" + b"x" * 70_000, 414),
        (b"\x00\xff\r\n\r\n", 0),
        (b"\r\n\r\n", 0),
        (b"\x16\x03\x01 TLS", 0),
        (b"", 0),
    ],
)
def test_what_is_no_hello(place: Path, taker: Taker, data: bytes, status: int) -> None:
    assert say(place, data)[0] == status
    assert say(place, request(hello())) == (200, {"name": "crypto"}), "it serves on"


def test_it_says_what_is_wrong(place: Path) -> None:
    status, body = say(place, request({"status": "NO", "endpoint": "a.sock", "type": "X"}))
    assert (status, body) == (400, {"error": "the hello has status 'NO': expected READY"})


def test_links_that_say_nothing_are_cut_and_cost_no_one_else(place: Path) -> None:
    with ExitStack() as open_:
        for _ in range(MAX_LINKS + 4):
            link = open_.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            link.settimeout(20)
            link.connect(str(place / "agent.sock"))
        assert link.recv(1) == b"", "one too many"
    # Those that were let in are cut at the end of their time at the latest.
    assert any(say(place, request(hello()))[0] == 200 for _ in range(100_000))


def test_an_old_socket_is_taken_over_and_a_living_one_not(place: Path) -> None:
    path = str(place / "agent.sock")
    with pytest.raises(Misconfigured, match="another agent listens at"):
        HelloServer(path, os.getuid(), Taker())
    old = str(place / "old.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.bind(old)
    HelloServer(old, os.getuid(), Taker()).stop()
    assert not (place / "old.sock").exists()


def test_another_user_is_not_heard(place: Path, taker: Taker) -> None:
    path = str(place / "b.sock")
    server = HelloServer(path, os.getuid(), taker)
    server._users = (4_000_000,)
    server.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(20)
        link.connect(path)
        assert link.recv(1) == b""
    server.stop()
    assert taker.bodies == []


def test_each_mistake_is_logged_and_is_loud_once_a_while(place: Path) -> None:
    now = [0.0]
    server = HelloServer(str(place / "c.sock"), os.getuid(), Taker(), clock=lambda: now[0])
    logged = Told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cyborg.agent.outside_server.LOG.log", lambda level, *_: logged(level))
        for pid in (1, 1, 2):
            server.complain(pid, "no")
        now[0] = 60.0
        server.complain(1, "no")
    server.stop()
    assert logged.calls == [(30,), (20,), (30,), (30,)]


def test_a_thousand_malformed_requests(place: Path, taker: Taker) -> None:
    """Whatever comes is answered or cut, and the socket is as good as before."""
    chance = random.Random(7)
    good = request(hello())
    answers = set()
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data) - 4)] = chance.randrange(256)
        # What is still whole ends at once, and what is not must not wait for its time to be over.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(20)
            link.connect(str(place / "agent.sock"))
            told = b""
            try:
                link.sendall(data)
                link.shutdown(socket.SHUT_WR)
                while more := link.recv(4096):
                    told += more
            except ConnectionError:
                pass
        answers.add(told.split(b" ")[1] if told.startswith(b"HTTP") else b"cut")
    assert answers <= {b"200", b"400", b"404", b"501", b"505", b"cut"}
    assert {b"200", b"400"} <= answers
    assert say(place, good) == (200, {"name": "crypto"})


def test_what_is_raised_unforeseen_is_no_answer(place: Path, caplog: Any) -> None:
    def break_(_: Any) -> dict[str, Any]:
        raise RuntimeError("unforeseen")

    server = HelloServer(str(place / "d.sock"), os.getuid(), break_)
    server.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(20)
        link.connect(str(place / "d.sock"))
        link.sendall(request(hello()))
        assert link.recv(1) == b""
    server.stop()
    assert "unforeseen" in caplog.text
