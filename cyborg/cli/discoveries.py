# SPDX-License-Identifier: Apache-2.0
"""``cyborg discover-services``: request a discovery from agents."""

import argparse
from collections.abc import Mapping
from typing import Any

from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import argument, field_argument
from cyborg.cli.common.collection import Collection
from cyborg.cli.common.progress import Progress
from cyborg.core.text import join_limited

DISCOVERY_COLUMNS = formatting.columns_of("uuid=Discovery, host, backend, state, error")
DISCOVERIES = Collection("/discoveries", DISCOVERY_COLUMNS, nouns="backends")
PENDING, DONE = "IN-PROGRESS", "DONE"

MAX_NAMED = 3  # pending backends in an error message


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['host']} ({row['backend']})"


def _measure(discovery: Mapping[str, Any]) -> Progress:
    counts, rows = discovery["progress"], discovery.get("backends", ())
    unreported = [_name(row) for row in rows if row["state"] == PENDING]
    named = join_limited(unreported, MAX_NAMED) or f"discovery {discovery['uuid']}"
    total, unfinished = sum(counts.values()), counts.get(PENDING, 0)
    pending = f"{unfinished} of {total} backends have not reported ({named})"
    return Progress(total - unfinished, total, pending if discovery["state"] == PENDING else None)


class Discover(base.WaitCommand, listing.Lister, of=DISCOVERIES):
    """Discover the devices of all backends, or of the backends of a host or driver.

    With --wait the exit status is 1 if the discovery of any backend failed.
    """

    OPTIONS = ()
    ARGUMENTS = (
        field_argument("--host", help="only this host"),
        field_argument("--driver", help="only the backends of this driver"),
        argument("--wait", action="store_true", help="wait until all backends have reported"),
        base.within_argument(120.0, "with --wait, the maximum time to wait (120)"),
    )

    def read_rows(self, args: argparse.Namespace) -> Any:
        """Start the discovery, wait with --wait, and return the backends."""
        created = self.app.rest.call("POST", DISCOVERIES.path, self.read_fields(args))
        path = DISCOVERIES.object_path(created["uuid"])
        discovery = None
        if args.wait:
            poll = self.make_poll(DISCOVERIES, created["uuid"], "backends")
            discovery = self.wait(
                poll, _measure, "discovering", args.within, interval=0.2, show_counts=False
            )
        if discovery is None or "backends" not in discovery:
            discovery = self.app.rest.read_whole(path, "backends")
        if args.wait:
            # The table truncates errors to the terminal width; these lines do not.
            for row in discovery["backends"]:
                if row["state"] not in (PENDING, DONE):
                    self.app.LOG.error("%s: %s", _name(row), row["error"] or row["state"])
                    self._status = 1
        return [{"uuid": created["uuid"], **row} for row in discovery["backends"]]
