# SPDX-License-Identifier: Apache-2.0
"""Plug-in interface of ``openstack``: the name, the global option and the factory of the client.

The client is called ``cyborg``, because python-openstackclient has its own ``accelerator`` client,
whose commands must keep working.
"""

import argparse
import os
from typing import Any

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
    from cyborg.osc.rest import OscRestClient

    return OscRestClient(instance)
