# SPDX-License-Identifier: Apache-2.0
"""Options of the Nova client."""

from typing import Any

from oslo_config import cfg

from cyborg.conf import keystoneauth

GROUP = "nova"
OPTIONS = [
    cfg.BoolOpt(
        "send_events",
        default=True,
        help="Whether to send an event to Nova for each bound accelerator request. Set it to "
        "false in an installation without Nova; no events are recorded then.",
    ),
    keystoneauth.TIMEOUT,
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section, including those of keystoneauth."""
    keystoneauth.register(conf, GROUP, "compute", OPTIONS)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return keystoneauth.list_opts(GROUP, OPTIONS)
