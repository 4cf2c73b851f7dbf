# SPDX-License-Identifier: Apache-2.0
"""REST client of the service, based on openstacksdk; each error is one line of text."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from cyborg.core.text import sanitize


class CommandError(Exception):
    """Error of the service or of the connection to it; the text is one line for the user.

    ``status`` is that of the response of the service, if there is one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Response(dict[str, Any]):
    """JSON object of a response.

    A missing key raises CommandError, because it means that a proxy or another service responded.
    """

    def __init__(self, body: Mapping[str, Any], url: str) -> None:
        super().__init__(body)
        self._url = url

    def __missing__(self, key: str) -> Any:
        raise CommandError(f"unexpected response from {self._url}: {key!r} is missing")


def object_path(collection: str, name: str) -> str:
    """Return the path of an object. Raise CommandError for a name that changes the path."""
    if name.strip(".") == "":
        raise CommandError(f"{name!r} is not a valid name of an object")
    return f"{collection}/{quote(name, safe='')}"


def format_fault(status: int, text: str) -> str:
    r"""Return the message of an error response of the service or of a proxy.

    >>> format_fault(404, '{"error_message": "{\\"faultstring\\": \\"no such ARQ\\"}"}')
    'no such ARQ (HTTP 404)'
    """
    message: Any = None
    try:
        body = json.loads(text)
        message = body.get("error_message", body)
        if isinstance(message, str) and message.startswith("{"):
            message = json.loads(message)
        if isinstance(message, dict):
            inner = message.get("error", message)
            message = inner.get("faultstring") or inner.get("message")
    except (ValueError, AttributeError, RecursionError):
        message = None
    # The response of a proxy can contain control characters.
    text = sanitize(str(message) if message else text.strip()[:300]).strip() or "no error message"
    return f"{' '.join(text.split())} (HTTP {status})"


def format_exception(error: Exception) -> str:
    """Return a connection error in one line, without details for programmers."""
    # The text of urllib3 after the URL describes only Python objects.
    text = " ".join(str(error).split())
    return text.split(": HTTPConnectionPool")[0].split(": HTTPSConnectionPool")[0]


# The newest microversion that these commands support.
DEFAULT_MICROVERSION = "2.6"
SERVICE = "accelerator"

# Seconds for one call, unless the command line or clouds.yaml sets another timeout.
DEFAULT_TIMEOUT = 180.0

_VERSIONED = re.compile(r"/v2(\.\d+)?/?$")


class RestClient:
    """Client of the REST API of one cloud; it connects at the first call.

    ``options`` are the parsed global options of the command line. They select the cloud, unless
    ``cloud`` is given.
    """

    def __init__(self, options: argparse.Namespace, cloud: Any = None) -> None:
        self._options = options
        self._cloud = cloud
        self._adapter: Any = None
        self._prefix = ""

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        service_token: str | None = None,
    ) -> Any:
        """Send a request and return its Response, or None for an empty body.

        ``path`` starts below the version, such as ``/devices``. ``params`` with the value None are
        omitted. ``service_token`` is sent in addition to the token of the caller. Raise
        CommandError if the call fails.
        """
        from keystoneauth1 import exceptions

        try:
            adapter = self._service_adapter()
            response = adapter.request(
                self._prefix + path,
                method,
                json=body,
                params={k: v for k, v in (params or {}).items() if v is not None},
                headers={"X-Service-Token": service_token} if service_token else {},
                microversion=_version(self._options),
                raise_exc=False,
            )
        except exceptions.ClientException as exc:
            raise CommandError(format_exception(exc)) from exc
        if response.status_code >= 400:
            status = response.status_code
            raise CommandError(format_fault(status, response.text), status)
        if not response.content:
            return None
        try:
            body = response.json()
        except (ValueError, RecursionError) as exc:
            raise CommandError(f"unexpected response from {response.url}: not JSON") from exc
        if not isinstance(body, dict):
            raise CommandError(f"unexpected response from {response.url}: not a JSON object")
        return Response(body, response.url)

    def list_all(self, path: str, key: str, /, **params: Any) -> list[dict[str, Any]]:
        """Return all rows of a collection, following its pages. Raise CommandError."""
        return [row for page in self._pages(path, key, params) for row in page[key]]

    def read_whole(self, path: str, key: str, /, **params: Any) -> dict[str, Any]:
        """Return an object that has pages of rows under a key, with the rows of all pages."""
        first, *others = self._pages(path, key, params)
        return {**first, key: [row for page in (first, *others) for row in page[key]]}

    def _pages(self, path: str, key: str, params: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        while True:
            page = self.call("GET", path, params=params)
            yield page
            # Only the query of the link is used: its host may not be reachable from here.
            links = {link["rel"]: link["href"] for link in page.get(f"{key}_links", ())}
            if "next" not in links:
                return
            previous, params = params, dict(parse_qsl(urlsplit(links["next"]).query))
            # A proxy that drops the query would otherwise make this endless.
            if params == previous:
                raise CommandError(f"unexpected response to {path}: a page links to itself")

    def _service_adapter(self) -> Any:
        if self._adapter is None:
            self._adapter, base = self.connect(SERVICE)
            self._prefix = "" if _VERSIONED.search(base) else "/v2"
        return self._adapter

    def connect(self, service: str) -> tuple[Any, str]:
        """Return an adapter for a service of the cloud, with the caller's token, and its base URL.

        Raise CommandError if the cloud configuration or the catalog lacks the service.
        """
        # A late import saves 0.3 s for a mistyped command. The proxy of the SDK is not used because
        # it requests the version document first; the base URL is sufficient here.
        from keystoneauth1 import adapter
        from openstack import config, exceptions

        try:
            cloud = self._cloud or config.OpenStackConfig().get_one(argparse=self._options)
            session = cloud.get_session()
            # The SDK ignores --timeout: it expects the option in its own parser object.
            session.timeout = self._options.timeout or session.timeout or DEFAULT_TIMEOUT
            service_adapter = adapter.Adapter(
                session,
                service_type=cloud.get_service_type(service),
                service_name=cloud.get_service_name(service),
                interface=cloud.get_interface(service),
                region_name=cloud.get_region_name(service),
                endpoint_override=cloud.get_endpoint(service),
            )
        except exceptions.SDKException as exc:
            raise CommandError(format_exception(exc)) from exc
        base = service_adapter.endpoint_override or service_adapter.get_endpoint()
        if not base:
            raise CommandError(
                f"the catalog of this cloud has no {service} service, and no endpoint is configured"
            )
        return service_adapter, str(base)


def _version(options: argparse.Namespace) -> str:
    return str(options.os_accelerator_api_version or DEFAULT_MICROVERSION)
