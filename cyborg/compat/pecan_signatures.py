# SPDX-License-Identifier: Apache-2.0
"""Cache of the signatures that pecan inspects."""

import functools

import pecan.core
import pecan.routing


def install() -> None:
    """Let pecan inspect each signature once in this process. Idempotent.

    For each request pecan inspects the signatures of the same few methods, which is a tenth of the
    cost of a request. Pecan has no setting to cache them.
    """
    for module in (pecan.core, pecan.routing):
        if not hasattr(module.getargspec, "cache_info"):
            module.getargspec = functools.lru_cache(maxsize=1024)(module.getargspec)
