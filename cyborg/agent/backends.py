# SPDX-License-Identifier: Apache-2.0
"""From the configuration to drivers: which backends this host has, and what each is told.

The agent's section names the backends; each has a section of its own with the options that its
driver declares. What cannot be right is refused at the start, with the option's name.
"""

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import stevedore
from oslo_config import cfg

from cyborg.core.device import Device
from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.drivers.base import NEEDED, Driver, Option

LOG = logging.getLogger(__name__)

NAMESPACE = "cyborg.accelerator.driver"
_KINDS: Mapping[str, Callable[..., cfg.Opt]] = {
    "str": cfg.StrOpt,
    "int": cfg.IntOpt,
    "float": cfg.FloatOpt,
    "bool": cfg.BoolOpt,
    "list": cfg.ListOpt,
    "multi": cfg.MultiStrOpt,
}
# Sections that belong to the service or to its libraries.
_TAKEN = frozenset(
    {"DEFAULT", "agent", "api", "conductor", "database", "nova", "placement", "rpc", "standalone"}
)


def load(conf: cfg.ConfigOpts, sysfs_root: str | Path = "/sys") -> list[Driver]:
    """Return the configured drivers in their order; ``driver.backend`` is the backend's name.

    A driver whose code cannot be imported is there all the same, and fails each discovery: one
    sick driver takes nothing from the others. Raises Misconfigured.
    """
    wanted = _wanted(conf)
    failures: dict[str, str] = {}

    def failed(_: Any, entry_point: Any, error: BaseException) -> None:
        failures[entry_point.name] = f"{type(error).__name__}: {error}"

    manager = stevedore.NamedExtensionManager(
        NAMESPACE,
        names=sorted({driver for driver, _ in wanted.values()}),
        on_load_failure_callback=failed,
        # What is missing is told below, with the names that there are.
        on_missing_entrypoints_callback=lambda _: None,
    )
    classes = {extension.name: extension.plugin for extension in manager}
    known = sorted(set(manager.entry_points_names()))
    drivers: list[Driver] = []
    for backend, (name, option) in wanted.items():
        if name in classes:
            drivers.append(_make(conf, classes[name], backend, sysfs_root))
        elif name in failures:
            LOG.error("Driver %s cannot be loaded: %s", name, failures[name])
            drivers.append(_Unloadable(backend, name, failures[name]))
        else:
            raise _unknown(option, name, known)
    return drivers


def options_of(driver: type[Driver]) -> list[cfg.Opt]:
    """Return a driver's options as oslo.config's."""
    return [_option(option) for option in driver.OPTIONS]


class _Unloadable(Driver):
    """Stands in for a driver whose code cannot be imported."""

    version = "unknown"

    def __init__(self, backend: str, name: str, reason: str) -> None:
        super().__init__(backend, {})
        self.name = name  # type: ignore[misc]
        self._reason = reason

    def discover(self) -> Sequence[Device]:
        """Fail with what the import said."""
        raise DriverFailed(f"driver {self.name} cannot be loaded: {self._reason}")


def _wanted(conf: cfg.ConfigOpts) -> dict[str, tuple[str, str]]:
    """Return backend -> (driver, the option that named the driver)."""
    wanted: dict[str, tuple[str, str]] = {}
    for option in ("enabled_backends", "enabled_drivers"):
        for backend in conf.agent[option]:
            if backend in _TAKEN or backend.startswith(("oslo_", "keystone_")) or not backend:
                raise Misconfigured(
                    f"[agent] {option}: found {backend!r}, which is a section of the service; "
                    "expected names of sections of their own"
                )
            if backend in wanted:
                raise Misconfigured(
                    f"[agent] {option}: found {backend!r} twice; expected each backend once"
                )
            if option == "enabled_drivers":
                wanted[backend] = (backend, f"[agent] {option}")
                continue
            conf.register_opts(
                [cfg.StrOpt("driver", help="The entry point of the backend's driver.")],
                group=backend,
            )
            if not conf[backend].driver:
                raise Misconfigured(
                    f"[{backend}] driver: found nothing; expected the driver of the backend that "
                    f"[agent] {option} names"
                )
            wanted[backend] = (conf[backend].driver, f"[{backend}] driver")
    return wanted


def _make(
    conf: cfg.ConfigOpts, driver: type[Driver], backend: str, sysfs_root: str | Path
) -> Driver:
    conf.register_opts(options_of(driver), group=backend)
    values: dict[str, Any] = {}
    for option in driver.OPTIONS:
        try:
            values[option.name] = conf[backend][option.name]
        except ValueError as bad:
            raise Misconfigured(
                f"[{backend}] {option.name}: {bad}; expected a value of type {option.kind}",
                section=backend,
                option=option.name,
            ) from bad
    made = driver(backend, values, sysfs_root)
    for ability in made.abilities:
        if not isinstance(made, NEEDED[ability]):
            raise Misconfigured(
                f"[{backend}] driver: found {driver.name!r}, which says that it {ability} but has "
                f"not the methods of {NEEDED[ability].__name__}; expected a driver that has them",
                section=backend,
                option="driver",
            )
    return made


def _option(option: Option) -> cfg.Opt:
    default = list(option.default) if option.kind in ("list", "multi") else option.default
    return _KINDS[option.kind](option.name, default=default, help=option.help)


def _unknown(option: str, name: str, known: Sequence[str]) -> Misconfigured:
    near = difflib.get_close_matches(name, known, n=3)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    return Misconfigured(
        f"{option}: found {name!r}{hint}; expected one of the drivers of {NAMESPACE}: "
        f"{', '.join(known) or 'none is installed'}",
        found=name,
        near=near,
        known=list(known),
    )
