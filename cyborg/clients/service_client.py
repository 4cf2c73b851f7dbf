# SPDX-License-Identifier: Apache-2.0
"""Base of the clients of Nova and Placement: timeout and errors of each request."""

import copy
import time
from typing import Any, ClassVar, Self

from keystoneauth1 import adapter
from keystoneauth1 import exceptions as ks

from cyborg.clients.credentials import credentials_error
from cyborg.core.errors import TimedOut, Unavailable

MIN_TIMEOUT = 1.0  # seconds that must be left for a repeated request


class ServiceClient:
    """Client of a service of the cloud over a keystoneauth adapter."""

    SERVICE: ClassVar[str]
    """The name of the service in error messages; in lower case that of its section."""

    def __init__(
        self, adapter: adapter.Adapter, timeout: float = 30.0, credentials: str | None = None
    ) -> None:
        """Use a keystoneauth adapter; ``timeout`` is in seconds per request, also as attribute.

        ``credentials`` names the user and the configuration section in error messages.
        """
        self._credentials = credentials or f"the credentials of [{self.SERVICE.lower()}]"
        self._adapter = adapter
        self.timeout = timeout

    def with_timeout(self, seconds: float) -> Self:
        """Return a copy of this client with a timeout of at most ``seconds`` per request."""
        client = copy.copy(self)
        client.timeout = min(seconds, self.timeout)
        return client

    def _request(self, verb: str, path: str, **options: Any) -> Any:
        """Return the response, whatever its status. Raise Unavailable and TimedOut."""
        try:
            return self._send(verb, path, **options)
        except ks.ConnectTimeout as exc:
            raise TimedOut(f"{self.SERVICE} did not answer in {self.timeout:g} s: {exc}") from exc
        except ks.Unauthorized as exc:
            raise credentials_error(
                "keystone", self._credentials, f"for {self.SERVICE}: {exc}"
            ) from exc
        except ks.ClientException as exc:
            raise Unavailable(f"{self.SERVICE} cannot be reached: {exc}") from exc

    def _send(self, verb: str, path: str, **options: Any) -> Any:
        """Send a request; repeat a GET once if its connection breaks before the response.

        A server closes connections that are idle for some seconds, possibly while a request is on
        its way. RFC 9110 (9.2.2) allows a client to repeat an idempotent request. Other requests
        are not repeated: their generation may be stale by then, and their callers retry with a new
        one.
        """
        # connect_retries of keystoneauth waits before it repeats, and repeats after timeouts too.
        end = time.monotonic() + self.timeout
        options["raise_exc"] = False
        try:
            return self._adapter.request(path, verb, timeout=self.timeout, **options)
        except ks.ConnectTimeout:
            raise
        except ks.ConnectFailure:
            left = end - time.monotonic()
            if verb != "GET" or left < MIN_TIMEOUT:
                raise
        return self._adapter.request(path, verb, timeout=left, **options)
