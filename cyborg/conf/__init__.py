# SPDX-License-Identifier: Apache-2.0
"""Option groups, one file each: ``register(conf)`` adds them to a ConfigOpts; nothing is global."""

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


def register(conf: cfg.ConfigOpts) -> None:
    """Register every option group of this project."""
    for group in GROUPS:
        group.register(conf)
