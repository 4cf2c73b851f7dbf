# SPDX-License-Identifier: Apache-2.0
"""What ``openstack`` asks of a plug-in: the name of its client, its option, how it is made.

The client is called ``cyborg``, not ``accelerator``: that one python-openstackclient has itself,
and its commands go on as they are.
"""

import argparse
import os
from typing import Any

API_NAME = "cyborg"
API_VERSION_OPTION = "os_cyborg_api_version"
DEFAULT_API_VERSION = "2.4"
# What is told to those who ask for something else.
API_VERSIONS = tuple(f"2.{minor}" for minor in range(5))


def build_option_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the global option of the microversion, and return the parser."""
    parser.add_argument(
        "--os-cyborg-api-version",
        metavar="<cyborg-api-version>",
        default=os.environ.get("OS_CYBORG_API_VERSION", DEFAULT_API_VERSION),
        help="Microversion that the commands of Cyborg ask for, "
        f"default {DEFAULT_API_VERSION} (Env: OS_CYBORG_API_VERSION)",
    )
    return parser


def check_api_version(version: str) -> bool:
    """Tell whether the service is the judge of a version; any but 2 has no commands at all."""
    return version.partition(".")[0] == "2"


def make_client(instance: Any) -> Any:
    """Return the way to the service; ``instance`` is the client manager of ``openstack``."""
    # Late: every command of openstack imports this module, whatever it does.
    from cyborg.osc.rest import PluggedRest

    return PluggedRest(instance)
