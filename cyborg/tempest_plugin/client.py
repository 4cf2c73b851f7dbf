# SPDX-License-Identifier: Apache-2.0
"""Requests to the API of the accelerator service as a user of tempest."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from tempest import config
from tempest.lib.common import rest_client

SERVICE_TYPE = "accelerator"
STATUSES = {"GET": 200, "POST": 201, "PATCH": 200, "DELETE": 204}


class AcceleratorClient(rest_client.RestClient):
    """Requests at one microversion. An answer of 4xx raises an exception of tempest.lib."""

    def __init__(self, auth_provider: Any, version: str) -> None:
        """``version`` is a microversion such as 2.6."""
        region = config.CONF.identity.region
        settings = config.service_client_config()
        super().__init__(auth_provider, SERVICE_TYPE, region, **settings)
        self.version = version

    def get_headers(self, accept_type: Any = None, send_type: Any = None) -> dict[str, str]:
        """Return the headers of a request."""
        headers: dict[str, str] = super().get_headers(accept_type, send_type)
        return headers | {"OpenStack-API-Version": f"{SERVICE_TYPE} {self.version}"}

    def call(
        self, method: str, path: str, body: Any = None, **query: Any
    ) -> rest_client.ResponseBody:
        """Send a request; return the JSON of the answer, with its headers as ``response``.

        Raise InvalidHttpSuccessCode if the answer has another status than those of its method.
        """
        address = f"/{path}?{urlencode(query)}" if query else f"/{path}"
        text = None if body is None else json.dumps(body)
        response, answer = self.request(method, address, body=text)
        self.expected_success(STATUSES[method], response.status)
        found: Mapping[str, Any] = json.loads(answer) if answer else {}
        return rest_client.ResponseBody(response, found)
