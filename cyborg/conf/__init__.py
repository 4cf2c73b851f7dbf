# SPDX-License-Identifier: Apache-2.0
"""Option groups, one module each: ``register(conf)`` adds them to a ConfigOpts; none is global."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from oslo_config import cfg

from cyborg.conf import (
    agent,
    api,
    attachments,
    conductor,
    database,
    default,
    device_contexts,
    glance,
    libvirt,
    nova,
    placement,
    quota,
    rpc,
    standalone,
    tracing,
)
from cyborg.core.errors import Misconfigured

GROUPS: tuple[ModuleType, ...] = (
    default,
    agent,
    api,
    attachments,
    conductor,
    database,
    device_contexts,
    glance,
    libvirt,
    nova,
    placement,
    quota,
    rpc,
    standalone,
    tracing,
)


# A service registers only what it reads, because some groups need libraries of their own: an agent
# has none for the database, Placement and Nova.
AGENT_GROUPS: tuple[ModuleType, ...] = (
    default,
    agent,
    conductor,
    glance,
    libvirt,
    rpc,
    tracing,
)
API_GROUPS: tuple[ModuleType, ...] = (default, api, conductor, database, rpc, tracing)
CONDUCTOR_GROUPS: tuple[ModuleType, ...] = (
    default,
    agent,
    attachments,
    conductor,
    database,
    device_contexts,
    nova,
    placement,
    quota,
    rpc,
    tracing,
)
DBSYNC_GROUPS: tuple[ModuleType, ...] = (default, conductor, database)
STATUS_GROUPS: tuple[ModuleType, ...] = (default, api, conductor, database, placement)


def register(conf: cfg.ConfigOpts, groups: Sequence[ModuleType] = GROUPS) -> None:
    """Register option groups, by default all groups of this project."""
    for group in groups:
        group.register(conf)


def check(conf: cfg.ConfigOpts) -> None:
    """Read every option once, so that a daemon with an invalid value does not start.

    oslo.config validates a value only on access, which may be days later. Raise Misconfigured with
    the option, the value and the expected values.
    """
    for name in conf:
        value = _read(conf, name, f"[DEFAULT] {name}")
        if isinstance(value, cfg.ConfigOpts.GroupAttr):
            for option in value:
                _read(value, option, f"[{name}] {option}")


def _read(section: Mapping[str, Any], name: str, option: str) -> Any:
    try:
        return section[name]
    except cfg.Error as exc:
        raise Misconfigured(f"{option}: {' '.join(str(exc).split())}", option=option) from exc
