# SPDX-License-Identifier: Apache-2.0
"""Options of the internal bus."""

from typing import Any

from oslo_config import cfg

GROUP = "rpc"
OPTIONS = [
    cfg.StrOpt(
        "topic",
        default="cyborg",
        regex=r"^[A-Za-z0-9_.-]{1,64}$",
        help="What the names of our queues start with. Two installations that share a broker need "
        "two names.",
    ),
    cfg.FloatOpt(
        "timeout", default=30.0, min=0.1, help="Seconds to wait for an answer on the bus."
    ),
    cfg.ListOpt(
        "callers",
        default=[],
        help="The broker's users whose calls this daemon takes, as RabbitMQ vouches for them; "
        "empty takes those of all. An agent that names the conductors' user here takes no orders "
        "from another host that was broken into.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [(GROUP, OPTIONS)]
