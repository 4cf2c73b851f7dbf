# SPDX-License-Identifier: Apache-2.0
"""Options of the database: those of oslo.db, as every OpenStack service has them."""

from typing import Any

from oslo_config import cfg

GROUP = "database"
POOL = 32
"""Connections that a process keeps: half of the calls that oslo.messaging answers at once."""


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    from oslo_db import options  # here, because the agent does without

    conf.register_opts(options.database_opts, group=GROUP)
    # Of oslo.db's own 5, a conductor that answers 64 calls at once would open and close connections
    # all the time; one that is not needed is never opened.
    options.set_defaults(conf, max_pool_size=POOL)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    from oslo_db import options

    return [(GROUP, list(options.database_opts))]
