# SPDX-License-Identifier: Apache-2.0
"""How to reach Placement."""

from typing import Any

from oslo_config import cfg

from cyborg.conf import neighbour

GROUP = "placement"
OPTIONS = [
    neighbour.TIMEOUT,
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section, those of keystoneauth among them."""
    neighbour.register(conf, GROUP, "placement", OPTIONS)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return neighbour.list_opts(GROUP, OPTIONS)
