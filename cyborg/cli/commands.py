# SPDX-License-Identifier: Apache-2.0
"""Lookup of commands: ``device list`` is the same as ``device-list``."""

from importlib import metadata
from typing import Any

from cliff import commandmanager
from stevedore import named

from cyborg.cli.help.table import COMMANDS

MAX_WORDS = 4  # of a command
ALIASES = {
    entry.openstack.replace(" ", "-"): entry.name
    for entry in COMMANDS.values()
    if " " in entry.openstack
}
"""The names of the commands by their spelling in ``openstack accelerator``."""
# Not declared in setup.cfg: openstack has its own commands, also for the commands of our plug-in.
OWN_COMMANDS = {
    name: metadata.EntryPoint(name, f"cyborg.cli.{path}", "cyborg.cli")
    for name, path in (("complete", "completion.command:Complete"), ("help", "help.screen:Help"))
}


class CommandManager(commandmanager.CommandManager):
    """Command manager that accepts dashes or spaces between the words of a command."""

    def load_commands(self, namespace: str) -> None:
        """Register the commands of a namespace; only the modules of used commands are imported."""
        # The method of cliff imports the modules of all commands.
        self.group_list.append(namespace)
        unloaded: Any = named.NamedExtensionManager(namespace, names=())
        self.commands.update((entry.name, entry) for entry in unloaded.list_entry_points())

    def add_command(self, name: str, command_class: Any) -> None:
        """Add a command of cliff, unless there is one of our own with its name."""
        if name in OWN_COMMANDS:
            self.commands[name] = OWN_COMMANDS[name]
        else:
            super().add_command(name, command_class)

    def find_command(self, argv: list[str]) -> tuple[Any, str, list[str]]:
        """Return class, name and remaining arguments. Raise ValueError for an unknown command."""
        spaced = 0
        while spaced < min(len(argv), MAX_WORDS) and not argv[spaced].startswith("-"):
            spaced += 1
        for count in range(spaced, 0, -1):
            name = self._name(argv[:count])
            if name is not None:
                return super().find_command([name, *argv[count:]])
        return super().find_command(argv)

    def _name(self, arguments: list[str]) -> str | None:
        joined, rotated = "-".join(arguments), "-".join([arguments[-1], *arguments[:-1]])
        names = (joined, rotated, ALIASES.get(joined, ""))
        return next((name for name in names if name in self.commands), None)
