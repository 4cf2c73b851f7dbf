# SPDX-License-Identifier: Apache-2.0
"""Read the body of an authenticated request, limited in size and in time."""

import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from oslo_config import cfg
from webob import exc as http_exc

from cyborg.core.errors import Invalid

# Key of the WSGI environ: a function that interrupts a blocked read. Servers that do not provide
# it limit the time of reads themselves.
STOP_READING = "cyborg.stop_reading"
# Small enough that an expired deadline is seen soon, large enough for few calls.
_CHUNK_SIZE = 65536

App = Callable[..., Iterable[bytes]]


class BodyReader:
    """A WSGI layer that reads the whole body into memory before the layers below run.

    Malformed chunks and slow clients are reported here, not as a failure of the layer that happens
    to read first.
    """

    def __init__(self, app: App, conf: cfg.ConfigOpts, timeout: float | None = None) -> None:
        """``timeout`` are the seconds to receive a body, by default those of the option."""
        self._app = app
        self._conf = conf
        self._timeout = timeout
        self._deadlines = ReadDeadlines()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request. Raise HTTPException or Invalid if the body cannot be read."""
        api = self._conf.api
        length = environ.get("CONTENT_LENGTH")
        chunked = not length and "HTTP_TRANSFER_ENCODING" in environ
        # With this key the server ends the stream after the last chunk; else a read would block.
        if chunked and not environ.get("wsgi.input_terminated"):
            raise http_exc.HTTPLengthRequired(
                "this server does not accept a chunked body, send Content-Length"
            )
        if chunked or int(length or 0):
            timeout = self._timeout or api.body_timeout
            with self._deadlines.limit(timeout, environ.get(STOP_READING)) as expired:
                body = _read(environ["wsgi.input"], length, api.max_body_size, expired)
            environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        return self._app(environ, start_response)


def too_large(limit: int) -> http_exc.HTTPException:
    """Return the error for a body of more than ``limit`` bytes."""
    return http_exc.HTTPRequestEntityTooLarge(f"the body may have at most {limit} bytes")


def _read(stream: Any, length: str | None, limit: int, expired: Callable[[], bool]) -> bytes:
    """Return ``length`` bytes, or all bytes up to the end of the chunks if there is no length.

    ``limit`` is for chunks only: Content-Length has been compared with it before. ``expired``
    returns whether the deadline has passed. Raise HTTPException or Invalid.
    """
    # One byte more than the limit shows that a chunked body is too long.
    missing = int(length) if length else limit + 1
    chunks: list[bytes] = []
    while missing:
        try:
            chunk = stream.read(min(missing, _CHUNK_SIZE))
        except Exception as exc:  # each server has its own errors for a malformed chunk
            # The watchdog that interrupts a read at its deadline can make the read raise.
            if expired():
                raise http_exc.HTTPRequestTimeout(
                    "the body of the request did not arrive in time"
                ) from exc
            raise Invalid("body: ended too early, or has malformed chunks", field="body") from exc
        if expired():
            raise http_exc.HTTPRequestTimeout("the body of the request did not arrive in time")
        if not chunk:
            break
        chunks.append(chunk)
        missing -= len(chunk)
    if length and missing:
        raise Invalid("body: ended before its Content-Length", field="body")
    if not length and not missing:
        raise too_large(limit)
    return b"".join(chunks)


class ReadDeadlines:
    """Watchdog that interrupts slow reads: one thread per process, started by the first read."""

    # A socket timeout is no alternative: a client that sends a byte a second never exceeds it.

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # In the order of their deadlines, since all have the same timeout.
        self._reads: dict[object, tuple[float, Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(
        self, seconds: float, stop: Callable[[], None] | None
    ) -> Iterator[Callable[[], bool]]:
        """Call ``stop`` if the block takes longer than ``seconds``.

        Yield a function that returns whether the deadline has passed.
        """
        deadline = time.monotonic() + seconds

        def expired() -> bool:
            return time.monotonic() >= deadline

        # The server limits reads itself; the deadline is only checked between chunks.
        if stop is None:
            yield expired
            return
        read = object()
        with self._changed:
            self._reads[read] = (deadline, stop)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="body-reads", daemon=True)
                self._thread.start()
            # Only the first read changes the next deadline; the watchdog knows of the others.
            if len(self._reads) == 1:
                self._changed.notify()
        try:
            yield expired
        finally:
            with self._changed:
                # It is gone already if the deadline has passed.
                self._reads.pop(read, None)

    def _watch(self) -> None:
        """Stop each read at its deadline; they are in the order of their deadlines."""
        with self._changed:
            while True:
                read = next(iter(self._reads), None)
                if read is None:
                    self._changed.wait()
                    continue
                deadline, stop = self._reads[read]
                if (remaining := deadline - time.monotonic()) > 0:
                    self._changed.wait(remaining)
                    continue
                del self._reads[read]
                # Under the lock, so that a finished read is never stopped: its connection may
                # already carry the next request.
                stop()
