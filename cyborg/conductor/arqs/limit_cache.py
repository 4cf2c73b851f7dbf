# SPDX-License-Identifier: Apache-2.0
"""The unified limits of keystone, cached by project.

The limits of a project are read again after ``[quota] cache_time``. If keystone does not answer,
the last known limits are used up to the age ``[quota] max_cache_age``, so that an outage of
keystone does not prevent servers. Without known limits, a call fails: nothing is unlimited by
accident.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from oslo_config import cfg

from cyborg.core.arq.limits import Limits
from cyborg.core.errors import Unavailable
from cyborg.core.log import get_logger
from cyborg.threads.rate_limited_log import RateLimitedLogger

LOG = get_logger(__name__)

MAX_PROJECTS = 10_000
"""Projects in the cache; the one that was not used for the longest time is dropped."""

RETRY_DELAY = 10.0
"""Seconds without a request for any project after one that failed."""


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
                entry.next_read_at = now + RETRY_DELAY
            elif now < self._retry_at:
                raise Unavailable(
                    f"cannot read the limits of project {project}, retry later; the last request "
                    f"failed: {self._error}"
                )
        try:
            limits = Limits(project, {**self._default, **self._reader.read(project)})
        except Unavailable as exc:
            with self._lock:
                self._error, self._retry_at = exc.message, self._clock() + RETRY_DELAY
            if entry is None:
                raise
            error = exc.message
        else:
            self._failure_log.recovered("Limits of keystone")
            self._store(project, limits, now)
            return limits
        age = now - entry.read_at
        self._failure_log.warn("Using limits that are %.0f s old: %s", age, error)
        return entry.limits

    @property
    def _max_age(self) -> float:
        return float(max(self._options.max_cache_age, self._options.cache_time))

    def _store(self, project: str, limits: Limits, read_at: float) -> None:
        with self._lock:
            self._entries[project] = _Entry(limits, read_at, read_at + self._options.cache_time)
            self._entries.move_to_end(project)
            while len(self._entries) > MAX_PROJECTS:
                self._entries.popitem(last=False)
