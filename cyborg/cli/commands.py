# SPDX-License-Identifier: Apache-2.0
"""The commands: their lookup, and the help screen that shows them.

Their table is ``commands.txt``. The entry points of setup.cfg repeat it, since they are static; a
test compares them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from typing import Any

from cliff import commandmanager
from cliff import help as cliff_help
from stevedore import named


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command of ``cyborg``.

    ``path`` is its class, such as ``devices:DeviceList``, below ``cyborg.cli``. ``openstack`` has
    its words after ``openstack accelerator``; without ``is_own`` they are a command of
    python-openstackclient or python-cyborgclient, which this plug-in does not replace.
    """

    name: str
    path: str
    openstack: str
    is_own: bool

    @property
    def entry_point(self) -> str:
        """Return the name of the entry point of the plug-in of ``openstack``."""
        return f"accelerator_{self.openstack.replace(' ', '_')}"


@dataclass(frozen=True, slots=True)
class Topic:
    """The commands of one noun for one task; ``text`` says what they are for."""

    noun: str
    text: str
    commands: Sequence[CommandEntry]


def _parse_table(table: str) -> dict[str, list[Topic]]:
    """Return the topics of each task; the indent of a line says what it is.

    A task has no indent, a topic (``noun: text``) two blanks, and a command of the topic four: its
    name, its class, and its words in ``openstack`` if these are not those of the name.
    """
    tasks: dict[str, list[Topic]] = {}
    task, commands = "", list[CommandEntry]()
    for line in table.splitlines():
        if line.startswith("#"):
            continue
        if line.startswith("    "):
            name, path, *words = line.split(maxsplit=2)
            spelling = words[0] if words else name.replace("-", " ")
            # In parentheses: the command of another client.
            is_own = not spelling.startswith("(")
            commands.append(CommandEntry(name, path, spelling.strip("()"), is_own))
        elif line.startswith("  "):
            noun, _, text = line.strip().partition(": ")
            # The list of the topic, to which the next lines add.
            commands = []
            tasks[task].append(Topic(noun, text, commands))
        else:
            task = line
            tasks[task] = []
    return tasks


# Text instead of nested calls: a command is one line, as in setup.cfg.
TASKS: Mapping[str, Sequence[Topic]] = _parse_table(
    resources.files(__package__).joinpath("commands.txt").read_text("utf-8")
)
COMMANDS: Mapping[str, CommandEntry] = {
    entry.name: entry for topics in TASKS.values() for topic in topics for entry in topic.commands
}
MAX_WORDS = 4  # of a command
# The names of the commands by their spelling in ``openstack accelerator``.
ALIASES = {
    entry.openstack.replace(" ", "-"): entry.name
    for entry in COMMANDS.values()
    if " " in entry.openstack
}
# Not declared in setup.cfg: openstack has its own commands, also for the commands of our plug-in.
OWN_COMMANDS = {
    name: metadata.EntryPoint(name, f"cyborg.cli.{path}", "cyborg.cli")
    for name, path in (("complete", "completion.command:Complete"), ("help", "commands:Help"))
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
        num_words = 0
        # An option ends the name: its value may be a word of a command.
        while num_words < min(len(argv), MAX_WORDS) and not argv[num_words].startswith("-"):
            num_words += 1
        # The longest name first: what follows a shorter one are its arguments.
        for count in range(num_words, 0, -1):
            name = self._name(argv[:count])
            if name is not None:
                return super().find_command([name, *argv[count:]])
        return super().find_command(argv)

    def _name(self, arguments: list[str]) -> str | None:
        # The last word may be the first of the name: "driver install" is install-driver.
        joined, rotated = "-".join(arguments), "-".join([arguments[-1], *arguments[:-1]])
        names = (joined, rotated, ALIASES.get(joined, ""))
        return next((name for name in names if name in self.commands), None)


USAGE = "cyborg [OPTION]... COMMAND [ARGUMENT]..."
# Column of the descriptions; a longer list of commands moves its own description.
TEXT_COLUMN = 44
_OPTIONS = """\
Options: --os-cloud NAME, others for the login (see --help-auth), --timeout S,
-v, -q, --debug, --log-file FILE, --version
"""
_END = """\
'cyborg device list' is the same as 'cyborg device-list'. 'cyborg help COMMAND'
describes a command; 'cyborg complete SHELL' prints completions for a shell.
"""


def write_screen(out: Any) -> None:
    """Write the help screen to a text stream."""
    out.write(f"usage: {USAGE}\n\nManage the accelerators of an OpenStack cloud.\n{_OPTIONS}")
    for task, topics in TASKS.items():
        out.write(f"\n{task}:\n")
        out.writelines(f"{line}\n" for line in map(_format_topic, topics))
    out.write(f"\n{_END}")


def _format_topic(topic: Topic) -> str:
    verbs = "|".join(verb for entry in topic.commands for verb in _verbs(topic, entry))
    typed = f"  {topic.noun} {verbs}".rstrip()
    return f"{typed:<{TEXT_COLUMN - 2}}  {topic.text}"


def _verbs(topic: Topic, entry: CommandEntry) -> Iterator[str]:
    """Yield what follows the noun in the first spelling that begins with it, if any."""
    noun = topic.noun.split()
    for spelling in (entry.name, entry.openstack):
        words = spelling.replace("-", " ").split()
        if words == noun:
            return
        if words[: len(noun)] == noun:
            yield "-".join(words[len(noun) :])
            return


class Help(cliff_help.HelpCommand):
    """Describe a command; without one, show all commands by task."""

    def take_action(self, parsed_args: Any) -> int:
        """Print the help."""
        if parsed_args.cmd:
            return super().take_action(parsed_args)
        write_screen(self.app.stdout)
        return 0
