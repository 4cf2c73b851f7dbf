# SPDX-License-Identifier: Apache-2.0
"""Installed drivers of this host: the entry points and the metadata of their classes.

A driver that cannot be imported does not affect the others; its error is reported to the conductor.
Python keeps a module that it has imported. So after an upgrade of a driver's package, a new backend
would run the old code, or old modules together with new ones: the loaded code is compared with the
code that is installed now.
"""

import difflib
import hashlib
import importlib
import json
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from cyborg.agent.backends.backend import error_text
from cyborg.core import errors, log
from cyborg.core.drivers import registry
from cyborg.drivers.base import ABILITY_INTERFACES, Driver

LOG = log.get_logger(__name__)


class _LoadedModule(NamedTuple):
    module: ModuleType
    digest: bytes | None  # the SHA-256 of its file


class LoadedCode:
    """Versions and files of the loaded drivers. Not thread-safe.

    The files of a driver are those of the modules in the package that has the driver's module.
    """

    def __init__(self) -> None:
        self._versions: dict[str, str | None] = {}  # of the distribution, by driver
        self._modules: dict[str, _LoadedModule] = {}  # by name

    def record(self, point: EntryPoint, *, loaded: bool) -> None:
        """Record the modules that the import of a driver has left, also if the import failed.

        ``loaded`` is whether it succeeded.
        """
        if loaded and point.name not in self._versions:
            self._versions[point.name] = _version(point)
        for name, module in _modules(point).items():
            # The digest is that of the first import: a file that changes later must be noticed.
            if name not in self._modules or self._modules[name].module is not module:
                self._modules[name] = _LoadedModule(module, _digest(module))

    def find_change(self, point: EntryPoint) -> str | None:
        """Return how the installed code of a driver differs from the loaded code, None if equal."""
        installed = _version(point)
        loaded = self._versions.get(point.name, installed)
        if loaded != installed:
            return f"version {installed} of its package is installed, version {loaded} is loaded"
        for name, module in _modules(point).items():
            recorded = self._modules.get(name)
            if recorded is not None and recorded != _LoadedModule(module, _digest(module)):
                return f"the installed file {module.__file__} differs from the loaded code"
        return None


def _version(point: EntryPoint) -> str | None:
    try:
        return None if point.dist is None else point.dist.version
    except (KeyError, OSError, ValueError):  # damaged metadata
        return None


def _modules(point: EntryPoint) -> dict[str, ModuleType]:
    """Return the imported modules of the package that has the module of an entry point."""
    package = point.module.rpartition(".")[0] or point.module
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name == package or name.startswith(f"{package}.")
    }


def _digest(module: ModuleType) -> bytes | None:
    """Return the SHA-256 of a module's file, None without one."""
    path = getattr(module, "__file__", None)
    if path is None:
        return None
    try:
        # The content, not the time of the file: package managers restore times, and a
        # reinstallation of the same version must not look like a change.
        return hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError:
        return None


NAMESPACE = "cyborg.accelerator.driver"

# A report has the metadata of all drivers, and its size has a limit.
MAX_ENTRY_BYTES = 32 * 1024  # of the metadata of one driver, as JSON
IMPORT_TIMEOUT = 60.0  # seconds


class _Installed(NamedTuple):
    """An installed driver; ``driver`` is None if it cannot be loaded."""

    entry: registry.DriverEntry
    driver: type[Driver] | None


class DriverCatalogue:
    """Catalogue of the drivers that the last scan found. Thread-safe, also during a scan."""

    def __init__(self, import_timeout: float = IMPORT_TIMEOUT) -> None:
        """``import_timeout`` limits the import of each driver, in seconds."""
        self._import_timeout = import_timeout
        self._lock = threading.Lock()  # of a scan
        self._drivers: dict[str, _Installed] = {}
        self._pending_imports: dict[EntryPoint, _Import] = {}  # unfinished at the last scan
        self._scan_count = 0  # drivers that the last scan found
        self._code = LoadedCode()
        self._changes: dict[str, str] = {}  # of installed code that is not loaded, by driver
        self.scan()

    @property
    def entries(self) -> tuple[registry.DriverEntry, ...]:
        """Return the entries of the first MAX_ENTRIES installed drivers by name, used or not."""
        return tuple(installed.entry for installed in self._drivers.values())[
            : registry.MAX_ENTRIES
        ]

    @property
    def names(self) -> list[str]:
        """Return the names of all installed drivers, sorted."""
        return list(self._drivers)

    def driver(self, name: str) -> type[Driver]:
        """Return the class of a driver. Raise NotFound or, if it cannot be loaded, DriverFailed."""
        installed = self._drivers.get(name)
        if installed is None:
            raise unknown_driver(name, self.names)
        if installed.driver is None:
            raise errors.DriverFailed(f"driver {name} cannot be loaded: {installed.entry.error}")
        return installed.driver

    def check_code(self, name: str) -> None:
        """Raise DriverFailed if the last scan found other code of a driver than is loaded."""
        if (change := self._changes.get(name)) is not None:
            raise errors.DriverFailed(
                f"driver {name}: {change}; only a restart of cyborg-agent on this host loads the "
                "installed code"
            )

    def scan(self) -> None:
        """Scan for installed drivers; modules that are already imported are not reloaded."""
        with self._lock:
            try:
                # Without this, the import system may not see packages installed since the start.
                importlib.invalidate_caches()
                points = entry_points(group=NAMESPACE)
            except Exception as exc:
                LOG.debug("Cannot read the installed packages", exc_info=True)
                LOG.error(
                    "Driver scan failed, keeping the previous list: %s",
                    error_text(exc)[: registry.MAX_ERROR],
                )
                return
            drivers: dict[str, _Installed] = {}
            changes: dict[str, str] = {}  # of drivers whose loaded code is not the installed one
            for name in sorted(points.names):
                # A set: a package may be found twice in the search path.
                candidates = set(points.select(name=name))
                installed = self._inspect(name, candidates)
                for point in candidates:
                    if change := self._code.find_change(point):
                        changes[name] = change
                previous, error = self._drivers.get(name), installed.entry.error
                is_new = previous is None or previous.entry != installed.entry
                # Logged once, not at each scan.
                if error is not None and is_new:
                    LOG.error("Driver cannot be loaded: %s", error, driver=name)
                if _is_serialisable(installed.entry):
                    drivers[name] = installed
            # Logged again only if the number changes.
            if len(drivers) > registry.MAX_ENTRIES and len(drivers) != self._scan_count:
                LOG.warning(
                    "%d drivers are installed, only the first %d by name are reported",
                    len(drivers),
                    registry.MAX_ENTRIES,
                )
            self._scan_count = len(drivers)
            # Replaced as a whole, so that readers need no lock.
            self._drivers, self._changes = drivers, changes

    def _inspect(self, name: str, points: set[EntryPoint]) -> _Installed:
        """Return the entry of a driver and its class, or an entry with the error of its import."""
        try:
            if len(points) > 1:
                values = " and ".join(sorted(point.value for point in points))
                raise errors.DriverFailed(f"several packages have a driver of this name: {values}")
            (point,) = points
            driver = self._load(point)
            return _Installed(_describe(name, driver), driver)
        except KeyboardInterrupt:
            # The only exception that is about this process and not about the driver.
            raise
        except BaseException as exc:  # reading a class attribute may run code, even sys.exit()
            LOG.debug("Driver has invalid metadata", driver=name, exc_info=True)
            error = error_text(exc)[: registry.MAX_ERROR]
            return _Installed(registry.DriverEntry(name, error=error), driver=None)

    def _load(self, point: EntryPoint) -> Any:
        """Import a driver in a thread. Raise the import's error, or an error at the timeout."""
        pending = self._pending_imports.get(point)
        if pending is None:
            pending = _Import(point)
            pending.start()
            # In a thread, because a module may wait for hardware while it is imported.
            pending.join(self._import_timeout)
        if pending.is_alive():
            # If the import finishes, the next scan uses it.
            self._pending_imports[point] = pending
            raise errors.DriverFailed(
                f"importing {point.module} takes longer than {self._import_timeout:g} s"
            )
        self._pending_imports.pop(point, None)
        self._code.record(point, loaded=pending.error is None)
        if pending.error is not None:
            raise pending.error
        return pending.loaded


class _Import(threading.Thread):
    """Thread that imports an entry point and stores the result in ``loaded`` or ``error``."""

    def __init__(self, point: EntryPoint) -> None:
        # A daemon: an import that hangs must not keep the process.
        super().__init__(name=f"import-{point.name}", daemon=True)
        self._point = point
        self.loaded: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Import the entry point."""
        try:
            self.loaded = self._point.load()
        except BaseException as exc:  # a module may end with sys.exit()
            LOG.debug("Cannot import %s", self._point.value, exc_info=True)
            self.error = exc


def unknown_driver(name: str, installed: Sequence[str]) -> errors.NotFound:
    """Return the error for a driver that is not installed here."""
    near = difflib.get_close_matches(name, installed, n=3)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    if (counterpart := registry.describe_counterpart(name)) is not None:
        hint = f", {counterpart}"
    return errors.NotFound(
        f"found {name!r}{hint}; expected one of the drivers of {NAMESPACE}: "
        f"{', '.join(installed) or 'none is installed'}",
        found=name,
        near=near,
        known=list(installed),
    )


def _describe(name: str, driver: Any) -> registry.DriverEntry:
    """Return the catalogue entry for a driver's class.

    Raise TypeError or ValueError if the metadata of the class are invalid.
    """
    if not (isinstance(driver, type) and issubclass(driver, Driver)):
        raise TypeError(f"{driver!r:.100} is not a subclass of {Driver.__module__}.Driver")
    if driver.name != name:
        raise ValueError(f"its class has the name {driver.name!r:.100}, expected {name!r:.100}")
    if not (isinstance(driver.version, str) and driver.version):
        raise TypeError(f"version {driver.version!r:.100} of its class is not a non-empty string")
    subsystems = driver.UEVENT_SUBSYSTEMS
    if not (isinstance(subsystems, frozenset) and all(isinstance(s, str) for s in subsystems)):
        raise TypeError(f"its UEVENT_SUBSYSTEMS {subsystems!r:.100} is not a frozenset of strings")
    entry = registry.DriverEntry(
        name=name,
        version=driver.version,
        type=None if driver.DEVICE_TYPE is None else str(driver.DEVICE_TYPE),
        support=registry.Support(driver.SUPPORT_LEVEL),
        abilities=tuple(
            sorted(
                str(ability)
                for ability, base in ABILITY_INTERFACES.items()
                if issubclass(driver, base)
            )
        ),
        options=tuple(driver.OPTIONS),
    )
    # An entry that cannot be encoded would make the report of the whole host invalid.
    text = json.dumps(registry.dump([entry]), allow_nan=False)
    if len(text) > MAX_ENTRY_BYTES:
        raise ValueError(
            f"its metadata has {len(text)} bytes, at most {MAX_ENTRY_BYTES} are allowed"
        )
    # Raises for half a surrogate pair, which the text above has as an escape.
    json.dumps(registry.dump([entry]), ensure_ascii=False).encode()
    # Decoded as the conductor will: an entry that it would refuse is refused here.
    (decoded,) = registry.load(json.loads(text))
    return decoded


def _is_serialisable(entry: registry.DriverEntry) -> bool:
    try:
        registry.load(registry.dump([entry]))
    except (errors.CyborgError, TypeError, ValueError) as exc:
        LOG.warning("Ignoring an invalid entry point of %s: %s", NAMESPACE, exc, driver=entry.name)
        return False
    return True
