# SPDX-License-Identifier: Apache-2.0
"""REST client within ``openstack``, which selects the cloud and authenticates."""

import argparse
from typing import Any

from cyborg.cli.common.rest import RestClient
from cyborg.osc.plugin import API_NAME


class OscRestClient(RestClient):
    """Client of the REST API of the cloud that ``openstack`` uses."""

    def __init__(self, manager: Any) -> None:
        """Create the client; ``manager`` is the client manager of ``openstack``."""
        version = manager._api_version[API_NAME]
        super().__init__(argparse.Namespace(os_accelerator_api_version=version, timeout=None))
        self._manager = manager

    def _cloud(self) -> Any:
        return self._manager._cli_options
