# SPDX-License-Identifier: Apache-2.0
"""Requests written by hand and sent to gunicorn: malformed, early and slow bodies.

Null bodies, malformed chunks, and bodies that end early or arrive slowly: each answer must be a
client error, fast, and show no internals. ``test_fuzz.py`` sends those that the OpenAPI document
can describe.
"""

import random
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from cyborg.api import controller as resource
from cyborg.api import routes
from cyborg.tests.fixtures.clouds.web_servers import Server, gunicorn, serving
from cyborg.tests.fixtures.fuzz.answers import (
    INTERNALS,
    LATEST,
    PATIENCE,
    RAW,
    REQUESTS,
    Statistics,
)
from cyborg.tests.fixtures.machine.processes import busy_factor

pytestmark = pytest.mark.matrix
# None of them is valid for any operation.
BAD_JSON = (
    *(b"null", b"[null]", b"[[null]]", b'{"?":null}', b"0", b"true", b'"null"', b"[]", b"1e999"),
    *(b"[" * 5000, b'{"a":' * 500 + b"null" + b"}" * 500, b"NaN", b'"\\ud800"', b"\xff"),
    b"9" * 5000,
)
BAD_CHUNKS = (
    *(b"zz\r\n{}\r\n0\r\n\r\n", b"2\r\n{}XX0\r\n\r\n", b"-1\r\n\r\n", b"\r\n\r\n"),
    b"0x2\r\n{}\r\n",
    *(b"2;a=\rb\r\n{}\r\n", b"f" * 40 + b"\r\n{}", b"2\n{}\n0\n\n", b"5\r\n{}\r\n0\r\n\r\nXXXX"),
    *(b"2\r\n{}\r\n0\r\nbad trailer\r\n\r\n", b"2" * 70_000, b" 2\r\n{}\r\n"),
)
# The share of each kind of raw requests in per cent.
SHARES = {
    **{"json": 30, "chunked json": 20, "chunk": 30, "length": 6, "early end": 8},
    **{"slow": 3, "slow chunk": 3},
}
PAUSE = 0.3  # seconds between two bytes of a slow body


class RawMaker:
    """Factory of raw requests: lists of pieces, with a pause before all but the first."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        table = routes.build_routes(resource.ApiContext.__new__(resource.ApiContext))
        self._routes = [
            (method, path)
            for path, methods in table.items()
            for method, controller in methods.items()
            if controller.operation.body is not None
        ]

    def make(self, kind: str | None = None) -> tuple[str, list[bytes]]:
        """Return a kind, by default a random one, and the pieces."""
        kind = self._chance.choices([*SHARES], [*SHARES.values()])[0] if kind is None else kind
        method, path = self._chance.choice(self._routes)
        path = re.sub(r"\*", lambda _: str(uuid4()), path)
        head = (
            f"{method} /v2/{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"OpenStack-API-Version: {LATEST}\r\nContent-Type: application/json\r\n"
        ).encode()
        body = self._chance.choice(BAD_JSON)
        length = b"Content-Length: %d\r\n\r\n"
        chunked = b"Transfer-Encoding: chunked\r\n\r\n"
        match kind:
            case "json":
                return kind, [head + length % len(body) + body]
            case "chunked json":
                return kind, [head + chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)]
            case "chunk":
                return kind, [head + chunked + self._chance.choice(BAD_CHUNKS)]
            case "length":
                value = self._chance.choice(
                    [b"-1", b"1e3", b"9" * 30, b"2, 3", b"x", b"0" * 25 + b"9"]
                )
                return kind, [head + b"Content-Length: " + value + b"\r\n\r\n{}"]
            case "early end":
                return kind, [head + length % (len(body) + 9) + body]
            case "slow":
                return kind, [head + length % 1000, *[b" "] * 50]
            case _:
                return kind, [head + chunked, *[b"1\r\n \r\n"] * 50]


def converse(server: Server, kind: str, pieces: list[bytes]) -> tuple[int, float]:
    """Send the pieces; return the status of the answer and the seconds it took."""
    begin = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        try:
            for number, piece in enumerate(pieces):
                connection.sendall(piece)
                if number:
                    time.sleep(PAUSE)
            if not kind.startswith("slow"):
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            # The answer was already sent.
            assert kind != "json"
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionResetError:
            assert answer, kind
    status = re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)
    assert status, (kind, pieces[0], answer)
    assert not INTERNALS.search(answer.decode(errors="replace")), answer
    return int(status[1]), time.monotonic() - begin


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(gunicorn, tmp_path_factory.mktemp("raw"), {"body_timeout": 1}) as web_server:
        yield web_server


@pytest.mark.timeout(900 + REQUESTS // 5)
def test_null_malformed_and_slow_bodies_get_a_4xx(
    server: Server, capsys: pytest.CaptureFixture[str], record_property: Any
) -> None:
    maker = RawMaker(seed=10)
    tally = Statistics()
    with ThreadPoolExecutor(8) as pool:
        # At least one of each kind.
        malformed_requests = [maker.make(kind) for kind in SHARES]
        malformed_requests += [maker.make() for _ in range(RAW - len(SHARES))]
        answers = pool.map(lambda one: (one[0], *converse(server, *one)), malformed_requests)
        for kind, status, seconds in answers:
            tally.note(kind, status, seconds)
    record_property("summary", tally.summarize())
    with capsys.disabled():
        print(f"\n{tally.summarize()}: {tally.by_operation}")  # noqa: T201
    assert tally.statuses.total() == RAW
    assert [status for status in tally.statuses if not 400 <= status < 500] == []
    assert [set(tally.by_operation[kind]) for kind in ("slow", "slow chunk")] == [{408}, {408}]
    assert tally.slowest < PATIENCE * busy_factor()
    assert "Traceback" not in (log := server.log.read_text(errors="replace"))
    assert " ERROR " not in log
