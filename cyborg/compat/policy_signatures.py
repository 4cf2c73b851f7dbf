# SPDX-License-Identifier: Apache-2.0
"""Cache of the signatures that oslo.policy inspects."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from oslo_policy import _checks


@functools.lru_cache(maxsize=256)
def _inspect(function: Any) -> inspect.FullArgSpec:
    return inspect.getfullargspec(function)


def _getfullargspec(method: Callable[..., Any]) -> inspect.FullArgSpec:
    # The function, not the method: a reloaded policy file has new checks of the same classes.
    return _inspect(getattr(method, "__func__", method))


def cache_policy_signatures() -> None:
    """Let oslo.policy inspect the signature of each class of checks once. Idempotent.

    For each check of a rule oslo.policy inspects whether the class of the check takes the name of
    the rule: some seven signatures for a decision, most of its cost. No setting avoids it.
    """
    checks: Any = _checks
    checks.inspect = SimpleNamespace(getfullargspec=_getfullargspec)
