# SPDX-License-Identifier: Apache-2.0
"""Parser of a request group of a device profile on the command line.

The syntax is ``resources:FPGA=1,trait:CUSTOM_X=required`` or a JSON object with the same keys. Only
the service validates keys and amounts.
"""

import argparse
import json


def parse_group(text: str) -> dict[str, str]:
    """Parse a group. Raise ArgumentTypeError, which argparse shows with the argument's name.

    >>> parse_group("resources:FPGA=1, trait:CUSTOM_X=required")
    {'resources:FPGA': '1', 'trait:CUSTOM_X': 'required'}
    """
    return _parse_json(text) if text.lstrip().startswith(("{", "[")) else _parse_pairs(text)


def _parse_json(text: str) -> dict[str, str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise argparse.ArgumentTypeError(f"not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON group must be an object")
    return {key: item if isinstance(item, str) else json.dumps(item) for key, item in value.items()}


def _parse_pairs(text: str) -> dict[str, str]:
    group: dict[str, str] = {}
    for pair in text.split(","):
        key, equals, value = pair.strip().partition("=")
        if not equals or not key:
            raise argparse.ArgumentTypeError(
                f"{pair.strip()!r} is not of the form KEY=VALUE, such as resources:FPGA=1"
            )
        if key in group:
            raise argparse.ArgumentTypeError(f"duplicate key {key}")
        group[key] = value
    return group
