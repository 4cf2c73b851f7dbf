# SPDX-License-Identifier: Apache-2.0
"""Options of the message bus."""

from typing import Any

from oslo_config import cfg

GROUP = "rpc"
OPTIONS = [
    cfg.StrOpt(
        "topic",
        default="cyborg",
        regex=r"^[A-Za-z0-9_.-]{1,64}$",
        help="Prefix of the names of the message queues. Installations that share a broker need "
        "different prefixes.",
    ),
    cfg.FloatOpt(
        "timeout", default=30.0, min=0.1, help="Seconds to wait for the response to an RPC call."
    ),
    cfg.ListOpt(
        "allowed_users",
        default=[],
        help="The broker users whose calls this daemon accepts, as authenticated by RabbitMQ. "
        "Empty accepts all users. An agent that lists only the conductors' user rejects "
        "calls from a compromised host.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [(GROUP, OPTIONS)]
