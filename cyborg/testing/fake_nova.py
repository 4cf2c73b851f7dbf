# SPDX-License-Identifier: Apache-2.0
"""Test double of Nova over HTTP; it records external events and shows servers."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from keystoneauth1 import adapter, noauth, session


class FakeNova:
    """Double of Nova whose responses the test configures.

    ``status`` is the HTTP status of each response. ``codes`` maps the tag of an event to its code
    in the response, 200 by default. A request with events of one of ``refused_servers`` fails with
    400. If ``is_admin`` is False, the user sees no servers of other projects. Responses wait for
    the Event ``hang``. ``servers`` are the servers by uuid, ``page_size`` is the maximum length of
    a list, and ``requested_paths`` are the paths of all GET requests.
    """

    def __init__(self) -> None:
        self.status = 200
        self.body: Any = None
        self.codes: dict[str, int] = {}
        self.refused_servers: set[str] = set()
        self.hang: threading.Event | None = None
        self.calls: list[dict[str, Any]] = []
        self.url = ""
        self.servers: dict[str, dict[str, Any]] = {}
        self.page_size = 1000
        self.is_admin = True
        self.requested_paths: list[str] = []

    def add_server(
        self, uuid: str, host: str | None, status: str = "ACTIVE", **fields: Any
    ) -> None:
        """Add a server on a host, or without a host."""
        self.servers[uuid] = {
            "id": uuid,
            "status": status,
            "OS-EXT-SRV-ATTR:host": host,
            "OS-EXT-SRV-ATTR:hypervisor_hostname": host,
            "OS-EXT-STS:task_state": None,
            **fields,
        }

    def show(self, path: str) -> tuple[int, Any]:
        """Return the status and body of the response to a GET request."""
        self.requested_paths.append(path)
        if self.status != 200 or self.body is not None:
            return self.status, self.body
        url = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        *_, collection, last = url.path.split("/")
        if last == "servers" and not self.is_admin:
            return 403, {"forbidden": {"code": 403, "message": "not allowed"}}
        if last == "servers":
            return 200, {"servers": self._list(query)}
        if collection == "servers" and last in self.servers and self.is_admin:
            return 200, {"server": self.servers[last]}
        return 404, {"itemNotFound": {"code": 404, "message": "no such instance"}}

    def _list(self, query: dict[str, str]) -> list[dict[str, Any]]:
        assert query["all_tenants"] == "1"
        host = query.get("host")
        uuids = [
            uuid
            for uuid, server in self.servers.items()
            if host in (None, server["OS-EXT-SRV-ATTR:host"])
        ]
        begin = sorted(uuids).index(query["marker"]) + 1 if "marker" in query else 0
        return [{"id": uuid, "name": "s"} for uuid in sorted(uuids)[begin : begin + self.page_size]]

    @property
    def tags(self) -> list[str]:
        """Return the tags of all received events in order."""
        return [event["tag"] for call in self.calls for event in call["events"]]

    def answer(self, path: str, headers: dict[str, str], body: Any) -> tuple[int, Any]:
        """Record a POST request with events; return the status and body of the response."""
        self.calls.append({"path": path, "headers": headers, "events": body["events"]})
        if self.hang is not None:
            self.hang.wait(10)
        if {event["server_uuid"] for event in body["events"]} & self.refused_servers:
            return 400, {"badRequest": {"code": 400, "message": "malformed"}}
        if self.status != 200 or self.body is not None:
            return self.status, self.body
        items = [event | {"code": self.codes.get(event["tag"], 200)} for event in body["events"]]
        return (207 if any(item["code"] != 200 for item in items) else 200), {"events": items}

    def adapter(self) -> adapter.Adapter:
        """Return a keystoneauth adapter for this double."""
        return adapter.Adapter(
            session.Session(auth=noauth.NoAuth()),
            service_type="compute",
            endpoint_override=self.url,
        )


@contextmanager
def serve_nova(nova: FakeNova) -> Iterator[FakeNova]:
    """Serve the double on a free loopback port until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(length))
            self._send(*nova.answer(self.path, dict(self.headers), body))

        def do_GET(self) -> None:
            self._send(*nova.show(self.path))

        def _send(self, status: int, answer: Any) -> None:
            text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
            except BrokenPipeError:
                pass  # the client closed the connection, as in tests of timeouts

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        nova.url = f"http://127.0.0.1:{server.server_address[1]}/v2.1"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield nova
        finally:
            if nova.hang is not None:
                nova.hang.set()
            server.shutdown()
            thread.join()
