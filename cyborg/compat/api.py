# SPDX-License-Identifier: Apache-2.0
"""Private names of the libraries of the API: signatures of pecan, the audit middleware."""

import configparser
import functools
import logging
import warnings
from typing import Any, Protocol

import pecan.core
import pecan.routing


def cache_pecan_signatures() -> None:
    """Let pecan inspect each signature once in this process. Idempotent.

    For each request pecan inspects the signatures of the same few methods, which is a tenth of the
    cost of a request. Pecan has no setting to cache them.
    """
    # Both have imported the function under this name.
    for module in (pecan.core, pecan.routing):
        if not hasattr(module.getargspec, "uncached"):
            module.getargspec = _cache(module.getargspec)


def _cache(inspect: Any) -> Any:
    cached = functools.lru_cache(maxsize=1024)(inspect)

    def getargspec(method: Any) -> Any:
        # The function: a cached method would keep its controller, and all that it uses.
        return cached(getattr(method, "__func__", method))

    getargspec.uncached = inspect  # type: ignore[attr-defined]
    return getargspec


class EventNotifier(Protocol):
    """Interface of ``cyborg.rpc.notifications.AuditNotifier``."""

    def notify(self, context: Any, event_type: str, payload: Any) -> None:
        """Take an event; do not wait."""


def make_audit_middleware(app: Any, map_file: str, notifier: EventNotifier) -> Any:
    """Return the middleware for an app. Raise OSError and ValueError for an unusable map file."""
    # A late import: most installations do not audit requests.
    from keystonemiddleware import audit

    # keystonemiddleware warns that it does not know audit_map_file, its own option.
    logging.getLogger("keystonemiddleware._common.config").addFilter(_is_no_false_alarm)
    # The id of a user of a directory (LDAP) is no uuid, and neither is "noauth".
    warnings.filterwarnings("ignore", "Invalid uuid", module=r"pycadf\.")
    try:
        middleware = audit.AuditMiddleware(app, audit_map_file=map_file, use_oslo_messaging="false")
    except (configparser.Error, audit.PycadfAuditApiConfigError) as exc:
        raise ValueError(str(exc)) from exc
    # Its own notifier sends within the request: without a broker, each request would wait.
    middleware._notifier = notifier
    return middleware


def _is_no_false_alarm(record: logging.LogRecord) -> bool:
    return "audit_map_file" not in record.getMessage()
