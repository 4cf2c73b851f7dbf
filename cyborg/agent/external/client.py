# SPDX-License-Identifier: Apache-2.0
"""HTTP calls to an external driver over its unix socket, with limits on time and size."""

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

from cyborg.core import external
from cyborg.core.errors import DriverFailed, Invalid, TimedOut
from cyborg.core.text import sanitize

MAX_RESPONSE = 1024 * 1024  # bytes of a body
_MAX_HEADER = 64 * 1024
_MAX_TEXT = 300  # characters of a driver's error that are shown
_UCRED = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and uid of a socket's peer process (SO_PEERCRED of unix(7))."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(data)
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
    """Call an external driver; return the JSON body of its response.

    Raise TimedOut after ``seconds``. Raise DriverFailed if the driver cannot be reached, returns an
    error or an invalid response, or if its uid is not one of ``users``.
    """
    request = f"{method} {target}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            return external.decode(
                _call(connection, path, method, target, body, seconds, users, clock)
            )
    except TimeoutError as exc:
        raise TimedOut(f"the driver did not answer {request} within {seconds:g} s") from exc
    except Invalid as exc:
        raise DriverFailed(f"invalid response of the driver to {request}: {exc.message}") from exc
    except (OSError, http.client.HTTPException, ValueError) as exc:
        text = sanitize(f"{type(exc).__name__}: {exc}"[:_MAX_TEXT])
        raise DriverFailed(f"cannot call {request} of the driver at {path}: {text}") from exc


def _call(
    connection: socket.socket,
    path: str,
    method: str,
    target: str,
    body: Any,
    seconds: float,
    users: Collection[int],
    clock: Callable[[], float],
) -> bytes:
    end = clock() + seconds
    # lstat: a link could lead to the socket of another service, such as that of libvirt.
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError("not a socket")
    connection.settimeout(seconds)
    connection.connect(path)
    # The mode of the folder may have been changed since the start. The kernel vouches for the uid
    # of the peer, which no process can forge.
    if (user := peer_credentials(connection)[1]) not in users:
        raise OSError(f"user {user} is not allowed to run a driver")
    data = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Accept: application/json\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    # The timeout of a socket is for one operation: it is set again before each, to what is left.
    connection.settimeout(_seconds_left(end, clock))
    connection.sendall(head.encode("ascii") + data)
    # For the whole call: a driver that sends one byte each second exceeds it too.
    reader: Any = _DeadlineReader(connection, end, clock)
    with http.client.HTTPResponse(reader, method=method) as response:
        response.begin()
        content = response.read(MAX_RESPONSE + 1)
        if len(content) > MAX_RESPONSE:
            raise Invalid(f"response longer than {MAX_RESPONSE} bytes (1 MiB)")
        # http.client returns what it has got if the peer closes early; half a list would delete
        # devices.
        if response.length:
            raise Invalid(f"the body ends {response.length} bytes too early")
        if not 200 <= response.status < 300:
            text = sanitize(content[: 4 * _MAX_TEXT].decode(errors="replace"))[:_MAX_TEXT]
            raise DriverFailed(
                f"the driver returned {response.status} for {method} {target}: "
                f"{text or 'no reason'}"
            )
    return content


class _DeadlineReader(io.RawIOBase):
    """Reader of a socket with a deadline and a limit on the size of a response."""

    def __init__(self, connection: socket.socket, end: float, clock: Callable[[], float]) -> None:
        self._connection, self._end, self._clock = connection, end, clock
        self._bytes_left = MAX_RESPONSE + _MAX_HEADER

    def makefile(self, _: str) -> io.BufferedReader:
        """Return a buffered reader, as http.client expects it from a socket."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read available bytes. Raise TimeoutError, and Invalid beyond the limit."""
        self._connection.settimeout(_seconds_left(self._end, self._clock))
        count = self._connection.recv_into(buffer)
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise Invalid(f"response longer than {MAX_RESPONSE} bytes (1 MiB), headers included")
        return count


def _seconds_left(end: float, clock: Callable[[], float]) -> float:
    """Return the seconds left. Raise TimeoutError if there are none."""
    if (left := end - clock()) <= 0:
        raise TimeoutError
    return left
