# SPDX-License-Identifier: Apache-2.0
"""Names of the service binaries, as the services table and the REST API have them."""

from collections.abc import Mapping
from typing import Any

AGENT = "cyborg-agent"
CONDUCTOR = "cyborg-conductor"
API = "cyborg-api"

LIVE_ATTACH = "live_attach"
"""Key of the versions in an agent's heartbeat: whether it attaches devices to running guests."""

RESULT_EPOCHS = "result_epochs"
"""Key of the versions in an agent's heartbeat: whether it sends its epoch with each result."""


def is_current_epoch(epoch: str | None, current: str | None, versions: Mapping[str, Any]) -> bool:
    """Return whether a result with ``epoch`` is from the current agent of its host.

    ``current`` and ``versions`` are those of the last heartbeat of the agent. A result without an
    epoch (None) is accepted unless this heartbeat was from an agent that sends epochs.
    """
    return versions.get(RESULT_EPOCHS) is not True if epoch is None else epoch == current


def has_rebooted(previous: str | None, current: str | None) -> bool:
    """Return whether two boot ids of a host are of different boots; False if one is unknown."""
    return None not in (previous, current) and previous != current
