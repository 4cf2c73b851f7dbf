# SPDX-License-Identifier: Apache-2.0
"""Options of the API."""

from typing import Any

from oslo_config import cfg

GROUP = "api"
OPTIONS = [
    cfg.StrOpt(
        "public_endpoint",
        help="The URL that links start with, when the request's own host and mount are not what "
        "clients should see.",
    ),
    cfg.IntOpt(
        "max_limit",
        default=1000,
        min=1,
        help="The most rows that one page of a collection holds when the client asks for pages.",
    ),
    cfg.IntOpt(
        "max_body_size",
        default=1048576,
        min=1024,
        help="The most bytes of a request body.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [(GROUP, OPTIONS)]
