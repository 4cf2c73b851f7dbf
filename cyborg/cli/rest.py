# SPDX-License-Identifier: Apache-2.0
"""Calls to the service: openstacksdk finds it and authenticates, failures become one clear line."""

import argparse
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from cyborg.cli.answers import Answer, Refused, fault, one_line

# The newest microversion whose answers these commands know how to show.
LATEST = "2.4"
SERVICE = "accelerator"

# Seconds for one call, unless the command line or clouds.yaml says otherwise.
PATIENCE = 180.0

_VERSIONED = re.compile(r"/v2(\.\d+)?/?$")


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
            raise Refused(one_line(away)) from away
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
            raise Refused(one_line(bad)) from bad
        base = way.endpoint_override or way.get_endpoint()
        if not base:
            raise Refused(f"this cloud has no {service} service, and no endpoint is given")
        return way, str(base)

    def _cloud(self) -> Any:
        from openstack import config

        return config.OpenStackConfig().get_one(argparse=self._options)


def _version(options: argparse.Namespace) -> str:
    return str(options.os_accelerator_api_version or LATEST)
