# SPDX-License-Identifier: Apache-2.0
"""Options of attachments."""

from typing import Any

from oslo_config import cfg

GROUP = "attachments"
OPTIONS = [
    cfg.IntOpt(
        "max_per_project",
        default=1000,
        min=-1,
        help="Maximum number of attachments of one project, in any state; further ones are "
        "rejected with 403, also if an administrator requests them. Their accelerator requests "
        "also count for the limits of [quota]. Concurrent calls cannot exceed the limit. -1 "
        "disables the limit.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [(GROUP, OPTIONS)]
