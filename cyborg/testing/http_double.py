# SPDX-License-Identifier: Apache-2.0
"""HTTP server of the doubles of Nova, Glance and keystone, on a free port of this machine.

It is the server of the standard library: the doubles must break the protocol on request, such as
close a connection without a response, which servers made for production do not do.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_POLL_INTERVAL = 0.01  # seconds; the default of half a second would be that of each test


class DoubleHandler(BaseHTTPRequestHandler):
    """Handler of the requests of a double."""

    def read_json(self) -> Any:
        """Return the body of the request; an empty object without a body."""
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")

    def respond(self, status: int, answer: Any, headers: Mapping[str, str] | None = None) -> None:
        """Send a response with JSON, or with the bytes of ``answer``."""
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the requests are those of a test."""


@contextmanager
def serve(handler: type[DoubleHandler], *, wait_for_responses: bool = False) -> Iterator[str]:
    """Serve the requests until the end of the block; yield the URL of the server.

    With ``wait_for_responses``, the end of the block waits for the responses that are being sent.
    """
    # Port 0: the kernel chooses a free one, so that tests can run at the same time.
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = not wait_for_responses
        # A thread, not a process: the test configures the double while it answers.
        thread = threading.Thread(target=server.serve_forever, args=(_POLL_INTERVAL,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
