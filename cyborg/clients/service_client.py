# SPDX-License-Identifier: Apache-2.0
"""Base of the clients of Nova and Placement: timeout and errors of each request."""

import copy
from typing import Any, ClassVar, Self

from keystoneauth1 import adapter
from keystoneauth1 import exceptions as ks

from cyborg.clients.credentials import credentials_error
from cyborg.core.errors import TimedOut, Unavailable


class ServiceClient:
    """Client of a service of the cloud over a keystoneauth adapter."""

    SERVICE: ClassVar[str]
    """The name of the service in error messages; in lower case that of its section."""

    def __init__(
        self, adapter: adapter.Adapter, timeout: float = 30.0, credentials: str | None = None
    ) -> None:
        """Use a keystoneauth adapter; ``timeout`` is in seconds per request.

        ``credentials`` names the user and the configuration section in error messages.
        """
        self._credentials = credentials or f"the credentials of [{self.SERVICE.lower()}]"
        self._adapter = adapter
        self._timeout = timeout

    def with_timeout(self, seconds: float) -> Self:
        """Return a copy of this client with a timeout of at most ``seconds`` per request."""
        client = copy.copy(self)
        client._timeout = min(seconds, self._timeout)
        return client

    def _request(self, verb: str, path: str, **options: Any) -> Any:
        """Return the response, whatever its status. Raise Unavailable and TimedOut."""
        try:
            return self._adapter.request(
                path, verb, raise_exc=False, timeout=self._timeout, **options
            )
        except ks.ConnectTimeout as exc:
            raise TimedOut(f"{self.SERVICE} did not answer in {self._timeout:g} s: {exc}") from exc
        except ks.Unauthorized as exc:
            raise credentials_error(
                "keystone", self._credentials, f"for {self.SERVICE}: {exc}"
            ) from exc
        except ks.ClientException as exc:
            raise Unavailable(f"{self.SERVICE} cannot be reached: {exc}") from exc
