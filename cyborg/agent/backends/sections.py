# SPDX-License-Identifier: Apache-2.0
"""Sections of the configuration with the options of backends, and the options that name them."""

import re
from collections.abc import Collection
from typing import NamedTuple

from oslo_config import cfg

from cyborg.core import errors

DRIVER = [cfg.StrOpt("driver", help="The entry point of the backend's driver.")]
# Names of sources of device sets: the addresses of the sets begin with them.
_SOURCE = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
# Sections that belong to the service or to its libraries.
_RESERVED_SECTIONS = frozenset(
    {
        *("agent", "api", "conductor", "database", "default", "glance", "nova", "placement"),
        *("rpc", "standalone"),
        *("barbican", "key_manager"),  # of castellan
    }
)


class Configured(NamedTuple):
    """The name of the driver of a configured backend, and the option that names the driver."""

    driver: str
    option: str


def read_configured(conf: cfg.ConfigOpts) -> dict[str, Configured]:
    """Return the configured backends by name. Raise Misconfigured."""
    backends: dict[str, Configured] = {}
    for option in ("enabled_backends", "enabled_drivers"):
        for backend in conf.agent[option]:
            check_section_name(conf, backend, f"[agent] {option}")
            if backend in backends:
                raise errors.Misconfigured(
                    f"[agent] {option}: found {backend!r} twice; expected each backend once"
                )
            if option == "enabled_drivers":
                # The name of such a backend is that of its driver.
                backends[backend] = Configured(backend, f"[agent] {option}")
                continue
            conf.register_opts(DRIVER, group=backend)
            if not conf[backend].driver:
                raise errors.Misconfigured(
                    f"[{backend}] driver: found nothing; expected the driver of the backend that "
                    f"[agent] {option} names"
                )
            backends[backend] = Configured(conf[backend].driver, f"[{backend}] driver")
    return backends


def read_sources(conf: cfg.ConfigOpts, backends: Collection[str]) -> list[str]:
    """Return the names of the sources of device sets. Raise Misconfigured."""
    names: list[str] = []
    for name in conf.agent.device_sets:
        check_section_name(conf, name, "[agent] device_sets")
        if name in backends or name in names or not _SOURCE.fullmatch(name):
            raise errors.Misconfigured(
                f"[agent] device_sets: found {name!r}; expected names of sections of a-z, 0-9, _ "
                "and -, at most 40 characters, each once and no name of a backend"
            )
        names.append(name)
    return names


def check_section_name(conf: cfg.ConfigOpts, backend: str, option: str) -> None:
    """Raise Misconfigured, with the option, for a section of the service or of a library.

    Raise it also for an empty name.
    """
    section = backend.lower()  # sections are found in lower case
    if section in _RESERVED_SECTIONS or section.startswith(("oslo_", "keystone_")) or not backend:
        raise errors.Misconfigured(
            f"{option}: found {backend!r}, which is a section of the service itself; "
            "expected another name"
        )
    # In oslo.config a section hides an option of the same name.
    if backend in conf and not isinstance(conf[backend], cfg.ConfigOpts.GroupAttr):
        raise errors.Misconfigured(
            f"{option}: found {backend!r}, which is an option of the service itself; "
            "expected another name"
        )
