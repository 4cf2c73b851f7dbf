# SPDX-License-Identifier: Apache-2.0
"""How to reach Nova."""

from typing import Any

from oslo_config import cfg

from cyborg.conf import neighbour

GROUP = "nova"
OPTIONS = [
    cfg.BoolOpt(
        "notify",
        default=True,
        help="Tell Nova of each accelerator request that is bound. Off in an installation without "
        "Nova: no events are recorded then.",
    ),
    neighbour.TIMEOUT,
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section, those of keystoneauth among them."""
    neighbour.register(conf, GROUP, "compute", OPTIONS)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return neighbour.list_opts(GROUP, OPTIONS)
