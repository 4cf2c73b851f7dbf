# SPDX-License-Identifier: Apache-2.0
"""Reject requests that a web page sends to a service without authentication.

With DNS rebinding, a page whose host name resolves to a loopback address can send same-origin
requests to this machine through the browser; ``Host`` then has the name of that page. Any page can
send simple cross-origin requests; ``Origin`` then has the name of the page.
"""

import ipaddress
import re
from collections.abc import Collection, Iterable
from typing import Any

from cyborg.api.access_log import App
from cyborg.core.errors import Forbidden

# Key of the WSGI environ: the Host header of the client, before proxy headers replace it.
HOST = "cyborg.host"
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\s\[\]:/@]+)(?::[0-9]{1,5})?")


class HostCheck:
    """A WSGI layer that rejects requests unless ``Host`` is a loopback address or in ``names``."""

    def __init__(self, app: App, names: Collection[str] = ()) -> None:
        self._app = app
        self._names = {_normalize(name) for name in names}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Serve one request. Raise Forbidden if Host or Origin has another name."""
        host = environ.get(HOST, environ.get("HTTP_HOST"))
        # A browser always sends Host.
        if host is not None and not self._is_allowed(host):
            raise Forbidden(
                f"Host: {host[:255]!r} is not a name of this service. Without authentication, only "
                "localhost, loopback addresses and the names in [api] server_names are accepted"
            )
        origin = environ.get("HTTP_ORIGIN")
        if origin is not None and origin.partition("://")[2].lower() != (host or "").lower():
            raise Forbidden(
                f"Origin: {origin[:255]!r} is another site. Without authentication, cross-origin "
                "requests are rejected"
            )
        return self._app(environ, start_response)

    def _is_allowed(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = _normalize(match["name"])
        return name == "localhost" or name in self._names or _is_loopback(name)


def _normalize(name: str) -> str:
    return name.strip("[]").rstrip(".").lower()


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
