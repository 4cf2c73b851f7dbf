# SPDX-License-Identifier: Apache-2.0
"""REST client of the service, based on openstacksdk, and the collections of its objects.

Each error is one line of text. An object may be given by the abbreviated uuid that the tables show.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from cyborg.cli.common import formatting
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
        # The service has a JSON object in a string, as OpenStack Cyborg.
        if isinstance(message, str) and message.startswith("{"):
            message = json.loads(message)
        if isinstance(message, dict):
            # keystonemiddleware answers {"error": {"message": ...}}.
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
                # The exceptions of keystoneauth do not have the message of the service.
                raise_exc=False,
            )
        except exceptions.ClientException as exc:
            raise CommandError(format_exception(exc)) from exc
        if response.status_code >= 400:
            status = response.status_code
            raise CommandError(format_fault(status, response.text), status)
        # An operation without an answer has an empty body.
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
        # All but the rows is the same on each page.
        first, *others = self._pages(path, key, params)
        return {**first, key: [row for page in (first, *others) for row in page[key]]}

    def _pages(self, path: str, key: str, params: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the pages of a list, each a whole response; ``key`` is that of the rows."""
        while True:
            page = self.call("GET", path, params=params)
            yield page
            # Only the query of the link is used: its host may not be reachable from here.
            links = {link["rel"]: link["href"] for link in page.get(f"{key}_links", ())}
            if "next" not in links:
                return
            previous, params = params, parse_qs(urlsplit(links["next"]).query)
            # A proxy that drops the query would otherwise make this endless.
            if params == previous:
                raise CommandError(f"unexpected response to {path}: a page links to itself")

    def _service_adapter(self) -> Any:
        if self._adapter is None:
            self._adapter, base = self.connect(SERVICE)
            # Catalogues have the URL of the service with its version or without.
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
        # Without an override, this asks the catalogue, and so authenticates.
        base = service_adapter.endpoint_override or service_adapter.get_endpoint()
        if not base:
            raise CommandError(
                f"the catalog of this cloud has no {service} service, and no endpoint is configured"
            )
        return service_adapter, str(base)


def _version(options: argparse.Namespace) -> str:
    return str(options.os_accelerator_api_version or DEFAULT_MICROVERSION)


# An object of the service, as a response has it.
Row = Mapping[str, Any]
_FULL = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# At least four digits: a shorter word such as "bad" is probably a name.
_SHORT = re.compile(r"[0-9a-f]{4,8}|[0-9a-f]{8}-[0-9a-f-]{0,27}")


@dataclass(frozen=True)
class Collection:
    """A collection; ``format_row`` adds or replaces values of an object for display.

    ``short`` and ``long`` are the columns of lists; one object is shown with ``long``. ``filters``
    returns the parameters of the list that select the objects that a text names.
    """

    path: str
    short: formatting.Columns
    long: formatting.Columns = ()
    key: str = ""  # of the rows in a response; by default the last segment of the path
    nouns: str = ""  # in messages; by default the key
    format_row: Callable[[Row], Row] = dict
    object_key: str = ""  # of the object in the response for one object; by default it is the body
    has_objects: bool = True  # whether the service has a path for one object
    has_names: bool = False  # whether the path for one object also takes its name
    filters: Callable[[str], Mapping[str, Any]] | None = None
    expected: str = ""  # besides the uuid, in messages: what ``filters`` takes

    @property
    def rows_key(self) -> str:
        """Return the key of the rows in a response."""
        return self.key or self.path.strip("/")

    def object_path(self, uuid: str) -> str:
        """Return the path of an object."""
        return object_path(self.path, uuid)

    def list_all(self, rest: RestClient, **filters: Any) -> list[dict[str, Any]]:
        """Return all objects that match the filters; a filter with the value None is omitted."""
        return rest.list_all(self.path, self.rows_key, **filters)

    @property
    def noun(self) -> str:
        """Return the name of one object, such as ``device profile``."""
        return self._plural.removesuffix("s")

    def read_page(self, rest: RestClient, **params: Any) -> list[dict[str, Any]]:
        """Return the rows of one page, without parameters that are None.

        There are none if no object can match: a text cannot be a name, or objects have no names in
        this version of the service.
        """
        try:
            return list(rest.call("GET", self.path, params=params)[self.rows_key])
        except CommandError as exc:
            # 400: the text cannot be a name, or the service does not know a parameter.
            if exc.status != 400:
                raise
            return []

    def read_one(self, rest: RestClient, key: str) -> Row:
        """Return an object by its uuid or name. Raise CommandError."""
        if not self.has_objects:
            # In the order of uuids, 16 of them at most differ from this one in the last digit only.
            rows = self.read_page(rest, sort_key="uuid", marker=key[:-1], limit=16)
            found = next((row for row in rows if row["uuid"] == key), None)
            if found is None:
                raise CommandError(f"no {self.noun} {key}")
            return found
        body: Row = rest.call("GET", self.object_path(key))
        return body[self.object_key] if self.object_key else body

    def read_each(self, rest: RestClient, keys: Iterable[str]) -> list[Row]:
        """Return objects by their uuids or names. Raise CommandError if one does not exist."""
        return [self.read_one(rest, key) for key in keys]

    def find_uuids(self, rest: RestClient, texts: Iterable[str], field: str = "uuid") -> list[str]:
        """Return for each text the uuid that ``find_uuid`` returns."""
        return [self.find_uuid(rest, text, field) for text in texts]

    def find_uuid(self, rest: RestClient, text: str, field: str = "uuid") -> str:
        """Return the uuid that a text names, or begins; ``field`` is the key of the uuid in a row.

        A whole uuid is returned unchanged. With ``filters``, a text may be a name, which precedes
        the beginning of a uuid. Returned unchanged, for the service to validate, are digits that
        begin no uuid, with ``has_names`` the name of an object, and without ``filters`` any other
        text. Raise CommandError if several objects have the name or the beginning, or if none has
        a name that cannot begin a uuid.
        """
        if _FULL.fullmatch(text.lower()):
            return text
        # A name precedes the beginning of a uuid: an object may be called "bad1".
        filters = self.filters(text) if self.filters and field == "uuid" else None
        rows = self.read_page(rest, **filters, limit=2) if filters else []
        if rows:
            return self._only(text, [row["uuid"] for row in rows], "give the uuid")
        if _SHORT.fullmatch(text.lower()):
            uuids = self._find_beginning(rest, text.lower(), field)
            # With has_names, the service itself finds an object by its name, which precedes.
            if uuids and not (self.has_names and self._find_by_name(rest, text)):
                return self._only(text, uuids, "add more digits")
        elif self.filters and field == "uuid":
            raise CommandError(
                f"none of the {self._plural} is {text!r}: give the uuid, its beginning, or "
                f"{self.expected}, as the list shows them"
            )
        return text

    def _find_beginning(self, rest: RestClient, text: str, field: str) -> list[str]:
        """Return up to two uuids that begin with a text."""
        # Only in the order of uuids can a page start after any text.
        if field == "uuid":
            rows = self.read_page(rest, sort_key="uuid", marker=text, limit=2)
        else:
            rows = self.list_all(rest)
        uuids = {str(row[field]) for row in rows if row.get(field)}
        return sorted(uuid for uuid in uuids if uuid.startswith(text))[:2]

    def _find_by_name(self, rest: RestClient, text: str) -> bool:
        try:
            return self.read_one(rest, text).get("name") == text
        except CommandError as exc:
            # 400: the text cannot be a name.
            if exc.status not in (400, 404):
                raise
            return False

    def _only(self, text: str, uuids: Sequence[str], remedy: str) -> str:
        if len(uuids) > 1:
            named = " and ".join(uuids)
            raise CommandError(
                f"{text} is ambiguous, it names several {self._plural} such as {named}: {remedy}"
            )
        return uuids[0]

    @property
    def _plural(self) -> str:
        return (self.nouns or self.rows_key).replace("_", " ")

    def build_object(self, row: Row) -> Any:
        """Return the headings and values of one object."""
        return formatting.build_object(self.long, self.format_row(row))
