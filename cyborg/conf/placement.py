# SPDX-License-Identifier: Apache-2.0
"""Options of the Placement client."""

from typing import Any

from oslo_config import cfg

from cyborg.conf import keystoneauth

GROUP = "placement"
OPTIONS = [
    keystoneauth.TIMEOUT,
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section, including those of keystoneauth."""
    keystoneauth.register(conf, GROUP, "placement", OPTIONS)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return keystoneauth.list_opts(GROUP, OPTIONS)
