# SPDX-License-Identifier: Apache-2.0
"""The help screen of ``cyborg``: the commands by task, without the options of the login."""

from collections.abc import Iterator
from typing import Any

from cliff import help as cliff_help

from cyborg.cli.help.table import TASKS, CommandEntry, Topic

USAGE = "cyborg [OPTION]... COMMAND [ARGUMENT]..."
TEXT_COLUMN = 44
"""Column of the descriptions; a longer list of commands moves its own description."""
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
