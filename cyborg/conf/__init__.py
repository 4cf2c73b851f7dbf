# SPDX-License-Identifier: Apache-2.0
"""Option groups, one file each: ``register(conf)`` adds them to a ConfigOpts; nothing is global."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from oslo_config import cfg

from cyborg.conf import agent, api, conductor, database, default, nova, placement, rpc, standalone
from cyborg.core.errors import Misconfigured

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


def check(conf: cfg.ConfigOpts) -> None:
    """Read every option once, so that a wrong value stops a daemon at its start.

    oslo.config looks at a value when it is asked for, which may be days later. Raises
    Misconfigured, which says which option, what was found and what is expected.
    """
    for name in conf:
        value = _read(conf, name, f"[DEFAULT] {name}")
        if isinstance(value, cfg.ConfigOpts.GroupAttr):
            for option in value:
                _read(value, option, f"[{name}] {option}")


def _read(section: Mapping[str, Any], name: str, shown: str) -> Any:
    try:
        return section[name]
    except cfg.Error as bad:
        raise Misconfigured(f"{shown}: {' '.join(str(bad).split())}", option=shown) from bad
