# SPDX-License-Identifier: Apache-2.0
"""The static files and the paths of the web console, which ``tools/console`` builds.

::

    /ui, /ui/ and files    the page, its script and style: public, they have no data
    /ui/sign-in            exchanges a password for a token at keystone
    /ui/session            who the caller is and what the policy allows (after authentication)
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from oslo_config import cfg
from webob import exc

from cyborg.api.console.sign_in import SESSION, SignIn
from cyborg.api.middleware import App, require_get, root_url

FOLDER = Path(__file__).parent / "static"

# All files and their types; no other name is ever looked up in the folder.
TYPES: Mapping[str, str] = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "licenses.txt": "text/plain; charset=utf-8",
}

# The Content-Security-Policy: this origin only, and no inline script or style.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

SECURITY_HEADERS = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file with its response headers; ``etag`` changes with the content."""

    body: bytes
    etag: str
    headers: Sequence[tuple[str, str]]


def load_files() -> Mapping[str, StaticFile]:
    """Return the static files by name. Raise OSError if one is missing."""
    return {name: _load(name) for name in TYPES}


def _load(name: str) -> StaticFile:
    body = (FOLDER / name).read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = (
        ("Content-Type", TYPES[name]),
        ("ETag", etag),
        # A browser asks each time, and gets 304 unless an upgrade has changed the file.
        ("Cache-Control", "no-cache"),
        *SECURITY_HEADERS,
    )
    return StaticFile(body, etag, headers)


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
        # The session needs a caller: the layer after authentication serves it.
        if path.startswith(f"{PREFIX}/") and path != SESSION:
            raise exc.HTTPNotFound("unknown path below /ui")
        return self._app(environ, start_response)


def _serve(file: StaticFile, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    require_get(environ)
    headers = list(file.headers)
    known = environ.get("HTTP_IF_NONE_MATCH", "")
    # The header can have several tags.
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
