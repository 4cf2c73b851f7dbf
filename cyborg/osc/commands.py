# SPDX-License-Identifier: Apache-2.0
"""Commands of ``cyborg`` as commands of ``openstack accelerator``.

The attributes of this module have the names of the entry points.
"""

import argparse
import importlib
from typing import Any

from cliff import command

from cyborg.cli.help.table import COMMANDS

_ENTRIES = {entry.entry_point: entry for entry in COMMANDS.values() if entry.is_own}


class _PluginCommand:
    """Mix-in that gets the REST client from the client manager of ``openstack``."""

    app: Any

    def run(self, parsed_args: argparse.Namespace) -> int:
        """Set the REST client and run the command."""
        self.app.rest = self.app.client_manager.cyborg
        return int(super().run(parsed_args))  # type: ignore[misc]


def __getattr__(name: str) -> type[command.Command]:
    """Return the command of an entry point; only its own module is imported."""
    if name not in _ENTRIES:
        raise AttributeError(name)
    module, _, class_name = _ENTRIES[name].path.partition(":")
    base = getattr(importlib.import_module(f"cyborg.cli.{module}"), class_name)
    return type(name, (_PluginCommand, base), {"__doc__": base.__doc__, "__module__": __name__})
