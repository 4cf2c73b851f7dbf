# SPDX-License-Identifier: Apache-2.0
"""The ``cyborg`` command: global options and the way to the service; verbs are entry points."""

import argparse
import logging
import sys
from importlib import metadata
from typing import Any

from cliff import app, commandmanager

from cyborg.cli.rest import LATEST, PATIENCE, Rest

LOG = logging.getLogger(__name__)


class Cyborg(app.App):
    """The application; each command finds the service as ``self.app.rest``."""

    NAME = "cyborg"
    LOG = logging.getLogger("cyborg.cli")

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        super().__init__(
            description="Manage the accelerators of an OpenStack cloud.",
            version=metadata.version("cyborg"),
            command_manager=commandmanager.CommandManager("cyborg.cli", convert_underscores=False),
            # So that "cyborg device-list --help" tells of device-list.
            deferred_help=True,
        )
        self.rest: Rest

    def build_option_parser(
        self, description: str | None, version: str | None, argparse_kwargs: Any = None
    ) -> argparse.ArgumentParser:
        """Return the parser of the global options, those of keystoneauth and clouds.yaml included.

        Raises openstack.exceptions.ConfigException for a cloud or a plug-in that does not exist.
        """
        from openstack import config

        # No abbreviations: the options of an authentication plug-in come and go with its name.
        parser = super().build_option_parser(description, version, {"allow_abbrev": False})
        config.OpenStackConfig().register_argparse_arguments(parser, self._argv, ["accelerator"])
        parser.set_defaults(os_accelerator_api_version=None, timeout=None)
        for action in parser._actions:
            if action.dest == "timeout":
                action.help = f"Seconds for one call of the service, default {PATIENCE:g}"
            if action.dest == "os_accelerator_api_version":
                action.help = f"Microversion of the API that is asked for, default {LATEST}"
        return parser

    def run(self, argv: list[str]) -> int:
        """Run one command and leave the process's logging as it was."""
        root = logging.getLogger()
        handlers, level = list(root.handlers), root.level
        try:
            return super().run(argv)
        finally:
            root.setLevel(level)
            for handler in [h for h in root.handlers if h not in handlers]:
                root.removeHandler(handler)
                handler.close()

    def configure_logging(self) -> None:
        """Say warnings and our own errors on stderr; everything with --debug."""
        super().configure_logging()
        if not self.options.debug and self.options.verbose_level <= self.DEFAULT_VERBOSE_LEVEL:
            for name in ("keystoneauth", "openstack", "stevedore", "urllib3"):
                logging.getLogger(name).setLevel(logging.ERROR)

    def initialize_app(self, argv: list[str]) -> None:
        """Make the way to the service; nothing is sent before a command asks."""
        self.rest = Rest(self.options)


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 1 refused or failed, 2 misused."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        " ".join(words).encode()
    except UnicodeEncodeError:
        # Not the words themselves: one may be a password.
        sys.stderr.write("cyborg: the command line is not UTF-8\n")
        return 2
    from openstack import exceptions

    try:
        application = Cyborg(words)
    except exceptions.ConfigException as bad:
        sys.stderr.write(f"cyborg: {bad}\n")
        return 2
    return application.run(words or ["help"])
