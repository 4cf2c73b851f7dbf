# SPDX-License-Identifier: Apache-2.0
"""Calls to the service from within ``openstack``, which has found the cloud and logged in."""

import argparse
from typing import Any

from cyborg.cli.rest import Rest
from cyborg.osc.plugin import API_NAME


class PluggedRest(Rest):
    """The REST API of the cloud that ``openstack`` works with."""

    def __init__(self, manager: Any) -> None:
        """``manager`` is the client manager of ``openstack``."""
        version = manager._api_version[API_NAME]
        super().__init__(argparse.Namespace(os_accelerator_api_version=version, timeout=None))
        self._manager = manager

    def _cloud(self) -> Any:
        return self._manager._cli_options
