# SPDX-License-Identifier: Apache-2.0
"""The sections of the configuration: ``register(conf)`` adds them to a ConfigOpts."""

from collections.abc import Mapping, Sequence
from typing import Any

from oslo_config import cfg

from cyborg.conf import options
from cyborg.core.errors import Misconfigured

GROUPS: tuple[options.Section, ...] = (
    options.DEFAULT,
    options.AGENT,
    options.API,
    options.ATTACHMENTS,
    options.CONDUCTOR,
    options.DATABASE,
    options.DEVICE_CONTEXTS,
    options.GLANCE,
    options.LIBVIRT,
    options.NOVA,
    options.PLACEMENT,
    options.QUOTA,
    options.RPC,
    options.STANDALONE,
    options.TRACING,
    options.UPGRADE_LEVELS,
)


# A service registers only what it reads, because some groups need libraries of their own: an agent
# has none for the database, Placement and Nova.
AGENT_GROUPS: tuple[options.Section, ...] = (
    options.DEFAULT,
    options.AGENT,
    options.CONDUCTOR,
    options.GLANCE,
    options.LIBVIRT,
    options.RPC,
    options.TRACING,
    options.UPGRADE_LEVELS,
)
API_GROUPS: tuple[options.Section, ...] = (
    options.DEFAULT,
    options.API,
    options.CONDUCTOR,
    options.DATABASE,
    options.RPC,
    options.TRACING,
    options.UPGRADE_LEVELS,
)
CONDUCTOR_GROUPS: tuple[options.Section, ...] = (
    options.DEFAULT,
    options.AGENT,
    options.ATTACHMENTS,
    options.CONDUCTOR,
    options.DATABASE,
    options.DEVICE_CONTEXTS,
    options.NOVA,
    options.PLACEMENT,
    options.QUOTA,
    options.RPC,
    options.TRACING,
    options.UPGRADE_LEVELS,
)
DBSYNC_GROUPS: tuple[options.Section, ...] = (options.DEFAULT, options.CONDUCTOR, options.DATABASE)
STATUS_GROUPS: tuple[options.Section, ...] = (
    options.DEFAULT,
    options.API,
    options.CONDUCTOR,
    options.DATABASE,
    options.PLACEMENT,
    options.UPGRADE_LEVELS,
)


def register(conf: cfg.ConfigOpts, groups: Sequence[options.Section] = GROUPS) -> None:
    """Register option groups, by default all groups of this project."""
    for group in groups:
        group.register(conf)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return all options, by section: the entry point of oslo.config.opts."""
    return [listed for group in GROUPS for listed in group.list_opts()]


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
