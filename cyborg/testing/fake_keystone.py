# SPDX-License-Identifier: Apache-2.0
"""Test double of keystone that validates the tokens it has issued, over HTTP."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EXPIRES = "2999-01-01T00:00:00.000000Z"


class FakeKeystone:
    """Double of keystone; it accepts only the tokens of ``issue_token``."""

    def __init__(self) -> None:
        self.url = ""
        self._tokens: dict[str, Mapping[str, Any]] = {}

    def issue_token(
        self, roles: Sequence[str], project: str | None = "project-1", **fields: Any
    ) -> str:
        """Return a token of a user with these roles, scoped to a project or, if None, unscoped.

        ``fields`` are additional fields of the token, such as ``system``.
        """
        name = f"token-{len(self._tokens)}"
        self._tokens[name] = {
            "methods": ["password"],
            "user": {"id": "user-1", "name": "user", "domain": {"id": "default", "name": "D"}},
            "roles": [{"id": role, "name": role} for role in roles],
            "issued_at": "2020-01-01T00:00:00.000000Z",
            "expires_at": EXPIRES,
            **({"project": self._project(project)} if project else {}),
            **fields,
        }
        return name

    def options(self) -> dict[str, str]:
        """Return the options of [keystone_authtoken] that connect to this double."""
        return {"auth_type": "admin_token", "endpoint": f"{self.url}/v3", "token": "the-api"}

    def answer(self, path: str, headers: Message) -> tuple[int, Any]:
        """Return the status and body of the response to a GET request."""
        if path.endswith("/auth/tokens"):
            token = self._tokens.get(headers.get("X-Subject-Token", ""))
            return (200, {"token": token}) if token else (404, {"error": {"code": 404}})
        links = [{"rel": "self", "href": f"{self.url}/v3/"}]
        return 200, {"version": {"id": "v3.14", "status": "stable", "links": links}}

    @staticmethod
    def _project(project: str) -> dict[str, Any]:
        return {"id": project, "name": project, "domain": {"id": "default", "name": "D"}}


@contextmanager
def serve_keystone() -> Iterator[FakeKeystone]:
    """Serve a double on a free loopback port until the end of the block."""
    keystone = FakeKeystone()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = keystone.answer(self.path.partition("?")[0], self.headers)
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self) -> None:
            """Reject every password with the response of keystone."""
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            message = "The request you have made requires authentication."
            text = json.dumps({"error": {"code": 401, "title": "Unauthorized", "message": message}})
            self.send_response(401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        keystone.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield keystone
        finally:
            server.shutdown()
            thread.join()
