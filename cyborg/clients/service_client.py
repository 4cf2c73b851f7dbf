# SPDX-License-Identifier: Apache-2.0
"""Base of the clients of Nova, Placement and Glance: their credentials, timeouts and errors."""

import copy
import time
from collections.abc import Callable
from typing import Any, ClassVar, Self

from keystoneauth1 import adapter, loading
from keystoneauth1 import exceptions as ks
from oslo_config import cfg

from cyborg import tracing
from cyborg.conf.auth_options import load_auth
from cyborg.core.errors import Misconfigured, TimedOut, Unavailable

# Options of the authentication plug-ins that name a user or its credential.
_USER_OPTIONS = ("username", "user_id", "application_credential_id", "application_credential_name")


def describe(conf: cfg.ConfigOpts, section: str) -> str:
    """Return the user and the configuration section, such as ``user 'cyborg' of [placement]``.

    Return only the section if the authentication plug-in has no user. Never return a password or
    token.
    """
    section = conf[section].auth_section or section
    for name in _USER_OPTIONS:
        try:
            value = conf[section][name]
        except cfg.NoSuchOptError:  # registered only by a plug-in that has this option
            continue
        if value:
            kind = "user" if name.startswith("user") else "application credential"
            return f"{kind} {value!r} of [{section}]"
    return f"the credentials of [{section}]"


def credentials_error(by: str, credentials: str, detail: str) -> Unavailable:
    """Return the error for a 401; ``credentials`` is the result of ``describe``."""
    return Unavailable(
        f"{by} refused {credentials} (401): correct the user, the password or the project of this "
        f"section; {detail}",
        status=401,
    )


MIN_TIMEOUT = 1.0  # seconds that must be left for a repeated request


def load_adapter(conf: cfg.ConfigOpts, section: str) -> adapter.Adapter:
    """Create the adapter of a section. Its ``auth`` is None if auth_type is not set.

    Each request to keystone has the ``timeout`` of the section or, without it, its
    ``request_timeout``. Raise Misconfigured if the section is unusable.
    """
    auth = load_auth(conf, section)
    try:
        session = loading.load_session_from_conf_options(conf, section, auth=auth)
        loaded = loading.load_adapter_from_conf_options(conf, section, session=session, auth=auth)
    except (cfg.Error, TypeError) as exc:
        raise Misconfigured(f"[{section}]: {exc}", option=section) from exc
    if session.timeout is None:
        # The timeout of a request does not apply to the request for its token. Without one, a
        # silent keystone would block a thread for ever, and the lock of the plug-in all others.
        session.timeout = conf[section].request_timeout
    return loaded


class ServiceClient:
    """Client of a service of the cloud over a keystoneauth adapter."""

    # The name of the service in error messages; in lower case that of its section.
    SERVICE: ClassVar[str]

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
        # A copy shares the session, with its token and its connections.
        client = copy.copy(self)
        client.timeout = min(seconds, self.timeout)
        return client

    def _request(self, verb: str, path: str, **options: Any) -> Any:
        """Return the response, whatever its status. Raise Unavailable and TimedOut."""
        # The query is left out: it may have names.
        short_path = path.partition("?")[0]
        name = f"{self.SERVICE.lower()} {verb}"
        with tracing.child_span(name, tracing.SpanKind.CLIENT, method=verb, path=short_path):
            answer = self._translate_errors(verb, path, **options)
            tracing.annotate(status=answer.status_code)
            return answer

    def _ask_keystone(self, ask: Callable[[], Any]) -> Any:
        """Return the result of a call that may need a token or the catalog. Raise Unavailable."""
        try:
            return ask()
        except ks.ClientException as exc:
            raise self._translate(exc, f"no token or endpoint for {self.SERVICE}") from exc
        except OSError as exc:
            raise self._file_error(exc) from exc

    def _translate_errors(self, verb: str, path: str, **options: Any) -> Any:
        """Return the response of a request. Raise Unavailable and TimedOut."""
        try:
            return self._send(verb, path, **options)
        except ks.ConnectTimeout as exc:
            raise TimedOut(f"{self.SERVICE} did not answer in {self.timeout:g} s: {exc}") from exc
        except ks.ClientException as exc:
            raise self._translate(exc, f"{self.SERVICE} cannot be reached") from exc
        except OSError as exc:
            raise self._file_error(exc) from exc

    def _file_error(self, exc: OSError) -> Unavailable:
        # requests raises it, and checks the files at each new connection.
        return Unavailable(
            f"{self.SERVICE} cannot be reached: {exc}; correct cafile, certfile or keyfile of "
            f"[{self.SERVICE.lower()}]"
        )

    def _translate(self, exc: ks.ClientException, problem: str) -> Exception:
        """Return the error that names the credentials if keystone refuses them, or the problem."""
        if isinstance(exc, ks.Unauthorized):
            return credentials_error("keystone", self._credentials, f"for {self.SERVICE}: {exc}")
        return Unavailable(f"{problem}: {exc}")

    def _send(self, verb: str, path: str, **options: Any) -> Any:
        """Send a request; repeat a GET once if its connection breaks before the response."""
        # A server closes connections that are idle for some seconds, possibly while a request is on
        # its way. RFC 9110 (9.2.2) allows a client to repeat an idempotent request. Other requests
        # are not repeated: their generation may be stale by then, and their callers retry with a
        # new one. connect_retries of keystoneauth waits before it repeats, and repeats after
        # timeouts too.
        end = time.monotonic() + self.timeout
        # The callers judge the status: keystoneauth's exceptions lose the body with the reason.
        options["raise_exc"] = False
        try:
            return self._adapter.request(path, verb, timeout=self.timeout, **options)
        except ks.ConnectTimeout:
            raise  # it is a ConnectFailure, too, but has used up the timeout
        except ks.ConnectFailure:
            left = end - time.monotonic()
            if verb != "GET" or left < MIN_TIMEOUT:
                raise
        return self._adapter.request(path, verb, timeout=left, **options)
