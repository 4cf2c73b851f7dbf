# SPDX-License-Identifier: Apache-2.0
"""Where drivers in processes of their own say hello: HTTP on the agent's unix socket."""

import contextlib
import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Collection
from http.server import BaseHTTPRequestHandler
from typing import Any, cast

from oslo_log import log

from cyborg.agent.outside_client import peer
from cyborg.core import outside
from cyborg.core.errors import CyborgError, Invalid, Misconfigured, Unavailable
from cyborg.core.text import clean

LOG = log.getLogger(__name__)

MAX_REQUEST = 64 * 1024  # bytes of a body
PATIENCE = 5.0  # seconds for a whole request
MAX_LINKS = 16  # at the same time
QUIET = 60.0  # seconds in which but one of a process's mistakes is a warning
_MAX_KNOWN = 256  # processes whose last mistake is remembered
Take = Callable[[Any], dict[str, Any]]


class HelloServer(socketserver.UnixStreamServer):
    """Listens from ``start`` to ``stop``. ``take`` gets each hello and returns the answer to it.

    What ``take`` raises is the answer too: Unavailable is 429, any other of our errors 400.
    """

    request_queue_size = 64

    def __init__(
        self,
        path: str,
        owner: int,
        take: Take,
        *,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``owner`` is who may speak, beside root. Raises Misconfigured."""
        self.take = take
        self.patience = patience
        self._users: Collection[int] = (0, owner)
        self._owner = owner
        self._clock = clock
        self._links = threading.BoundedSemaphore(MAX_LINKS)
        self._said: dict[int, float] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        _make_room(path)
        try:
            super().__init__(path, _Request)
        except OSError as bad:
            raise Misconfigured(
                f"[agent] socket_dir: found {os.path.dirname(path)!r}; expected a directory in "
                f"which the agent can listen ({bad.strerror})",
                option="agent.socket_dir",
            ) from bad

    def server_bind(self) -> None:
        """Make the socket, for its owner alone."""
        super().server_bind()
        path = str(self.server_address)
        os.chmod(path, 0o600)
        if os.geteuid() != self._owner:
            os.chown(path, self._owner, -1, follow_symlinks=False)

    def start(self) -> None:
        """Listen."""
        self._thread = threading.Thread(target=self.serve_forever, name="outside", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Listen no more. Twice is fine."""
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
            self._thread = None
        if self.socket.fileno() >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(str(self.server_address))
            self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Let nobody in but root and the folder's owner, and not too many at a time."""
        pid, uid = peer(request)
        if uid not in self._users:
            self.complain(pid, f"user {uid} may not speak")
            return False
        if not self._links.acquire(blocking=False):
            self.complain(pid, f"{MAX_LINKS} connections are open already")
            return False
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve in a thread of its own; it ends when its time is over and the link is cut."""
        threading.Thread(
            target=self._serve, args=(request,), name="outside-link", daemon=True
        ).start()

    def _serve(self, link: socket.socket) -> None:
        late = threading.Timer(self.patience, _cut, (link,))
        late.daemon = True
        late.start()
        try:
            self.finish_request(link, "")
        except OSError as bad:
            self.complain(peer(link)[0], f"the connection broke: {bad}")
        except Exception:
            LOG.exception("A request on the drivers' socket failed")
        finally:
            late.cancel()
            late.join()  # so that it cannot cut a socket that has this one's number by then
            self._links.release()
            self.shutdown_request(link)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong before a request had its thread."""
        LOG.warning("A connection to the drivers' socket was dropped", exc_info=True)

    def complain(self, pid: int, what: str) -> None:
        """Log a mistake of a process, each once; only the first of a while is loud."""
        now = self._clock()
        with self._lock:
            loud = now - self._said.get(pid, -QUIET) >= QUIET
            if loud:
                if len(self._said) >= _MAX_KNOWN:
                    self._said.clear()
                self._said[pid] = now
        words = clean(what, 500)
        LOG.log(log.WARNING if loud else log.INFO, "Driver process %d is refused: %s", pid, words)


class _Request(BaseHTTPRequestHandler):
    """One request: there is but one kind."""

    server_version = "cyborg"
    sys_version = ""

    def do_POST(self) -> None:
        """Take a hello."""
        server = cast(HelloServer, self.server)
        try:
            if self.path != "/hello":
                self._answer(404, {"error": f"there is no {self.path[:80]}; POST /hello is all"})
                return
            self._answer(200, server.take(self._body()))
        except Unavailable as bad:
            self._answer(429, {"error": bad.message})
        except CyborgError as bad:
            self._answer(400, {"error": bad.message})

    def parse_request(self) -> bool:
        """Read the first line and the headers; an empty line is no request and gets no answer."""
        if not self.raw_requestline.strip():
            self._complain("its request begins with an empty line")
            return False
        return super().parse_request()

    def _body(self) -> Any:
        told = self.headers.get("Content-Length", "")
        if not told.isascii() or not told.isdigit() or int(told[:10]) > MAX_REQUEST:
            raise Invalid(f"expected a Content-Length of 0 to {MAX_REQUEST}, found {told[:40]!r}")
        return outside.decode(self.rfile.read(int(told)))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        if status != 200:
            self._complain(body["error"])
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer as everywhere, not with a page."""
        self._answer(code, {"error": message or "this cannot be answered"})

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: what is refused is logged by ``complain``, the rest by who takes it."""

    def _complain(self, what: str) -> None:
        cast(HelloServer, self.server).complain(peer(self.connection)[0], what)


def _cut(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _make_room(path: str) -> None:
    """Take away the socket that an agent left which was killed. Raises Misconfigured."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as bad:
            raise Misconfigured(f"[agent] socket_dir: {path} cannot be replaced: {bad}") from bad
    raise Misconfigured(
        f"[agent] socket_dir: another agent listens at {path}; expected a folder for each",
        option="agent.socket_dir",
    )
