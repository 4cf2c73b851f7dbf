# SPDX-License-Identifier: Apache-2.0
"""The paths of the web console below /ui.

::

    /ui, /ui/ and files    the page, its script and style: public, they have no data
    /ui/sign-in            exchanges a password for a token at keystone
    /ui/session            who the caller is and what the policy allows (after authentication)
"""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from oslo_config import cfg
from webob import exc

from cyborg.api.access_log import App
from cyborg.api.console.files import StaticFile, load_files
from cyborg.api.console.session import SESSION
from cyborg.api.console.sign_in import SignIn
from cyborg.api.middleware import require_get, root_url

PREFIX = "/ui"
SIGN_IN = f"{PREFIX}/sign-in"


class ConsoleSite:
    """A WSGI layer, before authentication, that serves the files and the sign-in of the console."""

    def __init__(self, app: App, conf: cfg.ConfigOpts) -> None:
        self._app = app
        self._conf = conf
        files = load_files()
        self._files = {f"{PREFIX}/{name}": file for name, file in files.items()}
        self._files[f"{PREFIX}/"] = files["index.html"]
        # Without authentication there is nothing to sign in to.
        self._sign_in = SignIn(conf) if conf.auth_strategy == "keystone" else None
        self.paths = {PREFIX, SIGN_IN, SESSION, *self._files}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request. Raise HTTPNotFound for an unknown path below /ui."""
        path = environ.get("PATH_INFO", "")
        if path in self._files:
            return _serve(self._files[path], environ, start_response)
        if path == SIGN_IN and self._sign_in is not None:
            return self._sign_in(environ, start_response)
        if path == PREFIX:
            require_get(environ)
            url = f"{root_url(environ, self._conf)}{PREFIX}/"
            headers = [("Location", url), ("Content-Length", "0")]
            # Browsers keep a permanent redirect for ever, also if the public endpoint changes.
            return _respond(start_response, HTTPStatus.TEMPORARY_REDIRECT, headers)
        if path.startswith(f"{PREFIX}/") and path != SESSION:
            raise exc.HTTPNotFound("unknown path below /ui")
        return self._app(environ, start_response)


def _serve(file: StaticFile, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    require_get(environ)
    headers = list(file.headers)
    known = environ.get("HTTP_IF_NONE_MATCH", "")
    if file.etag in known or known.strip() == "*":
        return _respond(start_response, HTTPStatus.NOT_MODIFIED, headers)
    headers.append(("Content-Length", str(len(file.body))))
    body = b"" if environ["REQUEST_METHOD"] == "HEAD" else file.body
    return _respond(start_response, HTTPStatus.OK, headers, body)


def _respond(
    start_response: Any, status: HTTPStatus, headers: list[tuple[str, str]], body: bytes = b""
) -> Iterable[bytes]:
    start_response(f"{status.value} {status.phrase}", headers)
    return [body] if body else []
