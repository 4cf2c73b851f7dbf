# SPDX-License-Identifier: Apache-2.0
"""The plug-in of ``openstack``: its global option, its client and its commands.

The client is called ``cyborg``, because python-openstackclient has its own ``accelerator`` client,
whose commands must keep working. The module has the commands of ``cyborg`` as attributes, under the
names of the entry points ``accelerator_*``.
"""

import argparse
import importlib
import os
from typing import TYPE_CHECKING, Any

# Every command of ``openstack``, also of other plug-ins, imports this module: what only our own
# commands need is imported by the functions.
if TYPE_CHECKING:
    from cliff import command

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
    """Return whether commands exist for a version, such as ``2.6``."""
    # An unknown minor version is refused by the service, with the known ones.
    return version.partition(".")[0] == "2"


def make_client(instance: Any) -> Any:
    """Return the REST client; ``instance`` is the client manager of ``openstack``."""
    from cyborg.cli.common.rest import RestClient

    version = instance._api_version[API_NAME]
    options = argparse.Namespace(os_accelerator_api_version=version, timeout=None)
    # ``openstack`` has selected the cloud, and authenticates.
    return RestClient(options, instance._cli_options)


class PluginCommand:
    """Mix-in that gets the REST client from the client manager of ``openstack``."""

    app: Any

    def run(self, parsed_args: argparse.Namespace) -> int:
        """Set the REST client and run the command."""
        self.app.rest = self.app.client_manager.cyborg
        return int(super().run(parsed_args))  # type: ignore[misc]


def __getattr__(name: str) -> "type[command.Command]":
    """Return the command of an entry point; only its own module is imported."""
    from cyborg.cli.commands import COMMANDS

    # Not those of other clients, whose entry points have the same names.
    entries = (e for e in COMMANDS.values() if e.is_own and e.entry_point == name)
    entry = next(entries, None)
    if entry is None:
        raise AttributeError(name)
    module, _, class_name = entry.path.partition(":")
    base = getattr(importlib.import_module(f"cyborg.cli.{module}"), class_name)
    return type(name, (PluginCommand, base), {"__doc__": base.__doc__, "__module__": __name__})
