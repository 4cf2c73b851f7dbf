# SPDX-License-Identifier: Apache-2.0
"""From the configuration to drivers: which backends this host has, and what each is told.

The agent's section names the backends; each has a section of its own with the options that its
driver declares. What cannot be right is refused at the start, with the option's name.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oslo_config import cfg

from cyborg.agent.backend import words
from cyborg.agent.catalogue import NAMESPACE, Catalogue, unknown
from cyborg.core.convergence import Held, effective
from cyborg.core.device import Device
from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.core.job import Item
from cyborg.core.wanted import Wanted, Wish
from cyborg.drivers.base import NEEDED, Driver, Option

__all__ = ["NAMESPACE", "Builder", "load", "options_of"]

LOG = logging.getLogger(__name__)

_KINDS: Mapping[str, Callable[..., cfg.Opt]] = {
    "str": cfg.StrOpt,
    "int": cfg.IntOpt,
    "float": cfg.FloatOpt,
    "bool": cfg.BoolOpt,
    "list": cfg.ListOpt,
    "multi": cfg.MultiStrOpt,
}
_DRIVER = [cfg.StrOpt("driver", help="The entry point of the backend's driver.")]
# Sections that belong to the service or to its libraries.
_TAKEN = frozenset(
    {"agent", "api", "conductor", "database", "default", "nova", "placement", "rpc", "standalone"}
)


def load(conf: cfg.ConfigOpts, sysfs_root: str | Path = "/sys") -> list[Driver]:
    """Return the configured drivers in their order; ``driver.backend`` is the backend's name.

    Raises Misconfigured.
    """
    return Builder(conf, Catalogue(), sysfs_root).restore({})


class Builder:
    """Makes drivers for backends: as the configuration has them, or as is wanted beyond that."""

    def __init__(
        self, conf: cfg.ConfigOpts, catalogue: Catalogue, sysfs_root: str | Path = "/sys"
    ) -> None:
        """Raises Misconfigured for backends that cannot be."""
        self._conf = conf
        self._catalogue = catalogue
        self._sysfs_root = sysfs_root
        self._wanted = _wanted(conf)

    @property
    def configured(self) -> list[str]:
        """Return the backends of the configuration, in their order."""
        return list(self._wanted)

    def restore(self, held: Mapping[str, Held]) -> list[Driver]:
        """Return the drivers to begin with: those configured, over them what is held.

        What stands in the configuration and cannot be right is refused: raises Misconfigured. A
        driver whose code cannot be imported, or fails, is there all the same and fails each
        discovery, as is one that an operator wanted and that cannot be made: one sick driver takes
        nothing from the others.
        """
        drivers: list[Driver] = []
        for backend in [*self._wanted, *sorted(set(held) - set(self._wanted))]:
            applied = held[backend].applied if backend in held else None
            if applied is not None:
                drivers += self._restored(applied)
            elif backend in self._wanted:
                drivers.append(self._configured(backend))
        return drivers

    def look_again(self) -> None:
        """Find drivers that have been installed since."""
        self._catalogue.scan()

    def make(self, backend: str) -> Driver:
        """Return the driver of a backend as it is configured.

        Raises Misconfigured, NotFound, DriverFailed, and what the driver raises.
        """
        driver = self._catalogue.driver(self._wanted[backend][0])
        return self._make(driver, backend, self._section(driver, backend))

    def build(self, wanted: Wanted) -> Driver:
        """Return the driver of a backend as it is wanted.

        Raises Misconfigured, Invalid, NotFound, DriverFailed, and what the driver raises.
        """
        backend = wanted.backend
        _check(self._conf, backend, "backend")
        if backend in self._conf.agent.socket_drivers:
            raise Misconfigured(
                f"backend {backend}: a driver in a process of its own has that name; expected "
                "another one"
            )
        driver = self._catalogue.driver(wanted.driver)
        section: dict[str, Any] = {}
        if self._section_driver(backend) == wanted.driver:
            section = self._section(driver, backend)
        return self._make(driver, backend, effective(driver.OPTIONS, section, wanted.config))

    def retired(self, held: Held | None) -> Driver | None:
        """Return the driver of a backend that was given up, as it was; None for any other.

        Raises what ``build`` raises.
        """
        applied = None if held is None else held.applied
        return self.build(applied) if applied and applied.wish is Wish.ABSENT else None

    def _configured(self, backend: str) -> Driver:
        name, option = self._wanted[backend]
        if name not in self._catalogue.names:
            bad = unknown(name, self._catalogue.names)
            raise Misconfigured(f"{option}: {bad.message}", **bad.details)
        try:
            return self.make(backend)
        except Misconfigured:
            raise
        except BaseException as bad:  # a driver may end with sys.exit()
            LOG.debug("Backend %s cannot be made", backend, exc_info=True)
            LOG.error("Backend %s cannot be made: %s", backend, words(bad))
            return _Unloadable(backend, name, words(bad))

    def _restored(self, applied: Wanted) -> list[Driver]:
        if applied.wish is Wish.ABSENT:
            return []
        if applied.backend in self._conf.agent.socket_drivers:
            LOG.error("Backend %s is left out: [agent] socket_drivers has it", applied.backend)
            return []
        try:
            return [self.build(applied)]
        except BaseException as bad:  # a driver may end with sys.exit()
            LOG.debug("Backend %s cannot be made", applied.backend, exc_info=True)
            LOG.error("Backend %s cannot be made as it was: %s", applied.backend, words(bad))
            return [_Unloadable(applied.backend, applied.driver, words(bad))]

    def _section_driver(self, backend: str) -> str:
        """Return the driver that the backend's section is for, configured to run or not."""
        if backend in self._wanted:
            return self._wanted[backend][0]
        self._conf.register_opts(_DRIVER, group=backend)
        return str(self._conf[backend].driver or backend)

    def _section(self, driver: type[Driver], backend: str) -> dict[str, Any]:
        """Return the file's word on a driver's options, or their defaults. Raises Misconfigured."""
        self._conf.register_opts(options_of(driver), group=backend)
        values: dict[str, Any] = {}
        for option in driver.OPTIONS:
            try:
                values[option.name] = self._conf[backend][option.name]
            except ValueError as bad:
                raise Misconfigured(
                    f"[{backend}] {option.name}: {bad}; expected a value of type {option.kind}",
                    section=backend,
                    option=option.name,
                ) from bad
        return values

    def _make(self, driver: type[Driver], backend: str, values: Mapping[str, Any]) -> Driver:
        made = driver(backend, values, self._sysfs_root)
        if made.backend != backend:
            raise DriverFailed(f"the driver calls its backend {made.backend!r:.100}")
        for ability in made.abilities:
            if not isinstance(made, NEEDED[ability]):
                raise Misconfigured(
                    f"[{backend}] driver: found {driver.name!r}, which says that it {ability} but "
                    f"has not the methods of {NEEDED[ability].__name__}; expected a driver that "
                    "has them",
                    section=backend,
                    option="driver",
                )
        return made


def options_of(driver: type[Driver]) -> list[cfg.Opt]:
    """Return a driver's options as oslo.config's."""
    return [_option(option) for option in driver.OPTIONS]


class _Unloadable(Driver):
    """Stands in for a driver that cannot be made."""

    version = "unknown"

    def __init__(self, backend: str, name: str, reason: str) -> None:
        super().__init__(backend, {})
        self.name = name  # type: ignore[misc]
        self._reason = reason

    def discover(self) -> Sequence[Device]:
        """Fail with the reason."""
        raise DriverFailed(self._reason)

    def prepare(self, item: Item, instance: str | None) -> None:
        """Fail with the reason."""
        raise DriverFailed(self._reason)

    def release(self, item: Item) -> None:
        """Fail with the reason: a handle is free only when the driver itself has cleaned it."""
        raise DriverFailed(self._reason)


def _wanted(conf: cfg.ConfigOpts) -> dict[str, tuple[str, str]]:
    """Return backend -> (driver, the option that named the driver)."""
    wanted: dict[str, tuple[str, str]] = {}
    for option in ("enabled_backends", "enabled_drivers"):
        for backend in conf.agent[option]:
            _check(conf, backend, f"[agent] {option}")
            if backend in wanted:
                raise Misconfigured(
                    f"[agent] {option}: found {backend!r} twice; expected each backend once"
                )
            if option == "enabled_drivers":
                wanted[backend] = (backend, f"[agent] {option}")
                continue
            conf.register_opts(_DRIVER, group=backend)
            if not conf[backend].driver:
                raise Misconfigured(
                    f"[{backend}] driver: found nothing; expected the driver of the backend that "
                    f"[agent] {option} names"
                )
            wanted[backend] = (conf[backend].driver, f"[{backend}] driver")
    return wanted


def _check(conf: cfg.ConfigOpts, backend: str, where: str) -> None:
    section = backend.lower()  # as the file's sections are found
    if section in _TAKEN or section.startswith(("oslo_", "keystone_")) or not backend:
        raise Misconfigured(
            f"{where}: found {backend!r}, which is a section of the service; "
            "expected names of sections of their own"
        )
    # To oslo.config a section hides the option of its name.
    if backend in conf and not isinstance(conf[backend], cfg.ConfigOpts.GroupAttr):
        raise Misconfigured(
            f"{where}: found {backend!r}, which is an option of the service; "
            "expected a name of the section's own"
        )


def _option(option: Option) -> cfg.Opt:
    default = list(option.default) if option.kind in ("list", "multi") else option.default
    return _KINDS[option.kind](option.name, default=default, help=option.help)
