# SPDX-License-Identifier: Apache-2.0
"""Names of the service binaries, as the services table and the REST API have them."""

AGENT = "cyborg-agent"
CONDUCTOR = "cyborg-conductor"
API = "cyborg-api"

LIVE_ATTACH = "live_attach"
"""Key of the versions in an agent's heartbeat: whether it attaches devices to running guests."""


def has_rebooted(previous: str | None, current: str | None) -> bool:
    """Return whether two boot ids of a host are of different boots; False if one is unknown."""
    return None not in (previous, current) and previous != current
