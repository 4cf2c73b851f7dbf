# SPDX-License-Identifier: Apache-2.0
"""Functions that need privileges, each as narrow as its purpose allows.

An agent without privileges calls them in a second process, which oslo.privsep starts with the
command of ``[cyborg_privileged] helper_command`` and which keeps only the capabilities below. An
agent that runs as root calls them in its own process. They trust no argument: each is parsed again,
and every path is derived from parsed values.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from oslo_privsep import capabilities, priv_context

from cyborg.core.errors import DriverFailed

SECTION = "cyborg_privileged"
"""Section of the configuration file with the options of oslo.privsep."""

_denial: str | None = None


class _Context(priv_context.PrivContext):
    """The functions of this package, which ``deny_calls`` closes."""

    def entrypoint(self, func: Callable[..., Any]) -> functools.partial[Any]:
        """Return the privileged function; a call raises DriverFailed if calls are denied."""
        call = super().entrypoint(func)
        found = functools.partial(_call_unless_denied, call)
        vars(found).update(vars(call))  # the mark of an entry point
        return found


def _call_unless_denied(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _denial is not None:
        raise DriverFailed(f"no work on this host: {_denial}")
    return call(*args, **kwargs)


CONTEXT = _Context(
    "cyborg",
    cfg_section=SECTION,
    pypath=f"{__name__}.CONTEXT",
    capabilities=[
        capabilities.CAP_SYS_ADMIN,  # admin commands of NVMe controllers
        capabilities.CAP_DAC_OVERRIDE,  # files of root in /sys and /dev
    ],
)


def call_in_process_as_root() -> None:
    """Call the functions in this process if it runs as root: it has the privileges already."""
    if os.geteuid() == 0:
        CONTEXT.set_client_mode(False)


def deny_calls(reason: str | None) -> None:
    """Let all privileged functions of this process fail with a reason; None permits them again."""
    global _denial  # noqa: PLW0603  of the process, as the context is
    _denial = reason
