# SPDX-License-Identifier: Apache-2.0
"""Private names of the oslo libraries: log, limit and policy.

Each library is imported late: no process needs all of them, and an agent has no oslo.policy.
"""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from oslo_config import cfg

from cyborg.core.errors import Misconfigured


def set_up_logging(conf: cfg.ConfigOpts, program: str) -> None:
    """Set up the logging of this process, whose name is ``program``, such as ``cyborg-api``.

    Call it again after a reload of the options. Raise Misconfigured if a destination of the log
    cannot be opened.
    """
    from oslo_log import handlers, log

    # oslo.log names the file in ``log_dir``, and the lines in syslog and the journal, after the
    # file of the outermost frame: ``threading.py`` in a worker of the conductor, ``<frozen
    # importlib._bootstrap>`` under uWSGI.
    handlers._get_binary_name = lambda: program
    try:
        log.setup(conf, "cyborg")
    except (OSError, RuntimeError, log.LogConfigError) as exc:
        raise Misconfigured(
            f"cannot open the log that log_dir, log_file, log_config_append, use_journal or "
            f"use_syslog of [DEFAULT] select: {exc}",
            option="[DEFAULT] log_dir",
        ) from exc


def use_limit_configuration(conf: cfg.ConfigOpts) -> None:
    """Make oslo.limit read this configuration, and connect with it at its next use."""
    # A late import: oslo.limit is an optional dependency and slow to import.
    from oslo_limit import limit

    limit.CONF = conf
    # It was made with the former configuration.
    limit._SDK_CONNECTION = None


@functools.lru_cache(maxsize=256)
def _inspect(function: Any) -> inspect.FullArgSpec:
    return inspect.getfullargspec(function)


def _getfullargspec(method: Callable[..., Any]) -> inspect.FullArgSpec:
    # The function, not the method: a reloaded policy file has new checks of the same classes.
    return _inspect(getattr(method, "__func__", method))


def cache_policy_signatures() -> None:
    """Let oslo.policy inspect the signature of each class of checks once. Idempotent."""
    # For each check of a rule oslo.policy inspects whether the class of the check takes the name of
    # the rule: some seven signatures for a decision, most of its cost. No setting avoids it.
    from oslo_policy import _checks

    checks: Any = _checks
    checks.inspect = SimpleNamespace(getfullargspec=_getfullargspec)
