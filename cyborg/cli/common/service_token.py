# SPDX-License-Identifier: Apache-2.0
"""The option ``--service-token``, and the base of the commands that have it."""

import argparse
import os
from typing import Any

from cyborg.cli.common.base import Command, argument


def _token(text: str) -> str:
    token = text.strip()
    # The error does not contain the token, because terminal output can be logged.
    if not token.isascii() or any(letter <= " " or letter == "\x7f" for letter in token):
        raise argparse.ArgumentTypeError("a token must be one word of printable ASCII characters")
    return token


# Changes of bound requests require a service token, such as that of Nova.
SERVICE_TOKEN = argument(
    "--service-token",
    type=_token,
    metavar="TOKEN",
    help="token of a service user, such as nova; with keystone it is required to bind requests "
    "and to change bound ones (Env: OS_CYBORG_SERVICE_TOKEN)",
)


class ServiceTokenCommand(Command):
    """Base of the commands that send a service token."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the option for the service token, with its default from the environment."""
        parser = super().get_parser(prog_name)
        parser.set_defaults(service_token=os.environ.get("OS_CYBORG_SERVICE_TOKEN"))
        return parser

    def call(
        self, args: argparse.Namespace, method: str, path: str, body: Any, **options: Any
    ) -> Any:
        """Call the service with the token, and return its answer."""
        return self.app.rest.call(method, path, body, service_token=args.service_token, **options)
