# SPDX-License-Identifier: Apache-2.0
"""Python functions that need privileges, each as narrow as its purpose allows.

An agent without privileges calls them in a second process. oslo.privsep starts this process by
``[cyborg_privileged] helper_command``, and it has only the Linux capabilities that CONTEXT lists.
An agent that runs as root calls the Python functions in its own process. They validate every
argument, and build every path from validated values.

Sources of the capabilities: capabilities(7); proc(5) for the links in ``/proc/PID/fd`` of other
processes, and ``nvme_cmd_allowed`` of ``drivers/nvme/host/ioctl.c`` of Linux for admin commands.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from oslo_privsep import capabilities, priv_context

from cyborg.core.errors import DriverFailed

# Section of the configuration file with the options of oslo.privsep.
SECTION = "cyborg_privileged"

_denial: str | None = None


class _Context(priv_context.PrivContext):
    """Context of the privileged Python functions; ``deny_calls`` can disable them."""

    def entrypoint(self, func: Callable[..., Any]) -> functools.partial[Any]:
        """Wrap a privileged Python function; raise DriverFailed at calls after ``deny_calls``."""
        call = super().entrypoint(func)
        wrapped = functools.partial(_call_unless_denied, call)
        vars(wrapped).update(vars(call))  # the mark of an entry point
        return wrapped


def _call_unless_denied(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _denial is not None:
        raise DriverFailed(f"this process must not change its host: {_denial}")
    return call(*args, **kwargs)


CONTEXT = _Context(
    "cyborg",
    cfg_section=SECTION,
    pypath=f"{__name__}.CONTEXT",
    capabilities=[
        capabilities.CAP_SYS_ADMIN,  # admin commands of NVMe controllers
        capabilities.CAP_DAC_OVERRIDE,  # files of root in /sys and /dev
        capabilities.CAP_SYS_PTRACE,  # the open files of other processes
    ],
)


def call_in_process_as_root() -> None:
    """Run the privileged Python functions in this process if it is a process of root."""
    # A second process would have no privilege that this one lacks.
    if os.geteuid() == 0:
        CONTEXT.set_client_mode(False)


def deny_calls(reason: str | None) -> None:
    """Make each privileged function of this process raise an error; None permits them again."""
    global _denial  # noqa: PLW0603  of the process, as the context is
    _denial = reason
