# SPDX-License-Identifier: Apache-2.0
"""Options of the stand-alone service."""

from typing import Any

from oslo_config import cfg

GROUP = "standalone"
OPTIONS = [
    cfg.HostAddressOpt("listen", default="127.0.0.1", help="The address that the API listens on."),
    cfg.PortOpt("port", default=6666, help="The port that the API listens on; 0 takes any."),
    cfg.IntOpt("threads", default=8, min=1, help="Requests that the API answers at once."),
    cfg.PortOpt(
        "placement_port",
        default=0,
        help="The port on which the embedded Placement is served too, for looking at it; 0 takes "
        "any.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [(GROUP, OPTIONS)]
