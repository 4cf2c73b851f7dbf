# SPDX-License-Identifier: Apache-2.0
"""A real Placement inside this process, on a SQLite file.

OpenStack Placement keeps its database, its policy and what it has synchronised in module globals,
so one process has one of it at a time: a new one closes the one before. Requests are served one
after another, since SQLite has one writer and Placement gives up on a locked file.
"""

import contextlib
import io
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import requests
import webob
from keystoneauth1 import adapter, session, token_endpoint
from oslo_config import cfg
from oslo_db.sqlalchemy import enginefacade

URL = "http://placement.embedded"
MICROVERSION = "1.39"
TOKEN = "admin"  # noqa: S105  the user that Placement's noauth2 takes for an administrator
PATIENCE = 30.0

_opening = threading.Lock()
_current: "EmbeddedPlacement | None" = None


class EmbeddedPlacement:
    """The WSGI application of a Placement of our own; ``close()`` gives its database back."""

    def __init__(self, database_url: str, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._one_at_a_time = threading.Lock()
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
        """Serve one request; 503 when it does not get its turn or Placement has been closed."""
        if not self._one_at_a_time.acquire(timeout=self._patience):
            return _unavailable("Placement is busy", environ, start_response)
        try:
            if self._app is None:
                return _unavailable("this Placement has been closed", environ, start_response)
            body = self._app(environ, start_response)
            try:
                # The work must be over when the next request gets its turn.
                return [b"".join(body)]
            finally:
                getattr(body, "close", lambda: None)()
        finally:
            self._one_at_a_time.release()

    def close(self) -> None:
        """Wait for the request being served, then let go of the database. Twice is fine."""
        with self._one_at_a_time:
            self._app = None
            self._undo.close()

    def _load(self, database_url: str) -> Callable[..., Iterable[bytes]]:
        # Late: Placement is an extra that only the stand-alone service needs, and slow to import.
        from placement import conf as placement_conf
        from placement import db_api, deploy, policy
        from placement.objects import resource_class, trait

        for name in ("placement", "alembic"):
            _at_least(name, logging.WARNING)
        conf = cfg.ConfigOpts()
        placement_conf.register_opts(conf)
        conf.set_override("auth_strategy", "noauth2", group="api")
        conf.set_override("connection", database_url, group="placement_database")
        conf.set_override("sync_on_startup", True, group="placement_database")
        conf([], project="placement", default_config_files=[], default_config_dirs=[])
        database = enginefacade.transaction_context()
        # Without synchronous writes a crash of the machine, not of this process, may cost the last
        # changes; the publisher renders them again.
        database.configure(connection=database_url, sqlite_synchronous=False)
        self._undo.callback(database.dispose_pool)
        self._undo.callback(db_api.placement_context_manager.patch_factory(database))
        policy.reset()
        self._undo.callback(policy.reset)
        trait._TRAITS_SYNCED = False
        resource_class._RESOURCE_CLASSES_SYNCED = False
        return deploy.loadapp(conf)


def make_app(database_url: str) -> EmbeddedPlacement:
    """Return Placement on this database, migrated; it takes about a second on a new file."""
    global _current  # noqa: PLW0603  Placement's own state is the process's, see above
    with _opening:
        if _current is not None:
            _current.close()
        _current = EmbeddedPlacement(database_url)
        return _current


def make_adapter(app: Callable[..., Iterable[bytes]], **options: Any) -> adapter.Adapter:
    """Return a keystoneauth adapter whose requests are calls of ``app``: no socket is used.

    ``options`` go to the adapter, such as ``raise_exc=False``.
    """
    http = requests.Session()
    http.mount(URL, _Transport(app))
    return adapter.Adapter(
        session.Session(auth=token_endpoint.Token(URL, TOKEN), session=http),
        **{"service_type": "placement", "default_microversion": MICROVERSION, **options},
    )


class _Transport(requests.adapters.BaseAdapter):
    """Carry a request of ``requests`` to a WSGI application."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        super().__init__()
        self._app = app

    def send(self, request: requests.PreparedRequest, **_: Any) -> requests.Response:
        """Call the application and return what it answered."""
        body = request.body or b""
        called = webob.Request.blank(
            request.url,
            method=request.method,
            headers=dict(request.headers),
            body=body.encode() if isinstance(body, str) else body,
        )
        came = called.get_response(self._app)
        answer = requests.Response()
        answer.status_code = came.status_int
        answer.reason = came.status.partition(" ")[2]
        answer.headers = requests.structures.CaseInsensitiveDict(came.headerlist)
        answer.encoding = requests.utils.get_encoding_from_headers(answer.headers)
        answer.raw = io.BytesIO(came.body)
        answer.url = str(request.url)
        answer.request = request
        return answer

    def close(self) -> None:
        """Do nothing: there is no connection."""


def _unavailable(
    why: str, environ: dict[str, Any], start_response: Callable[..., Any]
) -> Iterable[bytes]:
    answer = webob.Response(status=503, text=why, content_type="text/plain")
    return answer(environ, start_response)


def _at_least(name: str, level: int) -> None:
    logger = logging.getLogger(name)
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
