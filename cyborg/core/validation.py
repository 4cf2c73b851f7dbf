# SPDX-License-Identifier: Apache-2.0
"""Type checks of plain values from JSON or the bus."""

from collections.abc import Mapping
from typing import Any


def string(value: Any) -> str:
    """Return the value. Raise TypeError if it is not a string."""
    if not isinstance(value, str):
        raise TypeError(f"expected a string, found {type(value).__name__}")
    return value


def integer(value: Any) -> int:
    """Return the value. Raise TypeError if it is not an integer; a boolean is none."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected an integer, found {type(value).__name__}")
    return value


def number(value: Any) -> float:
    """Return the value. Raise TypeError if it is not a number; a boolean is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"expected a number, found {type(value).__name__}")
    return float(value)


def boolean(value: Any) -> bool:
    """Return the value. Raise TypeError if it is not a boolean."""
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, found {type(value).__name__}")
    return value


def string_map(value: Any) -> dict[str, str]:
    """Return the value as a dict. Raise TypeError if it is not a mapping of strings to strings."""
    if not isinstance(value, Mapping):
        raise TypeError(f"expected an object, found {type(value).__name__}")
    return {string(k): string(v) for k, v in value.items()}
