# SPDX-License-Identifier: Apache-2.0
"""Limit of the reports that a process handles concurrently, because each uses much memory.

A report over the limit is refused before it is parsed, so that waiting reports use no memory. The
agent of a refused report sends its current report later; the delay doubles with each refusal.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from cyborg.core.errors import Unavailable


class ReportAdmission:
    """Limit of concurrent reports: one for each host, ``max_concurrent_reports`` for all hosts."""

    def __init__(self, max_concurrent_reports: int) -> None:
        self._max = max_concurrent_reports
        self._lock = threading.Lock()
        self._hosts: set[str] = set()

    @contextlib.contextmanager
    def admitted(self, report: Any) -> Iterator[None]:
        """Count a report within the block. Raise Unavailable if the limit is reached."""
        name = report.get("host") if isinstance(report, Mapping) else None
        # A report without a host name is refused later as malformed; here it has the name "".
        host = name if isinstance(name, str) else ""
        with self._lock:
            if host in self._hosts:
                raise Unavailable(f"a report of host {host[:255]!r} is being recorded, retry")
            if len(self._hosts) >= self._max:
                raise Unavailable(f"{self._max} reports are being recorded, retry")
            self._hosts.add(host)
        try:
            yield
        finally:
            with self._lock:
                self._hosts.discard(host)
