# SPDX-License-Identifier: Apache-2.0
"""Parser of driver options on the command line: ``--config NAME=VALUE``, repeatable.

The service validates names and values, because it knows the driver.
"""

import argparse
from collections.abc import Iterable

from cyborg.cli.common.base import argument


def parse_option(text: str) -> tuple[str, str]:
    """Parse an option. Raise ArgumentTypeError, which argparse shows with the argument's name.

    >>> parse_option("rule=vendor=10de")
    ('rule', 'vendor=10de')
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form NAME=VALUE, such as num_devices=2"
        )
    return name.strip(), value


def collect_options(pairs: Iterable[tuple[str, str]]) -> dict[str, str | list[str]]:
    """Return the options by name; a repeated option becomes a list.

    >>> collect_options([("rule", "a"), ("n", "1"), ("rule", "b")])
    {'rule': ['a', 'b'], 'n': '1'}
    """
    options: dict[str, list[str]] = {}
    for name, value in pairs:
        options.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in options.items()}


CONFIG = argument(
    "--config",
    type=parse_option,
    action="append",
    default=[],
    metavar="NAME=VALUE",
    help="set an option of the driver; repeat it with the same NAME for a list of values",
)
