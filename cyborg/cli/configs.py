# SPDX-License-Identifier: Apache-2.0
"""How options of a driver are written on a command line: ``--config NAME=VALUE``, once for each.

What the names and values may be is the service's to say, who knows the driver.
"""

import argparse
from collections.abc import Iterable


def parse(text: str) -> tuple[str, str]:
    """Read one option. Raises ArgumentTypeError, which argparse shows with the option's name.

    >>> parse("rule=vendor=10de")
    ('rule', 'vendor=10de')
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as num_devices=2")
    return name.strip(), value


def gather(pairs: Iterable[tuple[str, str]]) -> dict[str, str | list[str]]:
    """Return the options by name; one that is given several times is a list.

    >>> gather([("rule", "a"), ("n", "1"), ("rule", "b")])
    {'rule': ['a', 'b'], 'n': '1'}
    """
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the option to a command."""
    parser.add_argument(
        "--config",
        type=parse,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the driver; give one several times for a list",
    )
