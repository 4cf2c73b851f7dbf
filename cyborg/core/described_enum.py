# SPDX-License-Identifier: Apache-2.0
"""Enumerations of texts whose members are described where they are declared."""

from enum import StrEnum
from typing import Self


class DescribedEnum(StrEnum):
    """Enumeration with a ``description`` of each member: ``NAME = "value", "A sentence."``."""

    description: str

    # The default is for mypy, which takes the lookup of a value for a call with one argument.
    def __new__(cls, value: str, description: str = "") -> Self:
        """Return a new member. Raise TypeError without a description."""
        if not description:
            raise TypeError(f"{cls.__name__} {value} has no description")
        member = str.__new__(cls, value)
        member._value_ = value
        member.description = description
        return member
