# SPDX-License-Identifier: Apache-2.0
"""Option groups, one file each: ``register(conf)`` adds them to a ConfigOpts; nothing is global."""

from collections.abc import Sequence
from types import ModuleType

from oslo_config import cfg

from cyborg.conf import agent, api, conductor, database, default, nova, placement, rpc, standalone

GROUPS: tuple[ModuleType, ...] = (
    default,
    agent,
    api,
    conductor,
    database,
    nova,
    placement,
    rpc,
    standalone,
)


# The agent does without a database, Placement and Nova, and without the libraries for these.
AGENT_GROUPS: tuple[ModuleType, ...] = (default, agent, conductor, rpc)


def register(conf: cfg.ConfigOpts, groups: Sequence[ModuleType] = GROUPS) -> None:
    """Register option groups, by default every one of this project."""
    for group in groups:
        group.register(conf)
