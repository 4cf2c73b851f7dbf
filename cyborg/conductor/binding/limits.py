# SPDX-License-Identifier: Apache-2.0
"""Enforce the limits of projects in the transactions that create and bind ARQs.

A transaction locks a project before it counts the objects of the project and inserts one, so that
no concurrent call exceeds a limit. The unified limits of keystone are cached by project.
"""

import contextlib
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db import exception as db_exc

from cyborg.conf import options
from cyborg.core.binding import limits as core
from cyborg.core.binding.limits import Limits
from cyborg.core.errors import Misconfigured, Unavailable
from cyborg.core.log import get_logger
from cyborg.core.validation import check_text
from cyborg.db.binding import project_units
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.threads.failures import RateLimitedLogger

LOG = get_logger(__name__)

T = TypeVar("T")

# Projects in the cache; the one that was not used for the longest time is dropped.
MAX_PROJECTS = 10_000
# Seconds without a request for any project after one that failed.
RETRY_DELAY = 10.0
# Transactions of one call: a transaction finds out which projects it needs under its locks.
MAX_MISSES = 4


class ProjectsMissing(Exception):
    """A transaction needs the limits of more projects, or their rows to lock. Roll back, retry.

    ``rows`` is whether the rows are missing.
    """

    def __init__(self, projects: Collection[str], *, rows: bool) -> None:
        super().__init__(", ".join(sorted(projects)))
        self.projects = projects
        self.rows = rows


def lock_projects(tx: sa.Connection, projects: Iterable[str]) -> None:
    """Lock projects until the end of the transaction. Raise ProjectsMissing.

    ``projects`` are sorted, so that two transactions of two projects do not wait for each other.
    """
    if missing := [project for project in projects if not project_units.lock(tx, project)]:
        raise ProjectsMissing(missing, rows=True)


def add_missing(uow: UnitOfWork, limits: "ProjectLimits | None", missing: ProjectsMissing) -> None:
    """Add what a transaction lacked: the limits of projects, or their rows to lock.

    Call this outside a transaction: it may query keystone. Raise Unavailable.
    """
    for name in missing.projects:
        if missing.rows:
            # In a transaction of its own: several transactions that insert the same row and then
            # go on would deadlock on MariaDB.
            with contextlib.suppress(db_exc.DBDuplicateEntry):
                uow.run(partial(project_units.insert_lock, project=name))
        elif limits is not None:
            limits.find(name)


class LimitReader(Protocol):
    """Interface of ``cyborg.clients.limits.KeystoneLimits``."""

    def read(self, project: str) -> Mapping[str, int]:
        """Return the limits of a project by resource class. Raise Unavailable."""


@dataclass(slots=True)
class _Entry:
    limits: Limits
    read_at: float
    next_read_at: float


class UnifiedLimits:
    """Source of limits that reads them from keystone. Thread-safe."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        reader: LimitReader,
        default: Mapping[str, int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``default`` has limits of resource classes for which keystone has none."""
        self._options = conf.quota
        self._reader = reader
        self._default = default
        self._clock = clock
        self._entries = OrderedDict[str, _Entry]()
        self._lock = threading.Lock()
        self._failure_log = RateLimitedLogger(clock, LOG)
        self._error = ""
        self._retry_at = float("-inf")

    def known(self, project: str) -> Limits | None:
        """Return the cached limits of a project, None if they must be read."""
        with self._lock:
            entry = self._entries.get(project)
            if entry is None or self._clock() >= entry.next_read_at:
                return None
            self._entries.move_to_end(project)
            return entry.limits

    def find(self, project: str) -> Limits:
        """Return the limits of a project, from keystone if the cached ones are too old.

        One thread reads the limits again; the other ones use the old limits meanwhile. Raise
        Unavailable if keystone does not answer and no limits are known. After a failed request,
        calls do not wait for another one for RETRY_DELAY, whatever their project is.
        """
        with self._lock:
            now = self._clock()
            entry = self._entries.get(project)
            if entry is not None and now - entry.read_at > self._max_age:
                del self._entries[project]
                entry = None
            if entry is not None:
                self._entries.move_to_end(project)
                if now < max(entry.next_read_at, self._retry_at):
                    return entry.limits
                # Before the request: the other threads use the old limits until it has ended.
                entry.next_read_at = now + RETRY_DELAY
            elif now < self._retry_at:
                raise Unavailable(
                    f"cannot read the limits of project {project}, retry later; the last request "
                    f"failed: {self._error}"
                )
        # Outside of the lock: keystone may take seconds, and other projects are in the cache.
        try:
            limits = Limits(project, {**self._default, **self._reader.read(project)})
        except Unavailable as exc:
            with self._lock:
                self._error, self._retry_at = exc.message, self._clock() + RETRY_DELAY
            if entry is None:
                raise
            age = now - entry.read_at
            self._failure_log.warn("Using limits that are %.0f s old: %s", age, exc.message)
            return entry.limits
        self._failure_log.recovered("Limits of keystone")
        self._store(project, limits, now)
        return limits

    @property
    def _max_age(self) -> float:
        return float(max(self._options.max_cache_age, self._options.cache_time))

    def _store(self, project: str, limits: Limits, read_at: float) -> None:
        with self._lock:
            self._entries[project] = _Entry(limits, read_at, read_at + self._options.cache_time)
            self._entries.move_to_end(project)
            while len(self._entries) > MAX_PROJECTS:
                self._entries.popitem(last=False)


class LimitSource(Protocol):
    """Source of the limits, such as the configuration file."""

    def known(self, project: str) -> Limits | None:
        """Return the limits of a project, None if another service has to be called for them."""

    def find(self, project: str) -> Limits:
        """Return the limits of a project; may call another service. Raise Unavailable."""


class StaticLimits:
    """The limits of the configuration file."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        """Parse the options. Raise Misconfigured."""
        self._default = parse_default_limits(conf)
        self._projects = core.parse_project_limits(
            conf.quota.project_limits, "[quota] project_limits"
        )

    def known(self, project: str) -> Limits:
        """Return the limits of a project."""
        return Limits(project, {**self._default, **self._projects.get(project, {})})

    find = known


class ProjectLimits:
    """The limits of projects during one call: they do not change between its transactions."""

    def __init__(self, source: LimitSource) -> None:
        self._source = source
        self._found: dict[str, Limits] = {}

    def known(self, projects: Collection[str]) -> dict[str, Limits]:
        """Return the limits of projects. Raise ProjectsMissing if another service has them."""
        limits = {name: self._found.get(name) or self._source.known(name) for name in projects}
        known = {name: limit for name, limit in limits.items() if limit is not None}
        if missing := set(projects) - set(known):
            raise ProjectsMissing(missing, rows=False)
        self._found |= known
        return known

    def find(self, project: str) -> None:
        """Find the limits of a project, for ``known``. Raise Unavailable."""
        self._found[project] = self._source.find(project)


def find_limits(source: LimitSource | None, projects: Iterable[str | None]) -> ProjectLimits | None:
    """Return the limits of projects for one call, None without limits. Raise Unavailable."""
    if source is None:
        return None
    limits = ProjectLimits(source)
    for name in projects:
        if name is not None:
            limits.find(name)
    return limits


def projects_change() -> Unavailable:
    """Return the error of a call that found other projects, or no row to lock, at each attempt."""
    return Unavailable(
        "other calls change the projects of this one, or delete their rows, at the same time: retry"
    )


@dataclass(frozen=True, slots=True)
class LimitLookup:
    """Lookup of the limits of a project for the API.

    Without ``source``, only the numbers of ARQs, contexts and attachments are limited.
    """

    conf: cfg.ConfigOpts
    source: LimitSource | None

    def get(self, project_id: str) -> dict[str, Any]:
        """Return the maximum numbers of objects, and under ``units`` those of each resource class.

        Raise Unavailable.
        """
        project = check_text("project_id", project_id)
        limits = None if self.source is None else self.source.find(project)
        return {
            "arqs": self.conf.conductor.max_project_arqs,
            "attachments": self.conf.attachments.max_per_project,
            "device_contexts": self.conf.device_contexts.max_per_project,
            "units": {} if limits is None else dict(limits.units),
        }


def run_with_limits(
    uow: UnitOfWork,
    source: LimitSource | None,
    projects: Iterable[str | None],
    work: Callable[[ProjectLimits | None], T],
) -> T:
    """Return the result of ``work``, which runs a transaction with the limits of projects.

    ``projects`` are those that are known before; without ``source``, ``work`` gets None. If
    ``work`` raises ProjectsMissing, what it lacks is added, and it runs again. Raise Unavailable.
    """
    limits = find_limits(source, projects)
    for _ in range(MAX_MISSES):
        try:
            return work(limits)
        except ProjectsMissing as exc:
            add_missing(uow, limits, exc)
    raise projects_change()


def parse_default_limits(conf: cfg.ConfigOpts) -> dict[str, int]:
    """Return the limits of the option ``default_limits``. Raise Misconfigured."""
    return core.parse_default_limits(conf.quota.default_limits, "[quota] default_limits")


def make_source(conf: cfg.ConfigOpts) -> LimitSource | None:
    """Return the configured source of limits, None without limits. Raise Misconfigured."""
    if conf.quota.driver == options.NONE:
        return None
    if conf.quota.driver == options.STATIC:
        return StaticLimits(conf)
    # A late import: oslo.limit is an optional dependency and slow to import.
    try:
        from cyborg.clients.limits import KeystoneLimits
    except ImportError as exc:
        raise Misconfigured(
            f"[quota] driver = unified needs pip install 'cyborg[limits]': {exc}",
            option="[quota] driver",
        ) from exc
    return UnifiedLimits(conf, KeystoneLimits(conf), parse_default_limits(conf))


def check_create(
    tx: sa.Connection, project: str | None, units: Mapping[str, int], limits: ProjectLimits
) -> None:
    """Raise OverLimit if a project cannot create ARQs of these units by resource class."""
    if project is None:
        return
    project_limits = limits.known([project])[project]
    if classes := project_limits.limited(units):
        lock_projects(tx, [project])
        used = project_units.count(tx, project, classes, bound=False)
        core.check_created(project_limits, used, units)


def check_bind(
    tx: sa.Connection, units: Iterable[tuple[str | None, str]], limits: ProjectLimits
) -> None:
    """Raise OverLimit if a project cannot bind its ARQs of these units.

    ``units`` has the project, after the bind, and the resource class of each ARQ to bind.
    """
    by_project = defaultdict[str, Counter[str]](Counter)
    for project, resource_class in units:
        if project is not None:
            by_project[project][resource_class] += 1
    limits_by_project = limits.known(by_project)
    limited = {
        project: classes
        for project, requested in sorted(by_project.items())
        if (classes := limits_by_project[project].limited(requested))
    }
    # Before the count: a concurrent bind of the project then counts this one. Sorted, so that two
    # binds for two projects cannot wait for each other.
    lock_projects(tx, limited)
    for project, classes in limited.items():
        bound = project_units.count(tx, project, classes, bound=True)
        core.check_bound(limits_by_project[project], bound, by_project[project])
