# SPDX-License-Identifier: Apache-2.0
"""Plain values that came from outside, each of the type that it must have."""

from collections.abc import Mapping
from typing import Any


def string(value: Any) -> str:
    """Return a value that must be a string. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"expected a string, found {type(value).__name__}")
    return value


def integer(value: Any) -> int:
    """Return a value that must be a whole number. Raises TypeError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected an integer, found {type(value).__name__}")
    return value


def flag(value: Any) -> bool:
    """Return a value that must be true or false. Raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, found {type(value).__name__}")
    return value


def strings(value: Any) -> dict[str, str]:
    """Return a value that must be a map of strings. Raises TypeError."""
    if not isinstance(value, Mapping):
        raise TypeError(f"expected an object, found {type(value).__name__}")
    return {string(k): string(v) for k, v in value.items()}
