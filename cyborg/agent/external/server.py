# SPDX-License-Identifier: Apache-2.0
"""Registration of external drivers: HTTP on the agent's unix socket, in a checked directory.

Any user who can write to the directory of the drivers' sockets can be a driver.
"""

import contextlib
import json
import logging
import os
import socket
import socketserver
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple, cast

from cyborg.core import errors, external, log
from cyborg.core.text import sanitize

LOG = log.get_logger(__name__)

# Nobody else may enter, as any user who can is a driver; the group is for operators.
MODES = (0o700, 0o750)
MAX_PATH = 107  # bytes of a unix socket's path: sun_path of unix(7) less its end
_MAX_SOCKET_NAME = 46  # a slash, a driver's name of 40 characters, and .sock


_UCRED = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


class PeerCredentials(NamedTuple):
    """Process id and user id of the process at the other end of a socket."""

    pid: int
    uid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """Return the pid and uid of a socket's peer process (SO_PEERCRED of unix(7))."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _gid = _UCRED.unpack(data)
    return PeerCredentials(pid, uid)


def owner_uid(folder: str) -> int:
    """Return the uid of the folder's owner; the owner and root may run drivers.

    Raise Misconfigured if any other user could enter or replace the folder.
    """
    if not os.path.isabs(folder) or os.path.normpath(folder) != folder:
        raise _misconfigured(folder, "an absolute path without . and ..")
    if len(os.fsencode(folder)) + _MAX_SOCKET_NAME > MAX_PATH:
        raise _misconfigured(
            folder, f"a path of at most {MAX_PATH - _MAX_SOCKET_NAME} bytes (limit of unix sockets)"
        )
    try:
        status = os.lstat(folder)
        if (real := os.path.realpath(folder, strict=True)) != folder:
            raise _misconfigured(folder, f"a path without symbolic links, such as {real}")
        if not stat.S_ISDIR(status.st_mode):
            raise _misconfigured(folder, "a directory")
        # Who may write to a parent can replace the folder, and with it the drivers.
        parents = [(parent, os.lstat(parent)) for parent in Path(folder).parents]
    except OSError as exc:
        raise _misconfigured(folder, f"an existing directory ({exc.strerror})") from exc
    if (mode := stat.S_IMODE(status.st_mode)) not in MODES:
        raise _misconfigured(folder, f"a directory of mode 0700 or 0750, not {mode:04o}")
    agent_uid = os.geteuid()
    if agent_uid not in (0, status.st_uid):
        raise _misconfigured(
            folder, f"a directory of the agent's user ({agent_uid}), not of {status.st_uid}"
        )
    for parent, parent_status in parents:
        has_trusted_owner = parent_status.st_uid in (0, agent_uid, status.st_uid)
        is_writable = parent_status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        # In a sticky folder, such as /tmp, others cannot rename or remove an entry.
        is_sticky = parent_status.st_mode & stat.S_ISVTX
        if not has_trusted_owner or (is_writable and not is_sticky):
            raise _misconfigured(
                folder, f"a directory that other users cannot replace through {parent}"
            )
    return status.st_uid


def _misconfigured(folder: str, expected: str) -> errors.Misconfigured:
    return errors.Misconfigured(
        f"[agent] external_driver_dir: found {folder!r}; expected {expected}",
        option="agent.external_driver_dir",
    )


MAX_REQUEST = 64 * 1024  # bytes of a body
REQUEST_TIMEOUT = 5.0  # seconds for a whole request
MAX_CONNECTIONS = 16  # open at a time
LOG_INTERVAL = 60.0  # seconds between warnings about the same process
_MAX_LOGGED = 256  # processes whose last warning is remembered
HelloHandler = Callable[[Any], dict[str, Any]]


class RegistrationServer(socketserver.UnixStreamServer):
    """HTTP server between ``start`` and ``stop``; ``handle_hello`` answers each hello.

    If ``handle_hello`` raises Unavailable, the HTTP status is 429; for any other CyborgError it is
    400. A body over MAX_REQUEST gets 413.
    """

    request_queue_size = 64

    def __init__(
        self,
        path: str,
        owner: int,
        handle_hello: HelloHandler,
        *,
        request_timeout: float = REQUEST_TIMEOUT,
        stop_poll: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allow the uid ``owner`` and root to connect. Raise Misconfigured.

        ``stop`` takes up to ``stop_poll`` seconds.
        """
        self.handle_hello = handle_hello
        self.request_timeout = request_timeout
        self._users: Collection[int] = (0, owner)
        self._owner = owner
        self._clock = clock
        self._stop_poll = stop_poll
        # A thread for each connection, so that a slow driver delays no other; their number is
        # limited.
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._warned_at: dict[int, float] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        _remove_stale_socket(path)
        try:
            super().__init__(path, _Request)
        except OSError as exc:
            raise errors.Misconfigured(
                f"[agent] external_driver_dir: found {os.path.dirname(path)!r}; "
                f"expected a directory in which the agent can listen ({exc.strerror})",
                option="agent.external_driver_dir",
            ) from exc

    def server_bind(self) -> None:
        """Create the socket, accessible only to the agent and the owner of the directory."""
        super().server_bind()
        path = str(self.server_address)
        # An agent that runs as root may not change the owner of a file: its unit has no CAP_CHOWN.
        # The mode of the directory, and the check of each sender, keep other users away.
        os.chmod(path, 0o600 if os.geteuid() == self._owner else 0o666)

    def start(self) -> None:
        """Start to listen."""
        self._thread = threading.Thread(
            target=self.serve_forever, args=(self._stop_poll,), name="external-drivers", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop listening. Idempotent."""
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
            self._thread = None
        if self.socket.fileno() >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(str(self.server_address))
            self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Accept only root and the folder's owner, and at most MAX_CONNECTIONS at a time."""
        pid, uid = peer_credentials(request)
        if uid not in self._users:
            self.log_rejected(pid, f"user {uid} is not allowed")
            return False
        if not self._slots.acquire(blocking=False):
            self.log_rejected(pid, f"{MAX_CONNECTIONS} connections are open already")
            return False
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a new thread; shut the connection down at the request timeout."""
        thread = threading.Thread(
            target=self._serve, args=(request,), name="external-driver-request", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the process has as many threads as it may have
            self._slots.release()
            raise

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection, within the timeout; then free its slot."""
        # A timeout of the socket would be for one read: a peer that sends a byte each second would
        # keep one of the few slots.
        watchdog = threading.Timer(self.request_timeout, _shut_down, (connection,))
        watchdog.daemon = True
        watchdog.start()
        try:
            self.finish_request(connection, "")
        except OSError as exc:
            self.log_rejected(peer_credentials(connection).pid, f"connection failed: {exc}")
        except Exception:
            LOG.exception("Unexpected error while serving the drivers' socket")
        finally:
            watchdog.cancel()
            watchdog.join()  # else it could shut down another socket that reuses the descriptor
            self._slots.release()
            self.shutdown_request(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error that occurred before the thread of a request was started."""
        LOG.warning(
            "Connection of an external driver closed after an error, the driver will retry: %s",
            # socketserver calls this function within the except block.
            sys.exc_info()[1],
        )

    def log_rejected(self, pid: int, reason: str) -> None:
        """Log a rejected request. The first per process and minute at WARNING, others at INFO."""
        now = self._clock()
        with self._lock:
            warn = now - self._warned_at.get(pid, -LOG_INTERVAL) >= LOG_INTERVAL
            if warn:
                # A peer that starts a process for each request must not fill the memory.
                if len(self._warned_at) >= _MAX_LOGGED:
                    self._warned_at.clear()
                self._warned_at[pid] = now
        text = sanitize(reason, 500)
        LOG.log(
            logging.WARNING if warn else logging.INFO,
            "Request of driver process %d rejected: %s",
            pid,
            text,
        )


class _TooLarge(errors.Invalid):
    """The body exceeds MAX_REQUEST."""


class _Request(BaseHTTPRequestHandler):
    """Handler of ``POST /hello``, the only request."""

    # Without the version of Python, which is no concern of a peer.
    server_version = "cyborg"
    sys_version = ""

    def do_POST(self) -> None:
        """Handle a hello."""
        server = cast(RegistrationServer, self.server)
        try:
            if self.path != "/hello":
                self._answer(404, {"error": f"unknown path {self.path[:80]}; expected POST /hello"})
                return
            self._answer(200, server.handle_hello(self._body()))
        except _TooLarge as exc:
            self._answer(413, {"error": exc.message})
        except errors.Unavailable as exc:  # the driver says hello too often
            self._answer(429, {"error": exc.message})
        except errors.CyborgError as exc:
            self._answer(400, {"error": exc.message})

    raw_requestline: bytes  # set by BaseHTTPRequestHandler

    def parse_request(self) -> bool:
        """Read the first line and the headers; send no response to an empty first line."""
        if not self.raw_requestline.strip():
            self._log_rejected("the request begins with an empty line")
            return False
        return super().parse_request()

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        expected = f"expected a Content-Length of 0 to {MAX_REQUEST}, found {length[:40]!r}"
        if not length.isascii() or not length.isdigit():
            raise errors.Invalid(expected)
        # Ten digits are enough to compare; int() of a megabyte of digits takes minutes.
        if int(length[:10]) > MAX_REQUEST:
            raise _TooLarge(expected)
        self._body_read = True
        return external.decode(self.rfile.read(int(length)))

    _body_read = False

    def finish(self) -> None:
        """Discard a body that was not read, until the peer closes or the request times out."""
        # A peer may send its whole body before it reads. If the socket were closed with unread
        # data, the peer would get a reset instead of the answer.
        if not self._body_read:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
                while self.connection.recv(MAX_REQUEST):
                    pass
        super().finish()

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        if status != 200:
            self._log_rejected(body["error"])
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    # The base class calls it for requests that it cannot parse.
    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with JSON instead of an HTML page."""
        self._answer(code, {"error": message or "invalid request"})

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: ``log_rejected`` logs rejected requests, and the handler logs the others."""

    def _log_rejected(self, reason: str) -> None:
        cast(RegistrationServer, self.server).log_rejected(
            peer_credentials(self.connection).pid, reason
        )


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _remove_stale_socket(path: str) -> None:
    """Remove the socket of an agent that was killed. Raise Misconfigured if it is in use."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as exc:
            raise errors.Misconfigured(
                f"[agent] external_driver_dir: {path} cannot be replaced: {exc}"
            ) from exc
    raise errors.Misconfigured(
        f"[agent] external_driver_dir: another agent listens at {path}; "
        "expected a separate directory",
        option="agent.external_driver_dir",
    )
