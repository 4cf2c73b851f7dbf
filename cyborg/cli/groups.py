# SPDX-License-Identifier: Apache-2.0
"""How a request group of a device profile is written on a command line.

Either ``resources:FPGA=1,trait:CUSTOM_X=required`` or a JSON object with the same keys. What the
keys and amounts may be is the service's to say, so that there is one judge.
"""

import argparse
import json


def parse(text: str) -> dict[str, str]:
    """Read one group. Raises ArgumentTypeError, which argparse shows with the option's name.

    >>> parse("resources:FPGA=1, trait:CUSTOM_X=required")
    {'resources:FPGA': '1', 'trait:CUSTOM_X': 'required'}
    """
    return _json(text) if text.lstrip().startswith(("{", "[")) else _words(text)


def _json(text: str) -> dict[str, str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as bad:
        raise argparse.ArgumentTypeError(f"not JSON: {bad}") from bad
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON group must be one object")
    return {key: item if isinstance(item, str) else json.dumps(item) for key, item in value.items()}


def _words(text: str) -> dict[str, str]:
    group: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not key:
            raise argparse.ArgumentTypeError(
                f"{part.strip()!r} is not KEY=VALUE, such as resources:FPGA=1"
            )
        if key in group:
            raise argparse.ArgumentTypeError(f"{key} is given twice")
        group[key] = value
    return group
