# SPDX-License-Identifier: Apache-2.0
"""The audit middleware of keystonemiddleware with another notifier.

Its own notifier sends within the request: without a broker, each request would wait.
"""

import configparser
import logging
import warnings
from typing import Any, Protocol

from keystonemiddleware import audit


class EventNotifier(Protocol):
    """Interface of ``cyborg.rpc.audit_notifier.AuditNotifier``."""

    def notify(self, context: Any, event_type: str, payload: Any) -> None:
        """Take an event; do not wait."""


def make_audit_middleware(app: Any, map_file: str, notifier: EventNotifier) -> Any:
    """Return the middleware for an app. Raise OSError and ValueError for an unusable map file."""
    # It warns that it does not know this option of its own.
    logging.getLogger("keystonemiddleware._common.config").addFilter(_is_no_false_alarm)
    # A user of a directory has an id of another form, and "noauth" is none either.
    warnings.filterwarnings("ignore", "Invalid uuid", module=r"pycadf\.")
    try:
        middleware = audit.AuditMiddleware(app, audit_map_file=map_file, use_oslo_messaging="false")
    except (configparser.Error, audit.PycadfAuditApiConfigError) as exc:
        raise ValueError(str(exc)) from exc
    middleware._notifier = notifier
    return middleware


def _is_no_false_alarm(record: logging.LogRecord) -> bool:
    return "audit_map_file" not in record.getMessage()
