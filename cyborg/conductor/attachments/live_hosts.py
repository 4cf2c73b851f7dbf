# SPDX-License-Identifier: Apache-2.0
"""Check that hosts attach devices to running guests."""

from collections.abc import Collection

import sqlalchemy as sa

from cyborg.core.errors import Conflict
from cyborg.db.attachments import handles


def check_live(tx: sa.Connection, hosts: Collection[str]) -> None:
    """Raise Conflict if an agent of these hosts does not attach devices to running guests.

    A host without an agent is left out.
    """
    for host, enabled in sorted(handles.live_hosts(tx, hosts).items()):
        if not enabled:
            raise Conflict(
                f"mode: live attach is not enabled on host {host}: its agent needs [libvirt] "
                "live_attach = true; or use the mode next-boot",
                field="mode",
                host=host,
            )
