# SPDX-License-Identifier: Apache-2.0
"""The static files of the web console, which ``tools/console`` builds."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "static"

TYPES: Mapping[str, str] = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "licenses.txt": "text/plain; charset=utf-8",
}
"""All files and their types; no other name is ever looked up in the folder."""

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
"""The Content-Security-Policy: this origin only, and no inline script or style."""

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
