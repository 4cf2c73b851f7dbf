# SPDX-License-Identifier: Apache-2.0
"""Test double of Glance over HTTP: it shows images and sends their data, also wrong data.

It has only the part of the Images API v2 that the agent uses, without users and policies. A
functional test of Cyborg compares it with a real Glance.
"""

import hashlib
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from keystoneauth1 import adapter, noauth, session

from cyborg.testing.http_double import DoubleHandler, serve

_DRIP_INTERVAL = 0.01  # seconds between two bytes


class FakeGlance:
    """Double of Glance whose responses the test configures."""

    def __init__(self) -> None:
        # The metadata, and the data that are sent, by uuid. A test can make them differ.
        self.images: dict[str, dict[str, Any]] = {}
        self.sent: dict[str, bytes] = {}
        # The HTTP status of responses with metadata, and of responses with data.
        self.status = 200
        self.data_status = 200
        # Additional headers of responses with data.
        self.headers: dict[str, str] = {}
        # The body of responses with metadata, None for the metadata themselves.
        self.body: bytes | None = None
        # Number of the next responses with data that end in the middle of the data.
        self.breaks = 0
        # Whether responses have no Content-Length.
        self.chunked = False
        # All responses wait for ``hang``, and data for ``gate``. Data are sent byte by byte until
        # ``drip`` is set.
        self.hang: threading.Event | None = None
        self.gate: threading.Event | None = None
        self.drip: threading.Event | None = None
        self.url = ""
        self.requested_paths: list[str] = []  # of all requests

    def add_image(self, data: bytes = b"bitstream", **attributes: Any) -> str:
        """Add an active, public image with these data, and return its uuid.

        ``attributes`` replace or add attributes and properties; None removes one.
        """
        name = str(uuid.uuid4())
        values = {
            "id": name,
            "name": "image",
            "status": "active",
            "visibility": "public",
            "owner": "f" * 32,
            "container_format": "bare",
            "disk_format": "raw",
            "size": len(data),
            "os_hash_algo": "sha512",
            "os_hash_value": hashlib.sha512(data).hexdigest(),
            "tags": [],
            **attributes,
        }
        self.images[name] = {key: value for key, value in values.items() if value is not None}
        self.sent[name] = data
        return name

    @property
    def downloads(self) -> list[str]:
        """Return the uuids whose data were requested, in order."""
        return [path.split("/")[-2] for path in self.requested_paths if path.endswith("/file")]

    def show(self, path: str) -> tuple[int, Any]:
        """Return the status and body of the response to a request for metadata."""
        if self.status != 200 or self.body is not None:
            return self.status, self.body if self.body is not None else {}
        url = urlsplit(path)
        collection, _, name = url.path.removeprefix("/v2/").partition("/")
        if collection == "images" and not name:
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            return 200, {"images": self._list(query)}
        if collection == "images" and name in self.images:
            return 200, self.images[name]
        return 404, b"<html>No image found</html>"

    def _list(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        wanted = {key: value for key, value in query.items() if key != "limit"}
        found = [image for image in self.images.values() if wanted.items() <= image.items()]
        return found[: int(query["limit"])]

    def adapter(self) -> adapter.Adapter:
        """Return a keystoneauth adapter for this double."""
        return adapter.Adapter(
            session.Session(auth=noauth.NoAuth()),
            service_type="image",
            endpoint_override=self.url,
        )


@contextmanager
def serve_glance(glance: FakeGlance) -> Iterator[FakeGlance]:
    """Serve the double on a free loopback port until the end of the block."""

    class Handler(DoubleHandler):
        protocol_version = "HTTP/1.1"  # chunks and Content-Length are of this version

        def do_GET(self) -> None:
            glance.requested_paths.append(self.path)
            self.close_connection = True  # so that no thread waits for a next request
            if glance.hang is not None:
                glance.hang.wait(10)
            try:
                if self.path.endswith("/file"):
                    self._send_data(self.path.split("/")[-2])
                else:
                    self.respond(*glance.show(self.path), {"Connection": "close"})
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client has seen enough

        def _send_data(self, name: str) -> None:
            data = glance.sent.get(name)
            if data is None or glance.data_status != 200:
                self.send_response(404 if data is None else glance.data_status)
                for key, value in {"Content-Length": "0", **glance.headers}.items():
                    self.send_header(key, value)
                self.send_header("Connection", "close")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Connection", "close")
            self.send_header("Content-Type", "application/octet-stream")
            for key, value in glance.headers.items():
                self.send_header(key, value)
            if glance.chunked:
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if glance.gate is not None:
                glance.gate.wait(10)
            if glance.breaks:
                glance.breaks -= 1
                self._write(data[: len(data) // 2])
                return
            if glance.drip:
                self._write_slowly(data)
            else:
                self._write(data)
            if glance.chunked:
                self.wfile.write(b"0\r\n\r\n")

        def _write(self, data: bytes) -> None:
            if glance.chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            self.wfile.write(data)

        def _write_slowly(self, data: bytes) -> None:
            assert glance.drip is not None
            for position in range(len(data)):
                self._write(data[position : position + 1])
                if glance.drip.wait(_DRIP_INTERVAL):
                    self._write(data[position + 1 :])
                    return

    with serve(Handler, wait_for_responses=True) as url:
        glance.url = url
        try:
            yield glance
        finally:
            # A thread that waits would keep the server open: its end waits for all responses.
            for event in (glance.hang, glance.gate, glance.drip):
                if event is not None:
                    event.set()
