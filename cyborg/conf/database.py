# SPDX-License-Identifier: Apache-2.0
"""Options of the database: those of oslo.db, as every OpenStack service has them."""

from typing import Any

from oslo_config import cfg
from oslo_db import options

GROUP = "database"


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(options.database_opts, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [(GROUP, list(options.database_opts))]
