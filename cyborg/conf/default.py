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
        help="The name of this host, as Nova and Placement know it (nova-compute's own host "
        "option). Resource providers are named after it.",
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
            ("keystone", "every request carries a token that keystone vouches for"),
            ("noauth", "every request is an administrator's; only a loopback peer is answered"),
        ],
        help="How the API knows who is asking.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [("DEFAULT", OPTIONS)]
