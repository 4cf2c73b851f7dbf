# SPDX-License-Identifier: Apache-2.0
"""Commands of ``cyborg`` as commands of ``openstack accelerator``.

The attributes of this module have the names of the entry points.

REST client within ``openstack``, which selects the cloud and authenticates.

Plug-in interface of ``openstack``: the name, the global option and the factory of the client.

The client is called ``cyborg``, because python-openstackclient has its own ``accelerator`` client,
whose commands must keep working.
"""

import argparse
import importlib
import os
from typing import Any

from cliff import command

from cyborg.cli.commands import COMMANDS
from cyborg.cli.common.rest import RestClient

_ENTRIES = {entry.entry_point: entry for entry in COMMANDS.values() if entry.is_own}


class _PluginCommand:
    """Mix-in that gets the REST client from the client manager of ``openstack``."""

    app: Any

    def run(self, parsed_args: argparse.Namespace) -> int:
        """Set the REST client and run the command."""
        self.app.rest = self.app.client_manager.cyborg
        return int(super().run(parsed_args))  # type: ignore[misc]


def __getattr__(name: str) -> type[command.Command]:
    """Return the command of an entry point; only its own module is imported."""
    if name not in _ENTRIES:
        raise AttributeError(name)
    module, _, class_name = _ENTRIES[name].path.partition(":")
    base = getattr(importlib.import_module(f"cyborg.cli.{module}"), class_name)
    return type(name, (_PluginCommand, base), {"__doc__": base.__doc__, "__module__": __name__})


class OscRestClient(RestClient):
    """Client of the REST API of the cloud that ``openstack`` uses."""

    def __init__(self, manager: Any) -> None:
        """Create the client; ``manager`` is the client manager of ``openstack``."""
        version = manager._api_version[API_NAME]
        super().__init__(argparse.Namespace(os_accelerator_api_version=version, timeout=None))
        self._manager = manager

    def _cloud(self) -> Any:
        return self._manager._cli_options


API_NAME = "cyborg"
API_VERSION_OPTION = "os_cyborg_api_version"
DEFAULT_API_VERSION = "2.6"
# Listed in the error message for an unsupported version.
API_VERSIONS = tuple(f"2.{minor}" for minor in range(7))


def build_option_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the global option for the microversion and return the parser."""
    parser.add_argument(
        "--os-cyborg-api-version",
        metavar="<cyborg-api-version>",
        default=os.environ.get("OS_CYBORG_API_VERSION", DEFAULT_API_VERSION),
        help="Requested microversion of the Cyborg API, "
        f"default {DEFAULT_API_VERSION} (Env: OS_CYBORG_API_VERSION)",
    )
    return parser


def check_api_version(version: str) -> bool:
    """Return whether commands exist for a version; the service validates the minor version."""
    return version.partition(".")[0] == "2"


def make_client(instance: Any) -> Any:
    """Return the REST client; ``instance`` is the client manager of ``openstack``."""
    # A late import: every command of openstack imports this module.
    from cyborg.osc.plugin import OscRestClient

    return OscRestClient(instance)
