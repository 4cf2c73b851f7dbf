# SPDX-License-Identifier: Apache-2.0
"""Parser of a duration on the command line: seconds, optionally with a fraction."""

import argparse
import math


def parse_seconds(text: str) -> float:
    """Parse a duration. Raise ArgumentTypeError, which argparse shows with the argument's name.

    >>> parse_seconds("1.5")
    1.5
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # nan also fails this: no deadline would ever be reached
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return value
