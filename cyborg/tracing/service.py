# SPDX-License-Identifier: Apache-2.0
"""Start and stop of tracing in a process of a service."""

import atexit
import os
import threading
from typing import TYPE_CHECKING

from oslo_config import cfg

from cyborg import tracing
from cyborg.core.errors import Misconfigured

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider


class _Process:
    """The provider of this process, and the number of its services that use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pid = os.getpid()
        self.users = 0
        self.provider: TracerProvider | None = None


_process = _Process()


def check_config(conf: cfg.ConfigOpts) -> None:
    """Raise Misconfigured if tracing is enabled and its libraries are missing."""
    if not conf.tracing.enabled:
        return
    try:
        import cyborg.tracing.recorder  # noqa: F401
    except ImportError as exc:
        raise Misconfigured(
            f"[tracing] enabled = true needs pip install 'cyborg[tracing]': {exc}",
            option="[tracing] enabled",
        ) from exc


def start(conf: cfg.ConfigOpts, service: str, processor: "SpanProcessor | None" = None) -> None:
    """Record the spans of this process if ``[tracing] enabled``. Raise Misconfigured.

    Call it in each process after the fork: threads and connections of the export do not survive a
    fork. A second service of the process uses the recorder of the first. ``processor`` replaces the
    export to the collector.
    """
    check_config(conf)
    if not conf.tracing.enabled:
        return
    from cyborg.tracing.recorder import SpanRecorder, make_provider

    with _process.lock:
        # A fork has copied the provider, but not the thread that exports its spans.
        if _process.pid != os.getpid():
            _process.provider, _process.pid, _process.users = None, os.getpid(), 0
        _process.users += 1
        if _process.provider is None:
            _process.provider = make_provider(conf, service, processor)
            tracing.use_recorder(SpanRecorder(_process.provider, conf.tracing.sample_ratio))


def stop() -> None:
    """Export the remaining spans when the last service of the process stops.

    Return within ``recorder.STOP_TIMEOUT`` seconds.
    """
    with _process.lock:
        _process.users = max(0, _process.users - 1)
        if _process.users or _process.provider is None or _process.pid != os.getpid():
            return
        provider, _process.provider = _process.provider, None
        tracing.use_recorder(None)
    from cyborg.tracing.recorder import stop_provider

    stop_provider(provider)


# Web servers have no common hook for the end of a worker.
atexit.register(stop)
