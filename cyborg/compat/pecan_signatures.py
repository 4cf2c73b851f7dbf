# SPDX-License-Identifier: Apache-2.0
"""Cache of the signatures that pecan inspects."""

import functools
from typing import Any

import pecan.core
import pecan.routing


def cache_pecan_signatures() -> None:
    """Let pecan inspect each signature once in this process. Idempotent.

    For each request pecan inspects the signatures of the same few methods, which is a tenth of the
    cost of a request. Pecan has no setting to cache them.
    """
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
