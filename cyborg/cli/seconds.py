# SPDX-License-Identifier: Apache-2.0
"""How a time to wait is written on a command line: seconds, with a fraction if need be."""

import argparse
import math


def parse(text: str) -> float:
    """Read a time. Raises ArgumentTypeError, which argparse shows with the option's name.

    >>> parse("1.5")
    1.5
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # nan is neither, and nothing is ever later than it
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return value
