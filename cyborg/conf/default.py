# SPDX-License-Identifier: Apache-2.0
"""Options of the section DEFAULT."""

import socket
from typing import Any

from oslo_config import cfg

OPTIONS = [
    cfg.HostAddressOpt(
        "host",
        default=socket.gethostname(),
        sample_default="<this machine's host name>",
        help="The name of this host. On a host with accelerators it should be the name of its "
        "compute node in Placement (the hypervisor host name of nova-compute). Names of resource "
        "providers start with it.",
    ),
    cfg.StrOpt(
        "state_path",
        default="/var/lib/cyborg",
        help="The directory for files that must survive a restart.",
    ),
    cfg.StrOpt(
        "auth_strategy",
        default="keystone",
        choices=[
            ("keystone", "every request needs a valid keystone token"),
            (
                "noauth",
                "every request has administrator rights; only loopback connections are accepted",
            ),
        ],
        help="How the API authenticates requests.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [("DEFAULT", OPTIONS)]
