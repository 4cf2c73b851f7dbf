# SPDX-License-Identifier: Apache-2.0
"""``cyborg audit``: what hardware, database, Placement and Nova disagree about."""

import argparse
from functools import partial
from typing import Any

from cliff import lister

from cyborg.cli import seconds, shown
from cyborg.cli.answers import at
from cyborg.cli.waiting import Progress, wait

PATH = "/audits"
AGREED, DISAGREED, FAILED = 0, 1, 2
POLL = 0.5  # seconds
SHORT: shown.Columns = (
    ("Host", "host"),
    ("Kind", "kind"),
    ("Object", "object"),
    ("Explanation", "explanation"),
    ("Advice", "advice"),
    ("Repaired", "told"),
)


class Audit(lister.Lister):
    """Hold hardware, database, Placement and Nova against each other, host by host.

    The exit status is 0 when they agree, 1 when they do not, 2 when the audit failed.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add what to look at and whether to repair."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--host", help="only this host")
        parser.add_argument(
            "--repair", action="store_true", help="do or order the repairs that are safe"
        )
        parser.add_argument(
            "--within",
            type=seconds.parse,
            default=3600.0,
            metavar="SECONDS",
            help="how long to wait at most (3600); the audit itself goes on",
        )
        return parser

    def run(self, parsed_args: argparse.Namespace) -> int:
        """Audit, show and tell how it ended."""
        self._status = AGREED
        try:
            super().run(parsed_args)
        except Exception as why:
            # Not left to cliff, whose 1 says here that the sides disagree.
            self.app.LOG.error(why, exc_info=self.app.options.debug)
            return FAILED
        return self._status

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask, wait and return what was found."""
        wanted = {"host": parsed_args.host, "repair": parsed_args.repair}
        body = {key: value for key, value in wanted.items() if value is not None}
        path = at(PATH, self.app.rest.call("POST", PATH, body)["uuid"])
        found = self._wait(path, parsed_args.within)
        if found["state"] == "FAILED":
            self.app.LOG.error(
                "the audit failed after %s of %s hosts: %s",
                *(found["done"], found["total"], found["error"]),
            )
            self._status = FAILED
        elif found["found"]:
            self._status = DISAGREED
        if "nova" not in found["sides"]:
            self.app.LOG.warning("this installation is without Nova: its servers were not compared")
        return shown.table(SHORT, [_row(finding) for finding in found["findings"]])

    def _wait(self, path: str, within: float) -> dict[str, Any]:
        def look(found: dict[str, Any]) -> Progress:
            done, total = found["done"], found["total"]
            late = f"audit {found['uuid']} is at host {done} of {total}"
            return Progress(done, total, None if found["state"] in ("DONE", "FAILED") else late)

        ask = partial(self.app.rest.call, "GET", path)
        return wait(ask, look, "auditing hosts", within=within, pause=POLL, counted=True)


def _row(finding: dict[str, Any]) -> dict[str, Any]:
    """Add what was done: yes; no, with the error; or what --repair would do."""
    if finding["repaired"]:
        told = f"yes: {finding['repair']}"
    elif finding["error"]:
        told = f"no: {finding['error']}"
    else:
        told = "by --repair" if finding["repair"] else "no"
    return {**finding, "told": told}
