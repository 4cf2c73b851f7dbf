# SPDX-License-Identifier: Apache-2.0
"""Options of the database: those of oslo.db, as every OpenStack service has them."""

from typing import Any

from oslo_config import cfg

GROUP = "database"


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    from oslo_db import options  # here, because the agent does without

    conf.register_opts(options.database_opts, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    from oslo_db import options

    return [(GROUP, list(options.database_opts))]
