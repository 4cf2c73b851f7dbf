# SPDX-License-Identifier: Apache-2.0
"""Which drivers are installed on this host: the entry points, and what their classes say.

Each is imported behind a guard of its own: one that cannot be takes nothing from the others, and
the conductor is told why.
"""

import difflib
import importlib
import json
from collections.abc import Sequence
from typing import Any

import stevedore
from oslo_log import log

from cyborg.core import catalogue
from cyborg.core.catalogue import MAX_ENTRIES, MAX_ERROR, Entry, Support
from cyborg.core.errors import CyborgError, DriverFailed, NotFound
from cyborg.core.text import clean
from cyborg.drivers.base import NEEDED, Driver

LOG = log.getLogger(__name__)

NAMESPACE = "cyborg.accelerator.driver"


class Catalogue:
    """The drivers as they were found last. Any thread may read it while another looks again."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Entry, type[Driver] | None]] = {}
        self.scan()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Return what is installed, used or not."""
        return tuple(entry for entry, _ in self._found.values())

    @property
    def names(self) -> list[str]:
        """Return the names of all, in order."""
        return list(self._found)

    def driver(self, name: str) -> type[Driver]:
        """Return a driver's class. Raises NotFound, and DriverFailed if it cannot be loaded."""
        entry, driver = self._found.get(name, (None, None))
        if entry is None:
            raise unknown(name, self.names)
        if driver is None:
            raise DriverFailed(f"driver {name} cannot be loaded: {entry.error}")
        return driver

    def scan(self) -> None:
        """Look again, also for what is new; code that has been loaded stays as it is."""
        importlib.invalidate_caches()
        stevedore.ExtensionManager.ENTRY_POINT_CACHE.pop(NAMESPACE, None)
        try:
            # No names: this lists them and loads nothing.
            listed = stevedore.NamedExtensionManager(NAMESPACE, names=[]).entry_points_names()
        except Exception as bad:
            LOG.debug("The installed packages cannot be read", exc_info=True)
            LOG.error("The drivers stay as they were found before: %s", _words(bad))
            return
        names = sorted(set(listed))
        if len(names) > MAX_ENTRIES:
            LOG.warning("%d drivers are installed; %d are known", len(names), MAX_ENTRIES)
        found: dict[str, tuple[Entry, type[Driver] | None]] = {}
        for name in names[:MAX_ENTRIES]:
            try:
                driver = _load(name)
                entry, loaded = _entry(name, driver), driver
            except KeyboardInterrupt:
                raise
            except BaseException as bad:  # a module may end with sys.exit()
                LOG.debug("Driver %s cannot be loaded", name, exc_info=True)
                entry, loaded = Entry(name, error=_words(bad)), None
            before = self._found.get(name, (None, None))[0]
            if entry.error is not None and entry != before:
                LOG.error("Driver %s cannot be loaded: %s", name, entry.error)
            if _is_tellable(entry):
                found[name] = (entry, loaded)
        self._found = found


def unknown(name: str, known: Sequence[str]) -> NotFound:
    """Return the error for a driver that is not installed here."""
    near = difflib.get_close_matches(name, known, n=3)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    return NotFound(
        f"found {name!r}{hint}; expected one of the drivers of {NAMESPACE}: "
        f"{', '.join(known) or 'none is installed'}",
        found=name,
        near=near,
        known=list(known),
    )


def _load(name: str) -> Any:
    return stevedore.DriverManager(NAMESPACE, name).driver


def _entry(name: str, driver: Any) -> Entry:
    """Return what a class says of itself. Raises what is wrong with that."""
    if not (isinstance(driver, type) and issubclass(driver, Driver)):
        raise TypeError(f"{driver!r:.100} is not a class made from {Driver.__module__}.Driver")
    entry = Entry(
        name=name,
        version=str(driver.version),
        type=None if driver.TYPE is None else str(driver.TYPE),
        support=Support(driver.SUPPORT),
        abilities=tuple(
            sorted(str(able) for able, has in NEEDED.items() if issubclass(driver, has))
        ),
        options=tuple(driver.OPTIONS),
    )
    # What does not come through a message would cost the host its report.
    (same,) = catalogue.load(json.loads(json.dumps(catalogue.dump([entry]))))
    return same


def _is_tellable(entry: Entry) -> bool:
    try:
        catalogue.load(catalogue.dump([entry]))
    except (CyborgError, TypeError, ValueError) as bad:
        LOG.warning("An entry point of %s is passed over: %s", NAMESPACE, bad)
        return False
    return True


def _words(bad: BaseException) -> str:
    return clean(f"{type(bad).__name__}: {bad}")[:MAX_ERROR]
