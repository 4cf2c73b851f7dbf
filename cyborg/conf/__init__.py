# SPDX-License-Identifier: Apache-2.0
"""The sections of the configuration: ``register(conf)`` adds them to a ConfigOpts."""

from collections.abc import Mapping, Sequence
from typing import Any

from oslo_config import cfg

from cyborg.conf.agent import AGENT, LIBVIRT
from cyborg.conf.api import API
from cyborg.conf.clients import GLANCE, NOVA, PLACEMENT
from cyborg.conf.conductor import CONDUCTOR
from cyborg.conf.projects import ATTACHMENTS, DEVICE_CONTEXTS, QUOTA
from cyborg.conf.sections import Section
from cyborg.conf.service import DATABASE, DEFAULT, RPC, STANDALONE, TRACING
from cyborg.core.errors import Misconfigured

GROUPS: tuple[Section, ...] = (
    DEFAULT,
    AGENT,
    API,
    ATTACHMENTS,
    CONDUCTOR,
    DATABASE,
    DEVICE_CONTEXTS,
    GLANCE,
    LIBVIRT,
    NOVA,
    PLACEMENT,
    QUOTA,
    RPC,
    STANDALONE,
    TRACING,
)


# A service registers only what it reads, because some groups need libraries of their own: an agent
# has none for the DATABASE, Placement and Nova.
AGENT_GROUPS: tuple[Section, ...] = (DEFAULT, AGENT, CONDUCTOR, GLANCE, LIBVIRT, RPC, TRACING)
API_GROUPS: tuple[Section, ...] = (DEFAULT, API, CONDUCTOR, DATABASE, RPC, TRACING)
CONDUCTOR_GROUPS: tuple[Section, ...] = (
    DEFAULT,
    AGENT,
    ATTACHMENTS,
    CONDUCTOR,
    DATABASE,
    DEVICE_CONTEXTS,
    NOVA,
    PLACEMENT,
    QUOTA,
    RPC,
    TRACING,
)
DBSYNC_GROUPS: tuple[Section, ...] = (DEFAULT, CONDUCTOR, DATABASE)
STATUS_GROUPS: tuple[Section, ...] = (DEFAULT, API, CONDUCTOR, DATABASE, PLACEMENT)


def register(conf: cfg.ConfigOpts, groups: Sequence[Section] = GROUPS) -> None:
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
