# SPDX-License-Identifier: Apache-2.0
"""Options of the standalone service."""

from typing import Any

from oslo_config import cfg

GROUP = "standalone"
OPTIONS = [
    cfg.HostAddressOpt("listen", default="127.0.0.1", help="The address on which the API listens."),
    cfg.PortOpt(
        "port", default=6666, help="The port on which the API listens; 0 selects a free port."
    ),
    cfg.IntOpt(
        "threads",
        default=8,
        min=1,
        help="Maximum number of requests that the API processes at the same time.",
    ),
    cfg.PortOpt(
        "placement_port",
        default=0,
        help="The port on which the embedded Placement listens for inspection; 0 selects a free "
        "port.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [(GROUP, OPTIONS)]
