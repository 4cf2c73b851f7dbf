# SPDX-License-Identifier: Apache-2.0
"""The ``cyborg`` command: global options and REST client; the commands are entry points."""

import argparse
import contextlib
import logging
import sys
from importlib import metadata
from typing import Any

from cliff.help import HelpExit

from cyborg.cli.commands import USAGE, CommandManager, write_screen
from cyborg.cli.common import base
from cyborg.cli.common.rest import DEFAULT_MICROVERSION, DEFAULT_TIMEOUT, RestClient
from cyborg.cli.common.usage import HIDDEN, RedactedStream, find_secrets, shorten_errors

LOG = logging.getLogger(__name__)


class CyborgApp(base.RestApp):
    """The application; commands call the service through ``self.app.rest``."""

    NAME = "cyborg"
    LOG = logging.getLogger("cyborg.cli")

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        super().__init__(
            description="Options before the command; 'cyborg --help' lists the commands.",
            version=metadata.version("cyborg"),
            command_manager=CommandManager("cyborg.cli", convert_underscores=False),
            # "cyborg device-list --help" must print the help of device-list.
            deferred_help=True,
        )

    def build_option_parser(
        self, description: str | None, version: str | None, argparse_kwargs: Any = None
    ) -> argparse.ArgumentParser:
        """Return the parser of the global options, including those of keystoneauth.

        Raise openstack.exceptions.ConfigException for an unknown cloud or plug-in.
        """
        from openstack import config

        # ``argparse_kwargs`` is for subclasses: cliff calls this method without it. No
        # abbreviations: the set of options depends on the authentication plug-in.
        arguments = {"allow_abbrev": False, "usage": USAGE}
        parser = super().build_option_parser(description, version, arguments)
        shorten_errors(parser)
        parser.add_argument(
            "--help-auth",
            action="store_true",
            help="Show these options, which depend on --os-auth-type, and exit.",
        )
        config.OpenStackConfig().register_argparse_arguments(parser, self._argv, ["accelerator"])
        # With the defaults of the SDK, RestClient could not see that an option was not given: then
        # clouds.yaml or DEFAULT_TIMEOUT decides, and DEFAULT_MICROVERSION.
        parser.set_defaults(os_accelerator_api_version=None, timeout=None)
        for action in parser._actions:
            if action.dest == "timeout":
                action.help = (
                    f"Timeout of a call to the service in seconds, default {DEFAULT_TIMEOUT:g}"
                )
            if action.dest == "os_accelerator_api_version":
                action.help = f"Requested microversion of the API, default {DEFAULT_MICROVERSION}"
        return parser

    def print_help_if_requested(self) -> None:
        """Print the commands for --help, or the options before a command for --help-auth."""
        if self.options.help_auth:
            self.parser.print_help(self.stdout)
        elif self.options.deferred_help:
            write_screen(self.stdout)
        else:
            return
        raise HelpExit

    def run(self, argv: list[str]) -> int:
        """Run one command and restore the logging configuration of the process."""
        # A process can run several commands, as the tests do, and cliff adds handlers at each run.
        root = logging.getLogger()
        handlers, level = list(root.handlers), root.level
        try:
            return super().run(argv)
        finally:
            root.setLevel(level)
            for handler in [h for h in root.handlers if h not in handlers]:
                root.removeHandler(handler)
                handler.close()

    def run_subcommand(self, argv: list[str]) -> int:
        """Run a command. The message about an unknown one repeats all words, but no secret."""
        try:
            # Looked up here first: for an unknown command, cliff prints all words that it was
            # given.
            self.command_manager.find_command(argv)
        except ValueError:
            secrets = {*find_secrets(argv), *find_secrets(self._argv)}
            argv = [
                HIDDEN if word in secrets or word.partition("=")[2] in secrets else word
                for word in argv
            ]
        return super().run_subcommand(argv)

    def configure_logging(self) -> None:
        """Log warnings and errors of Cyborg to stderr; with --debug log everything."""
        super().configure_logging()
        if not self.options.debug and self.options.verbose_level <= self.DEFAULT_VERBOSE_LEVEL:
            # Their errors reach the user as a CommandError of one line.
            for name in ("keystoneauth", "openstack", "stevedore", "urllib3"):
                logging.getLogger(name).setLevel(logging.ERROR)

    def initialize_app(self, argv: list[str]) -> None:
        """Create the REST client; it connects when a command makes the first call."""
        self.rest = RestClient(self.options)


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0 success, 1 error, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        " ".join(arguments).encode()
    except UnicodeEncodeError:
        # The words are not printed: one can be a password.
        sys.stderr.write("cyborg: the command line is not UTF-8\n")
        return 2
    with contextlib.ExitStack() as stack:
        if secrets := list(find_secrets(arguments)):
            stream: Any = RedactedStream(sys.stderr, secrets)
            stack.enter_context(contextlib.redirect_stderr(stream))
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    """Run the command of these arguments; return the exit status."""
    from openstack import exceptions

    # argparse would only say that there is no such option.
    if arguments and arguments[0].partition("=")[0] == "--service-token":
        sys.stderr.write(
            "cyborg: --service-token follows the command, as in: cyborg arq-unbind ARQ "
            "--service-token TOKEN\n"
        )
        return 2
    try:
        application = CyborgApp(arguments)
    except exceptions.ConfigException as exc:
        sys.stderr.write(f"cyborg: {exc}\n")
        return 2
    # Without words, cliff would start its interactive shell.
    return application.run(arguments or ["help"])
