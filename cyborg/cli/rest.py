# SPDX-License-Identifier: Apache-2.0
"""Calls to the service: openstacksdk finds it and authenticates, failures become one clear line."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from cyborg.core.text import clean

# The newest microversion whose answers these commands know how to show.
LATEST = "2.4"
SERVICE = "accelerator"

# Seconds for one call, unless the command line or clouds.yaml says otherwise.
PATIENCE = 180.0

_VERSIONED = re.compile(r"/v2(\.\d+)?/?$")


class Refused(Exception):
    """The service or the way to it said no; the text is one line for the person at the keyboard."""


class Answer(dict[str, Any]):
    """What the service answers: an object that has what its version promises.

    Raises Refused for a key that it lacks: then something else answers, such as a proxy.
    """

    def __init__(self, body: Mapping[str, Any], url: str) -> None:
        super().__init__(body)
        self._url = url

    def __missing__(self, key: str) -> Any:
        raise Refused(f"{self._url} answered without {key!r}: this is not what was asked")


class Rest:
    """The REST API of one cloud, connected to when the first call is made.

    ``options`` are the parsed global options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
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
        """Return what the service answers: an Answer, or None for an empty body. Raises Refused.

        ``path`` starts below the version, such as ``/devices``. ``params`` whose value is None
        are left out. ``service_token`` is the word of a service, given besides the caller's own.
        """
        from keystoneauth1 import exceptions

        try:
            adapter = self._accelerator()
            answer = adapter.request(
                self._prefix + path,
                method,
                json=body,
                params={k: v for k, v in (params or {}).items() if v is not None},
                headers={"X-Service-Token": service_token} if service_token else {},
                microversion=_version(self._options),
                raise_exc=False,
            )
        except exceptions.ClientException as away:
            raise Refused(_one_line(away)) from away
        if answer.status_code >= 400:
            raise Refused(fault(answer.status_code, answer.text))
        if not answer.content:
            return None
        try:
            found = answer.json()
        except (ValueError, RecursionError) as bad:
            raise Refused(f"{answer.url} answered something that is not JSON") from bad
        if not isinstance(found, dict):
            raise Refused(f"{answer.url} answered JSON that is no object")
        return Answer(found, answer.url)

    def rows(self, path: str, key: str, **params: Any) -> list[dict[str, Any]]:
        """Return every row of a collection, page after page. Raises Refused."""
        return list(self._pages(path, key, params))

    def _pages(self, path: str, key: str, params: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        while True:
            page = self.call("GET", path, params=params)
            yield from page[key]
            links = {link["rel"]: link["href"] for link in page.get(f"{key}_links", ())}
            if "next" not in links:
                return
            before, params = params, dict(parse_qsl(urlsplit(links["next"]).query))
            if params == before:
                raise Refused(f"the page of {path} behind this one is this one again")

    def _accelerator(self) -> Any:
        if self._adapter is None:
            self._adapter, base = self.reach(SERVICE)
            self._prefix = "" if _VERSIONED.search(base) else "/v2"
        return self._adapter

    def reach(self, service: str) -> tuple[Any, str]:
        """Return a way to a service of the cloud with the caller's token, and where that leads.

        Raises Refused.
        """
        # Late: a third of a second that a mistyped command should not pay. Not the SDK's own
        # proxy, which asks for the version document first: the base URL tells enough.
        from keystoneauth1 import adapter
        from openstack import exceptions

        try:
            cloud = self._cloud()
            session = cloud.get_session()
            # --timeout does not reach it: the SDK looks for that in the parser's own object.
            session.timeout = self._options.timeout or session.timeout or PATIENCE
            way = adapter.Adapter(
                session,
                service_type=cloud.get_service_type(service),
                service_name=cloud.get_service_name(service),
                interface=cloud.get_interface(service),
                region_name=cloud.get_region_name(service),
                endpoint_override=cloud.get_endpoint(service),
            )
        except exceptions.SDKException as bad:
            raise Refused(_one_line(bad)) from bad
        base = way.endpoint_override or way.get_endpoint()
        if not base:
            raise Refused(f"this cloud has no {service} service, and no endpoint is given")
        return way, str(base)

    def _cloud(self) -> Any:
        from openstack import config

        return config.OpenStackConfig().get_one(argparse=self._options)


def at(collection: str, name: str) -> str:
    """Return the path of one object. Raises Refused for a name that would be another path."""
    if name.strip(".") == "":
        raise Refused(f"{name!r} names no object")
    return f"{collection}/{quote(name, safe='')}"


def fault(status: int, text: str) -> str:
    r"""Return the message of an error answer, whoever wrote it: this service or a proxy before it.

    >>> fault(404, '{"error_message": "{\\"faultstring\\": \\"no such ARQ\\"}"}')
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
    # A proxy may say anything, to a terminal too.
    said = clean(str(message) if message else text.strip()[:300]).strip() or "no explanation"
    return f"{' '.join(said.split())} (HTTP {status})"


def _version(options: argparse.Namespace) -> str:
    return str(options.os_accelerator_api_version or LATEST)


def _one_line(error: Exception) -> str:
    # urllib3's own words, after the first colon that follows the URL, tell only of Python objects.
    text = " ".join(str(error).split())
    return text.split(": HTTPConnectionPool")[0].split(": HTTPSConnectionPool")[0]
