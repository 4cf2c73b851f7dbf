# SPDX-License-Identifier: Apache-2.0
"""One call of a driver in a process of its own: HTTP over its unix socket, bounded in all ways.

The time is that of the whole call: a driver that sends a byte each second is as late as one that
sends none.
"""

import http.client
import io
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Collection
from typing import Any

from cyborg.core import outside
from cyborg.core.errors import DriverFailed, Invalid, TimedOut
from cyborg.core.text import clean

MAX_ANSWER = 1024 * 1024  # bytes of a body
_MAX_HEAD = 64 * 1024
_MAX_WORDS = 300  # characters of what a driver says when it refuses
_PEER = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


def peer(link: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end: SO_PEERCRED of unix(7)."""
    pid, uid, _ = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def call(
    path: str,
    method: str,
    target: str,
    body: Any = None,
    *,
    seconds: float,
    users: Collection[int],
    clock: Callable[[], float] = time.monotonic,
) -> Any:
    """Return the JSON that the driver at this socket answers.

    Raises TimedOut after ``seconds``; DriverFailed for a driver that is not there, refuses, or
    speaks no HTTP or JSON; and for a socket that is none of the ``users``' (by their uids).
    """
    what = f"{method} {target}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            return outside.decode(_call(link, path, method, target, body, seconds, users, clock))
    except TimeoutError as bad:
        raise TimedOut(f"the driver has not answered {what} within {seconds:g} s") from bad
    except Invalid as bad:
        raise DriverFailed(f"the driver's answer to {what} is wrong: {bad.message}") from bad
    except (OSError, http.client.HTTPException, ValueError) as bad:
        words = clean(f"{type(bad).__name__}: {bad}"[:_MAX_WORDS])
        raise DriverFailed(f"the driver cannot be asked {what} at {path}: {words}") from bad


def _call(
    link: socket.socket,
    path: str,
    method: str,
    target: str,
    body: Any,
    seconds: float,
    users: Collection[int],
    clock: Callable[[], float],
) -> bytes:
    end = clock() + seconds
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError("it is no socket")
    link.settimeout(seconds)
    link.connect(path)
    if (user := peer(link)[1]) not in users:
        raise OSError(f"it is user {user}'s, who may not be a driver")
    data = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Accept: application/json\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    link.settimeout(_left(end, clock))
    link.sendall(head.encode("ascii") + data)
    answer = http.client.HTTPResponse(_Patient(link, end, clock), method=method)  # type: ignore[arg-type]
    with answer:
        answer.begin()
        told = answer.read(MAX_ANSWER + 1)
        if len(told) > MAX_ANSWER:
            raise Invalid(f"it is longer than {MAX_ANSWER} bytes (1 MiB)")
        if answer.length:
            raise Invalid(f"it ends {answer.length} bytes early")
        if not 200 <= answer.status < 300:
            words = clean(told[: 4 * _MAX_WORDS].decode(errors="replace"))[:_MAX_WORDS]
            raise DriverFailed(
                f"the driver answers {answer.status} to {method} {target}: {words or 'no reason'}"
            )
    return told


class _Patient(io.RawIOBase):
    """What comes in over a socket until a moment, and no more than an answer may have."""

    def __init__(self, link: socket.socket, end: float, clock: Callable[[], float]) -> None:
        self._link, self._end, self._clock = link, end, clock
        self._room = MAX_ANSWER + _MAX_HEAD

    def makefile(self, _: str) -> io.BufferedReader:
        """Be the socket that http.client wants."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what there is. Raises TimeoutError, and Invalid when it is too much."""
        self._link.settimeout(_left(self._end, self._clock))
        got = self._link.recv_into(buffer)
        self._room -= got
        if self._room < 0:
            raise Invalid(f"it is longer than {MAX_ANSWER} bytes (1 MiB) with its head")
        return got


def _left(end: float, clock: Callable[[], float]) -> float:
    """Return the seconds left. Raises TimeoutError when there are none."""
    if (left := end - clock()) <= 0:
        raise TimeoutError
    return left
