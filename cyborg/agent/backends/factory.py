# SPDX-License-Identifier: Apache-2.0
"""Creation of the drivers of this host's backends from the configuration or the desired state.

The section ``[agent]`` names the backends; each backend has its own section with the options that
its driver declares. Invalid values are rejected at the start of the agent, with the name of the
option. An agent that replays a captured host uses no device of the machine on which it runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oslo_config import cfg

from cyborg.agent.backends.backend import error_text
from cyborg.agent.backends.catalogue import NAMESPACE, DriverCatalogue, unknown_driver
from cyborg.agent.backends.device_sets import check_members
from cyborg.agent.backends.sections import (
    DRIVER,
    check_section_name,
    read_configured,
    read_sources,
)
from cyborg.agent.state_file import MemoryFile
from cyborg.core import errors, log
from cyborg.core.capture.model import parse_fault
from cyborg.core.drivers import desired_state
from cyborg.core.drivers.registry import DriverEntry, Option, Source, Support, list_settings
from cyborg.core.inventory.device import Device
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import ABILITY_INTERFACES, Driver, ImageStore, NoImageStore
from cyborg.drivers.device_sets.driver import DeviceSetDriver, ReadDevices, read_nothing_yet
from cyborg.drivers.device_sets.fabric import Fabric
from cyborg.drivers.host_use.domains import ReadDomains, read_nothing
from cyborg.drivers.replay.host import ReplayedHost
from cyborg.drivers.replay.recorder import load_capture

LOG = log.get_logger(__name__)


def open_replay(conf: cfg.ConfigOpts) -> ReplayedHost | None:
    """Return the host of ``[agent] replay``; None if the agent manages its own machine.

    Raise Misconfigured if the capture or the faults are invalid. Raise it also if external drivers
    are enabled, because they run in their own processes and use the devices of this machine.
    """
    options = conf.agent
    if not options.replay:
        if options.replay_faults:
            raise _misconfigured("replay_faults", "found faults without [agent] replay")
        return None
    if options.external_driver_dir or options.external_drivers:
        raise _misconfigured("external_driver_dir", "external drivers cannot be replayed")
    try:
        faults = [parse_fault(text) for text in options.replay_faults]
    except errors.Invalid as exc:
        raise _misconfigured("replay_faults", exc.message) from exc
    try:
        host = ReplayedHost(load_capture(Path(options.replay)), faults)
    except errors.Invalid as exc:
        raise _misconfigured("replay", exc.message) from exc
    except OSError as exc:
        raise _misconfigured("replay", f"{options.replay}: {exc.strerror or exc}") from exc
    LOG.warning(
        "This agent replays a capture, its devices exist in no machine: %s",
        host.capture.source,
        host=conf.host,
    )
    return host


def deny_host_work(conf: cfg.ConfigOpts) -> None:
    """Make the privileged Python functions of this process fail if its agent replays a capture.

    Simulated drivers do not call these functions; this is an additional protection.
    """
    if conf.agent.replay:
        # Imported here: other agents do not need oslo.privsep until they have host work.
        from cyborg.drivers import privileged

        privileged.deny_calls("this process replays a capture ([agent] replay)")


def _misconfigured(option: str, problem: str) -> errors.Misconfigured:
    return errors.Misconfigured(f"[agent] {option}: {problem}", option=f"agent.{option}")


__all__ = ["NAMESPACE", "DriverFactory", "load_drivers", "options_of"]


_KINDS: Mapping[str, Callable[..., cfg.Opt]] = {
    "str": cfg.StrOpt,
    "int": cfg.IntOpt,
    "float": cfg.FloatOpt,
    "bool": cfg.BoolOpt,
    "list": cfg.ListOpt,
    "multi": cfg.MultiStrOpt,
}


def load_drivers(conf: cfg.ConfigOpts, sysfs_root: str | Path = "/sys") -> list[Driver]:
    """Return the drivers in the configured order; ``driver.backend`` is the name of the backend.

    Raise Misconfigured.
    """
    return DriverFactory(conf, DriverCatalogue(), sysfs_root).load_all({})


# Function that creates the driver of a backend with its options.
CreateDriver = Callable[[type[Driver], str, Mapping[str, Any]], Driver]


class DriverFactory:
    """Factory of drivers for configured and desired backends."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        catalogue: DriverCatalogue,
        sysfs_root: str | Path = "/sys",
        images: ImageStore | None = None,
        create: CreateDriver | None = None,
        state_dir: Path | None = None,
        read_domains: ReadDomains = read_nothing,
        read_devices: ReadDevices = read_nothing_yet,
        fabric: Fabric | None = None,
    ) -> None:
        """Read the configured backends. Raise Misconfigured if they are invalid.

        The drivers use ``images``, and store their state below ``state_dir``. ``create`` creates
        the object of a driver class, for example for a replayed host; the default passes
        ``sysfs_root`` to the class. ``read_domains`` returns the devices of domains of libvirt,
        ``read_devices`` those of another backend. ``fabric`` is that of a replayed host; otherwise
        the sources of device sets use Fabric Manager.
        """
        self._images = NoImageStore() if images is None else images
        self._read_domains = read_domains
        self._read_devices = read_devices
        self._fabric = fabric
        self._sysfs_root = sysfs_root
        self._conf = conf
        self._catalogue = catalogue
        self._new_driver: CreateDriver = create or (
            lambda driver, backend, values: driver(backend, values, sysfs_root)
        )
        self._state_dir = state_dir or Path(conf.state_path, "agent")
        self._memory = MemoryFile(self._state_dir / f"memory-{conf.host}.json")
        self._configured = read_configured(conf)
        self._sources = read_sources(conf, self._configured)

    @property
    def configured_backends(self) -> list[str]:
        """Return the names of the configured backends, in the order of the configuration."""
        return list(self._configured)

    @property
    def own_names(self) -> list[str]:
        """Return the names of the configured backends and of the sources of device sets."""
        return [*self._configured, *self._sources]

    @property
    def entries(self) -> tuple[DriverEntry, ...]:
        """Return the installed drivers.

        A driver is ``installable`` if the API may add a backend of the driver.
        """
        return tuple(
            replace(entry, installable=self._is_allowed(entry.support))
            for entry in self._catalogue.entries
        )

    def load_all(self, records: Mapping[str, desired_state.BackendRecord]) -> list[Driver]:
        """Return the drivers at the start: the configured drivers, overridden by the records.

        A record of which nothing was applied changes nothing: the file decides. Raise
        Misconfigured for invalid configuration. A driver that cannot be imported or created
        is replaced by a FailedDriver, whose discoveries fail with the error. So it does not affect
        other drivers. The sources of device sets are the last ones.
        """
        drivers: list[Driver] = []
        for backend in [*self._configured, *sorted(set(records) - set(self._configured))]:
            applied = records[backend].applied if backend in records else None
            if applied is not None:
                # What ran last, not what the file says: an operator has changed it over the API
                # since.
                drivers += self._load_desired(applied)
            elif backend in self._configured:
                drivers.append(self._load_configured(backend))
        # Any error of a source stops the agent: without it, its members would be offered alone.
        sources = [self.from_source(name) for name in self._sources]
        check_members(sources, [*self._configured, *self._conf.agent.external_drivers])
        return [*drivers, *sources]

    def rescan(self) -> None:
        """Scan for newly installed drivers."""
        self._catalogue.scan()

    def check_code(self, backend: str, desired: desired_state.DesiredBackend | None) -> None:
        """Raise DriverFailed if the loaded code of a backend's driver is not the installed code.

        The configuration file names the driver of a backend without a desired state.
        """
        name = self._configured[backend].driver if desired is None else desired.driver
        self._catalogue.check_code(name)

    def from_config(self, backend: str) -> Driver:
        """Return the driver of a backend with its configured options.

        Raise Misconfigured, NotFound, DriverFailed, and any exception of the driver.
        """
        driver = self._catalogue.driver(self._configured[backend].driver)
        values, sources = self._read_section(driver, backend)
        return self._create(driver, backend, values, sources)

    def from_source(self, name: str) -> DeviceSetDriver:
        """Return a source of device sets with its configured options. Raise Misconfigured."""
        values, sources = self._read_section(DeviceSetDriver, name)
        # Not with ``_create``: a source needs no host work that a replay would have to simulate.
        driver = DeviceSetDriver(name, values, self._sysfs_root)
        self._complete(driver, name, values, sources)
        driver.read_devices = self._read_devices
        if self._conf.agent.replay:
            # The Fabric Manager of this machine has other GPUs.
            driver.fabric = self._fabric if driver.is_fabric else None
        return driver

    def from_desired(self, desired: desired_state.DesiredBackend) -> Driver:
        """Return the driver of a desired backend.

        Raise Misconfigured, Invalid, NotFound, DriverFailed, and any exception of the driver.
        """
        backend = desired.backend
        check_section_name(self._conf, backend, "backend")
        # The database has the devices by the name of their backend: two backends of one name would
        # delete each other's devices.
        if (option := self._owner_of(backend)) is not None:
            raise errors.Misconfigured(
                f"backend {backend}: [agent] {option} has that name; expected another name"
            )
        driver = self._catalogue.driver(desired.driver)
        # A reference driver has simulated devices. Only who can write the file of the host may
        # offer them to users.
        may_run = self._is_allowed(driver.SUPPORT_LEVEL)
        if not (may_run or self._is_in_file(backend, desired.driver)):
            raise errors.Misconfigured(
                f"backend {backend}: driver {desired.driver} is a reference driver; set "
                "[agent] allow_reference_drivers = true, or give the backend a section of its own, "
                "in this host's configuration file",
                option="agent.allow_reference_drivers",
            )
        section_values: dict[str, Any] = {}
        sources: dict[str, Source] = {}
        # A section of another driver has the options of that driver.
        if self._section_driver(backend) == desired.driver:
            section_values, sources = self._read_section(driver, backend)
        values = desired_state.merge_options(driver.OPTIONS, section_values, desired.config)
        sources |= dict.fromkeys(desired.config, Source.API)
        return self._create(driver, backend, values, sources)

    def removed_driver(
        self, backend: str, record: desired_state.BackendRecord | None
    ) -> Driver | None:
        """Return the driver of a removed backend with its last configuration; None if unknown.

        The configuration is that of the record. If this host has never run the backend with it, for
        example because the configuration file does not enable the backend any more, it is that of
        the backend's section, if the file still has one. Raise the same exceptions as
        ``from_desired``.
        """
        applied = None if record is None else record.applied
        if record is None or applied is None or record.never_ran:
            return self._from_section(backend)
        if applied.status is not desired_state.DesiredStatus.ABSENT:
            return None  # it was not removed: its own driver does the work
        return self.from_desired(applied)

    def _from_section(self, backend: str) -> Driver | None:
        """Return the driver of a backend with the options of its section; None without one.

        Default options are no substitute: a handle that is cleaned with other options than those of
        its backend may keep data.
        """
        # oslo.config finds a section in lower case.
        if backend.lower() not in {name.lower() for name in self._conf.list_all_sections()}:
            return None
        check_section_name(self._conf, backend, "backend")
        if self._is_source(backend):
            return self.from_source(backend)
        driver = self._catalogue.driver(self._section_driver(backend))
        values, sources = self._read_section(driver, backend)
        return self._create(driver, backend, values, sources)

    def _is_source(self, name: str) -> bool:
        """Return whether a section, also one that is not enabled, is a source of device sets."""
        self._conf.register_opts(DRIVER, group=name)
        if self._conf[name].driver or name in self._catalogue.names:
            return False
        self._conf.register_opts(options_of(DeviceSetDriver), group=name)
        return bool(self._conf[name].kind)

    def _load_configured(self, backend: str) -> Driver:
        """Return a configured driver, or one that reports why it cannot be created."""
        name, option = self._configured[backend]
        if name not in self._catalogue.names:
            exc = unknown_driver(name, self._catalogue.names)
            raise errors.Misconfigured(f"{option}: {exc.message}", **exc.details)
        try:
            return self.from_config(backend)
        except errors.Misconfigured:
            # A mistake in the file stops the agent; a driver that fails stops only its own backend.
            raise
        except BaseException as exc:  # a driver may end with sys.exit()
            LOG.debug("Failed to create backend", backend=backend, exc_info=True)
            text = "Failed to create backend, change its options or its driver: %s"
            return _log_failed(backend, name, text, exc)

    def _load_desired(self, applied: desired_state.DesiredBackend) -> list[Driver]:
        """Return the driver of a saved backend, none if it was removed or its name is taken."""
        if applied.status is desired_state.DesiredStatus.ABSENT:
            return []
        if (option := self._owner_of(applied.backend)) is not None:
            LOG.error(
                "Backend added over the API is ignored: [agent] %s has the same name",
                option,
                backend=applied.backend,
                driver=applied.driver,
            )
            return []
        try:
            return [self.from_desired(applied)]
        except BaseException as exc:  # a driver may end with sys.exit()
            LOG.debug("Failed to create backend", backend=applied.backend, exc_info=True)
            text = "Failed to create backend from saved state: %s"
            return [_log_failed(applied.backend, applied.driver, text, exc)]

    def _owner_of(self, backend: str) -> str | None:
        """Return the option that names a backend which the API cannot add, None for any other."""
        if backend in self._sources:
            return "device_sets"
        return "external_drivers" if backend in self._conf.agent.external_drivers else None

    def _is_allowed(self, support: Support) -> bool:
        """Return whether the API may add a backend of a driver with this support level."""
        return support is not Support.REFERENCE or bool(self._conf.agent.allow_reference_drivers)

    def _is_in_file(self, backend: str, driver: str) -> bool:
        """Return whether the configuration file has this backend with this driver."""
        if backend in self._configured:
            return self._configured[backend].driver == driver
        self._conf.register_opts(DRIVER, group=backend)
        return bool(self._conf[backend].driver == driver)

    def _section_driver(self, backend: str) -> str:
        """Return the driver of the backend's section, even if the backend is not enabled."""
        if backend in self._configured:
            return self._configured[backend].driver
        self._conf.register_opts(DRIVER, group=backend)
        return str(self._conf[backend].driver or backend)

    def _read_section(
        self, driver: type[Driver], backend: str
    ) -> tuple[dict[str, Any], dict[str, Source]]:
        """Return the values of a driver's options, and the sources of the values in the file.

        Options that are not in the file have their defaults. Raise Misconfigured.
        """
        # Only now: which options a section has follows from the driver that it names.
        self._conf.register_opts(options_of(driver), group=backend)
        values: dict[str, Any] = {}
        sources: dict[str, Source] = {}
        for option in driver.OPTIONS:
            try:
                values[option.name] = self._conf[backend][option.name]
            except ValueError as exc:
                # oslo.config converts a value when it is read, not when the option is registered.
                raise errors.Misconfigured(
                    f"[{backend}] {option.name}: {exc}; expected a value of type {option.kind}",
                    section=backend,
                    option=option.name,
                ) from exc
            location = self._conf.get_location(option.name, backend)
            # Without an entry here, an operator sees the default as the source of a value.
            if location is not None and location.location is not cfg.Locations.opt_default:
                sources[option.name] = Source.FILE
        return values, sources

    def _create(
        self,
        driver: type[Driver],
        backend: str,
        values: Mapping[str, Any],
        sources: Mapping[str, Source],
    ) -> Driver:
        instance = self._new_driver(driver, backend, values)
        self._complete(instance, backend, values, sources)
        return instance

    def _complete(
        self,
        instance: Driver,
        backend: str,
        values: Mapping[str, Any],
        sources: Mapping[str, Source],
    ) -> None:
        """Set the attributes of a new driver, and check it. Raise DriverFailed, Misconfigured."""
        # Not by the constructor, which the authors of drivers define.
        instance.settings = list_settings(instance.OPTIONS, values, sources)
        instance.host = str(self._conf.host)
        instance.images = self._images
        instance.read_domains = self._read_domains
        instance.memory = self._memory.of(instance.name)
        # The constructor of a driver may choose any name, under which reports would add a second
        # backend.
        if instance.backend != backend:
            raise errors.DriverFailed(
                f"the driver calls its backend {instance.backend!r:.100}, expected {backend!r}"
            )
        for ability in instance.abilities:
            if not isinstance(instance, ABILITY_INTERFACES[ability]):
                raise errors.Misconfigured(
                    f"[{backend}] driver: found {instance.name!r}, which has ability {ability} but "
                    f"not the methods of {ABILITY_INTERFACES[ability].__name__}; expected a "
                    "driver that has them",
                    section=backend,
                    option="driver",
                )


def options_of(driver: type[Driver]) -> list[cfg.Opt]:
    """Return a driver's options as oslo.config options."""
    return [_option(option) for option in driver.OPTIONS]


class FailedDriver(Driver):
    """Replacement for a driver that cannot be created."""

    version = "unknown"

    def __init__(self, backend: str, name: str, reason: str) -> None:
        super().__init__(backend, {})
        self.name = name  # type: ignore[misc]
        self._reason = reason

    def discover(self) -> Sequence[Device]:
        """Fail with the reason."""
        raise errors.DriverFailed(self._reason)

    def prepare(self, item: WorkItem, instance: str | None) -> None:
        """Fail with the reason."""
        raise errors.DriverFailed(self._reason)

    def release(self, item: WorkItem) -> None:
        """Fail with the reason: only the driver itself can clean a handle."""
        raise errors.DriverFailed(self._reason)


def _log_failed(backend: str, driver: str, text: str, exc: BaseException) -> FailedDriver:
    """Log why a driver cannot be created; return its replacement."""
    error = error_text(exc)
    LOG.error(text, error, backend=backend, driver=driver)
    return FailedDriver(backend, driver, error)


def _option(option: Option) -> cfg.Opt:
    default = list(option.default) if option.kind in ("list", "multi") else option.default
    return _KINDS[option.kind](option.name, default=default, help=option.help, secret=option.secret)
