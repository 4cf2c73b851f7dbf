# SPDX-License-Identifier: Apache-2.0
"""OpenStack Placement embedded in this process, on a SQLite file.

A process can have only one Placement at a time: opening another one closes it.
"""

import contextlib
import io
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import requests
import urllib3
import webob
from keystoneauth1 import adapter, session, token_endpoint
from oslo_config import cfg
from oslo_db.sqlalchemy import enginefacade

from cyborg.compat import oslo, placement
from cyborg.compat.database import keep_connections
from cyborg.threads.locks import FifoLock

URL = "http://placement.embedded"
# The last one that cyborg.clients.placement was checked with.
MICROVERSION = "1.39"
TOKEN = "admin"  # noqa: S105  the administrator of Placement's noauth2
QUEUE_TIMEOUT = 30.0  # seconds that a request waits for the previous ones

# Placement keeps its database, its policy and its sync state in module globals.
_opening = threading.Lock()
_current: "EmbeddedPlacement | None" = None


class EmbeddedPlacement:
    """The WSGI application of an embedded Placement; ``close()`` releases its database."""

    def __init__(self, database_url: str, queue_timeout: float = QUEUE_TIMEOUT) -> None:
        self._queue_timeout = queue_timeout
        # One at a time: SQLite has one writer, and Placement fails if the file is locked.
        # In order: otherwise the loop of a publisher or an audit starves other clients.
        self._request_lock = FifoLock()
        self._undo = contextlib.ExitStack()
        self._app: Callable[..., Iterable[bytes]] | None = None
        try:
            self._app = self._load(database_url)
        except BaseException:
            self._undo.close()
            raise

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Serve one request; answer 503 after the queue timeout, or if Placement is closed."""
        if not self._request_lock.acquire(timeout=self._queue_timeout):
            return _unavailable("Placement is busy", environ, start_response)
        try:
            if self._app is None:
                return _unavailable("Placement is closed", environ, start_response)
            body = self._app(environ, start_response)
            try:
                # Consumed under the lock: the body is generated lazily and uses the database.
                return [b"".join(body)]
            finally:
                getattr(body, "close", lambda: None)()
        finally:
            self._request_lock.release()

    def close(self) -> None:
        """Wait for the request in progress, then release the database. Idempotent."""
        with self._request_lock:
            self._app = None
            self._undo.close()

    def _load(self, database_url: str) -> Callable[..., Iterable[bytes]]:
        """Return the application of Placement. What it changes in its modules, ``_undo`` undoes."""
        # A late import: Placement is an optional dependency and slow to import.
        from placement import conf as placement_conf
        from placement import db_api, deploy, policy

        placement.cache_computed_values()
        oslo.cache_policy_signatures()
        for name in ("placement", "alembic"):
            # Unless the user has set a level.
            if (logger := logging.getLogger(name)).level == logging.NOTSET:
                logger.setLevel(logging.WARNING)
        conf = cfg.ConfigOpts()
        placement_conf.register_opts(conf)
        conf.set_override("auth_strategy", "noauth2", group="api")
        conf.set_override("connection", database_url, group="placement_database")
        # Placement then migrates its database itself: nobody runs placement-manage here.
        conf.set_override("sync_on_startup", True, group="placement_database")
        conf([], project="placement", default_config_files=[], default_config_dirs=[])
        database = enginefacade.transaction_context()
        # Without synchronous writes a crash of the machine, but not of this process, can lose the
        # last changes; the publisher writes them again.
        database.configure(connection=database_url, sqlite_synchronous=False)
        database.append_on_engine_create(keep_connections)
        self._undo.callback(database.dispose_pool)
        self._undo.callback(db_api.placement_context_manager.patch_factory(database))
        policy.reset()
        self._undo.callback(policy.reset)
        placement.reset_sync_flags()
        app: Callable[..., Iterable[bytes]] = deploy.loadapp(conf)
        return app


def make_app(database_url: str) -> EmbeddedPlacement:
    """Migrate the database and return the application; takes about 1 s with a new file."""
    global _current  # noqa: PLW0603  Placement itself has process-wide state, see above
    with _opening:
        if _current is not None:
            _current.close()
        _current = EmbeddedPlacement(database_url)
        return _current


def make_adapter(app: Callable[..., Iterable[bytes]], **options: Any) -> adapter.Adapter:
    """Return a keystoneauth adapter that calls ``app`` directly, without a socket.

    ``options`` are passed to the adapter, such as ``raise_exc=False``.
    """
    http = requests.Session()
    # No proxy and no netrc: without this, requests reads the environment for each request.
    http.trust_env = False
    http.mount(URL, _Transport(app))
    return adapter.Adapter(
        session.Session(auth=token_endpoint.Token(URL, TOKEN), session=http),
        **{"service_type": "placement", "default_microversion": MICROVERSION, **options},
    )


class _Transport(requests.adapters.HTTPAdapter):
    """A transport adapter of ``requests`` that calls a WSGI application."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        super().__init__()
        self._app = app

    def send(
        self, request: requests.PreparedRequest, *_arguments: Any, **_options: Any
    ) -> requests.Response:
        """Call the application and return its response."""
        body = request.body or b""
        wsgi_request = webob.Request.blank(
            str(request.url),
            method=request.method,
            headers={name: _text(value) for name, value in request.headers.items()},
            body=body.encode() if isinstance(body, str) else body,
        )
        wsgi_response = wsgi_request.get_response(self._app)
        raw_response = urllib3.HTTPResponse(
            io.BytesIO(wsgi_response.body),
            urllib3.HTTPHeaderDict(wsgi_response.headerlist),
            wsgi_response.status_int,
            reason=wsgi_response.status.partition(" ")[2],
            preload_content=False,
        )
        return self.build_response(request, raw_response)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _unavailable(
    reason: str, environ: dict[str, Any], start_response: Callable[..., Any]
) -> Iterable[bytes]:
    response = webob.Response(status=503, text=reason, content_type="text/plain")
    return response(environ, start_response)
