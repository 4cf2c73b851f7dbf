# SPDX-License-Identifier: Apache-2.0
"""Search for the processes that have device nodes open: only root may read those of other users."""

import os

from cyborg.drivers import privileged
from cyborg.drivers.host_use import open_nodes


def has_helper() -> bool:
    """Return whether the configuration has a command that starts the privileged process."""
    return bool(privileged.CONTEXT.conf.helper_command)


@privileged.CONTEXT.entrypoint
def find_open_nodes(agent: int) -> dict[str, list[str]]:
    """Return the result of ``scan`` without the agent, whose process id is the argument."""
    return open_nodes.scan(agent, os.getpid())
