# SPDX-License-Identifier: Apache-2.0
"""The option --dry-run: which objects a command would change."""

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from cyborg.cli.common.pci_ids import add_names
from cyborg.core.text import sanitize

_NAMES = ("name", "binary", "kind", "subject", "type", "model")
_PLACES = ("hostname", "host", "address", "instance_uuid")


@dataclass(frozen=True, slots=True)
class Change:
    """What a command would do with an object; ``details`` tell people which object it is."""

    action: str
    kind: str
    uuid: str | None
    details: str

    def __str__(self) -> str:
        return " ".join(filter(None, ("would", self.action, self.kind, self.uuid, self.details)))


def plan(action: str, kind: str, row: Mapping[str, Any]) -> Change:
    """Return the change of an object of the service.

    >>> print(plan("delete", "device profile", {"uuid": "3f", "name": "gzip"}))
    would delete device profile 3f (gzip)
    """
    named = add_names(row) if row.get("model") else row
    texts = [str(named[key]) for key in (*_NAMES, *_PLACES) if named.get(key)]
    state = row.get("state") or row.get("status")
    shown = ", ".join([*texts, *([str(state)] if state else [])])
    return Change(action, kind, row.get("uuid"), sanitize(f"({shown})") if shown else "")


def write_changes(stdout: TextIO, args: argparse.Namespace, changes: Iterable[Change]) -> None:
    """Write changes to a stream: a line each, or one JSON document with ``-f json``."""
    found = list(changes)
    if getattr(args, "formatter", "") == "json":
        stdout.write(json.dumps([asdict(change) for change in found], indent=2) + "\n")
        return
    stdout.writelines(f"{change}\n" for change in found)
    if not found:
        stdout.write("nothing would be changed\n")
