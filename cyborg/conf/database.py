# SPDX-License-Identifier: Apache-2.0
"""Options of the database, as oslo.db defines them."""

from typing import Any

from oslo_config import cfg

GROUP = "database"
POOL = 32
"""Connections in the pool of a process: half of the concurrent calls of oslo.messaging."""
OVERFLOW = 8
"""Connections beyond those of the pool, which are closed after use."""


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    from oslo_db import options  # imported here, because the agent does not need it

    conf.register_opts(options.database_opts, group=GROUP)
    # With oslo.db's default of 5, a conductor with 64 concurrent calls would open and close
    # connections all the time. The pool opens a connection only when it is needed. With the 50 of
    # oslo.db beyond that, two conductors under load could exceed the 151 connections that MariaDB
    # accepts by default, and calls would fail that only have to wait for a few milliseconds.
    options.set_defaults(conf, max_pool_size=POOL, max_overflow=OVERFLOW)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    from oslo_db import options

    return [(GROUP, list(options.database_opts))]
