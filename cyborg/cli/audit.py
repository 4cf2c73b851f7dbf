# SPDX-License-Identifier: Apache-2.0
"""``cyborg audit``: differences between hardware, database, Placement and Nova."""

from typing import Any

from cliff import lister

from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import Arguments, field_argument
from cyborg.cli.common.progress import Progress
from cyborg.cli.common.rest import Collection, Row
from cyborg.cli.terminal import tables

EXIT_CONSISTENT, EXIT_DIFFERENCES, EXIT_FAILED = 0, 1, 2
SHORT = formatting.columns_of("host, kind, explanation, repair_status=Repaired")
LONG = formatting.columns_of("object, advice", after=SHORT)


def _format_finding(finding: Row) -> dict[str, Any]:
    """Return the finding with its repair status as text.

    The text is ``yes`` with the repair that was done, ``no`` with the error if there is one, or
    ``by --repair`` if the option would repair it.
    """
    if finding["repaired"]:
        status = f"yes: {finding['repair']}"
    elif finding["error"]:
        status = f"no: {finding['error']}"
    else:
        status = "by --repair" if finding["repair"] else "no"
    return {**finding, "repair_status": status}


AUDITS = Collection("/audits", SHORT, LONG, nouns="differences", format_row=_format_finding)


class Audit(base.WaitCommand, listing.Lister, of=AUDITS):
    """Compare hardware, database, Placement and Nova, host by host.

    The exit status is 0 without differences, 1 with differences, and 2 if the audit failed. A
    summary and the advice for each kind of difference are written to stderr.
    """

    OPTIONS = (listing.LONG,)
    ARGUMENTS = (
        field_argument("--host", help="only this host"),
        field_argument("--repair", action="store_true", help="perform all repairs that are safe"),
        base.within_argument(3600.0, "maximum time to wait (3600); the audit continues after it"),
    )

    def run(self, parsed_args: Arguments) -> int:
        """Run the audit, show the result and return the exit status."""
        try:
            return super().run(parsed_args)
        except Exception as exc:
            # cliff would return 1, which means here that there are differences.
            self.app.LOG.error(exc, exc_info=self.app.options.debug)
            return EXIT_FAILED

    def take_action(self, parsed_args: Arguments) -> Any:
        """Start the audit, wait for its end and return the findings."""
        started = self.app.rest.call("POST", AUDITS.path, self.read_fields(parsed_args))
        path = AUDITS.object_path(started["uuid"])
        audit = self.wait(path, _measure, "auditing hosts", parsed_args.within)
        if audit["state"] == "FAILED":
            self.app.LOG.error(
                "the audit failed after %s of %s hosts: %s",
                audit["hosts_done"],
                audit["hosts_total"],
                audit["error"],
            )
            self._status = EXIT_FAILED
        elif audit["num_findings"]:
            self._status = EXIT_DIFFERENCES
        if "nova" not in audit["sources"]:
            self.app.LOG.warning("Nova is not configured, its servers were not compared")
        self._audit = audit
        # Scripts get all fields; for people the advice is below the table.
        return self.build_rows(parsed_args, audit["findings"])

    def produce_output(self, parsed_args: Arguments, column_names: Any, data: Any) -> int:
        """Print the table, wrapped to the terminal width, and the summary."""
        rows = list(data)
        # An unknown column is an error also without rows.
        self._generate_columns_and_selector(parsed_args, column_names)
        if parsed_args.formatter == "table":
            # Wrapped instead of truncated: explanations are sentences.
            tables.limit_width(parsed_args, self.app.stdout)
        self.formatter = tables.choose_formatter(parsed_args, self.formatter)
        status = 0
        if rows or parsed_args.formatter in tables.STRUCTURED:
            # Not that of listing.Lister, which truncates cells.
            status = lister.Lister.produce_output(self, parsed_args, column_names, rows)
        for line in format_summary(self._audit):
            self.app.stderr.write(f"{line}\n")
        return int(status)


def _measure(audit: Row) -> Progress:
    done, total = audit["hosts_done"], audit["hosts_total"]
    pending = f"audit {audit['uuid']} has completed {done} of {total} hosts"
    return Progress(done, total, None if audit["state"] in ("DONE", "FAILED") else pending)


def format_summary(audit: Row) -> list[str]:
    """Return a text with the numbers of hosts and differences, and the advice for each kind."""
    findings = audit["findings"]
    hosts = f"{audit['hosts_done']} host{'s' * (audit['hosts_done'] != 1)} compared"
    if not findings:
        return [f"{hosts}, no difference"]
    repaired = sum(bool(finding["repaired"]) for finding in findings)
    count = f"{len(findings)} difference{'s' * (len(findings) != 1)}"
    # Once for each kind: a kind may have thousands of findings.
    advice = {finding["kind"]: finding["advice"] for finding in findings}
    return [
        f"{hosts}, {count}" + (f", {repaired} repaired" if repaired else ""),
        *(f"{kind}: {text}" for kind, text in sorted(advice.items())),
    ]
