# SPDX-License-Identifier: Apache-2.0
"""Which drivers are installed on this host: the entry points, and what their classes say.

Each is imported behind a guard of its own: one that cannot be takes nothing from the others, and
the conductor is told why.
"""

import difflib
import importlib
import json
import threading
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from oslo_log import log

from cyborg.core import catalogue
from cyborg.core.catalogue import MAX_ENTRIES, MAX_ERROR, Entry, Support
from cyborg.core.errors import CyborgError, DriverFailed, NotFound
from cyborg.core.text import clean
from cyborg.drivers.base import NEEDED, Driver

LOG = log.getLogger(__name__)

NAMESPACE = "cyborg.accelerator.driver"

MAX_BYTES = 32 * 1024  # of what one driver says of itself
PATIENCE = 60.0  # seconds


class Catalogue:
    """The drivers as they were found last. Any thread may read it while another looks again."""

    def __init__(self, patience: float = PATIENCE) -> None:
        """``patience`` is for importing one driver, in seconds."""
        self._patience = patience
        self._lock = threading.Lock()  # of looking
        self._found: dict[str, tuple[Entry, type[Driver] | None]] = {}
        self._slow: dict[EntryPoint, _Import] = {}  # not over when somebody looked last
        self._told_many = 0
        self.scan()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Return what is installed, used or not; of too many the first ones by name."""
        return tuple(entry for entry, _ in self._found.values())[:MAX_ENTRIES]

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
        with self._lock:
            try:
                # Of the process itself: what others keep of the installed packages may be older.
                importlib.invalidate_caches()
                points = entry_points(group=NAMESPACE)
            except Exception as bad:
                LOG.debug("The installed packages cannot be read", exc_info=True)
                LOG.error("The drivers stay as they were found before: %s", _words(bad))
                return
            found: dict[str, tuple[Entry, type[Driver] | None]] = {}
            for name in sorted(points.names):
                entry, driver = self._looked_at(name, set(points.select(name=name)))
                before = self._found.get(name, (None, None))[0]
                if entry.error is not None and entry != before:
                    LOG.error("Driver %s cannot be loaded: %s", name, entry.error)
                if _is_tellable(entry):
                    found[name] = (entry, driver)
            if len(found) > MAX_ENTRIES and len(found) != self._told_many:
                LOG.warning(
                    "%d drivers are installed; the conductor is told of %d", len(found), MAX_ENTRIES
                )
            self._told_many = len(found)
            self._found = found

    def _looked_at(self, name: str, points: set[EntryPoint]) -> tuple[Entry, type[Driver] | None]:
        """Return what one driver says of itself and its class, or why there is none."""
        try:
            if len(points) > 1:
                many = " and ".join(sorted(point.value for point in points))
                raise DriverFailed(f"several packages have one of this name: {many}")
            driver = self._load(*points)
            return _entry(name, driver), driver
        except KeyboardInterrupt:
            raise
        except BaseException as bad:  # what a class says may be code that ends with sys.exit()
            LOG.debug("What driver %s says of itself is unusable", name, exc_info=True)
            return Entry(name, error=_words(bad)), None

    def _load(self, point: EntryPoint) -> Any:
        """Import a driver, in a thread that is left alone if it hangs. Raises what that raises."""
        slow = self._slow.get(point)
        if slow is None:
            slow = _Import(point)
            slow.start()
            slow.join(self._patience)
        if slow.is_alive():
            # The next look finds it, should it come to an end.
            self._slow[point] = slow
            raise DriverFailed(f"importing {point.module} takes longer than {self._patience:g} s")
        self._slow.pop(point, None)
        if slow.error is not None:
            raise slow.error
        return slow.thing


class _Import(threading.Thread):
    """Imports what an entry point names: ``thing``, or ``error`` is why not."""

    def __init__(self, point: EntryPoint) -> None:
        super().__init__(name=f"import-{point.name}", daemon=True)
        self._point = point
        self.thing: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Import it."""
        try:
            self.thing = self._point.load()
        except BaseException as bad:  # a module may end with sys.exit()
            LOG.debug("%s cannot be imported", self._point.value, exc_info=True)
            self.error = bad


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


def _entry(name: str, driver: Any) -> Entry:
    """Return what a class says of itself. Raises what is wrong with that."""
    if not (isinstance(driver, type) and issubclass(driver, Driver)):
        raise TypeError(f"{driver!r:.100} is not a class made from {Driver.__module__}.Driver")
    if driver.name != name:
        raise ValueError(f"its class says that it is called {driver.name!r:.100}")
    if not (isinstance(driver.version, str) and driver.version):
        raise TypeError(f"its version {driver.version!r:.100} is no text, or empty")
    watches = driver.WATCHES
    if not (isinstance(watches, frozenset) and all(isinstance(one, str) for one in watches)):
        raise TypeError(f"its WATCHES {watches!r:.100} is not a frozenset of texts")
    entry = Entry(
        name=name,
        version=driver.version,
        type=None if driver.TYPE is None else str(driver.TYPE),
        support=Support(driver.SUPPORT),
        abilities=tuple(
            sorted(str(able) for able, has in NEEDED.items() if issubclass(driver, has))
        ),
        options=tuple(driver.OPTIONS),
    )
    # What does not come through a message would cost the host its report.
    text = json.dumps(catalogue.dump([entry]), allow_nan=False)
    if len(text) > MAX_BYTES:
        raise ValueError(f"what it says of itself has {len(text)} bytes: at most {MAX_BYTES}")
    json.dumps(catalogue.dump([entry]), ensure_ascii=False).encode()
    (same,) = catalogue.load(json.loads(text))
    return same


def _is_tellable(entry: Entry) -> bool:
    try:
        catalogue.load(catalogue.dump([entry]))
    except (CyborgError, TypeError, ValueError) as bad:
        LOG.warning("An entry point of %s is passed over: %s", NAMESPACE, bad)
        return False
    return True


def _words(bad: BaseException) -> str:
    text = bad.message if isinstance(bad, CyborgError) else f"{type(bad).__name__}: {bad}"
    return clean(text)[:MAX_ERROR]
