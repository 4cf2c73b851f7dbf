# SPDX-License-Identifier: Apache-2.0
"""How objects look: columns in tables, real values in JSON and YAML."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cliff import columns

# A column is (heading, key of the REST object).
Columns = Sequence[tuple[str, str]]

_PCI = frozenset({"domain", "bus", "device", "function"})


class Structure(columns.FormattableColumn[Any]):
    """An object or list: itself for machines, ``key=value`` words for people."""

    def human_readable(self) -> str:
        """Return the words."""
        return words(self._value)


def words(value: Any) -> str:
    """Return a structure as a line of words.

    >>> words([{"resources:FPGA": "1", "trait:CUSTOM_A": "required"}, {"a": {"b": 1}}])
    'resources:FPGA=1 trait:CUSTOM_A=required, a=(b=1)'

    The four parts of a PCI address are written as one.

    >>> words({"domain": "0000", "bus": "3b", "device": "00", "function": "1"})
    '0000:3b:00.1'
    """
    if isinstance(value, Mapping):
        if value.keys() == _PCI:
            return "{domain}:{bus}:{device}.{function}".format_map(value)
        return " ".join(f"{k}={_inner(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(words(v) for v in value)
    return "" if value is None else str(value)


def _inner(value: Any) -> str:
    return f"({words(value)})" if isinstance(value, Mapping | list | tuple) else words(value)


def cell(value: Any) -> Any:
    """Return a value as cliff shows it best; JSON within a string is opened."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            opened = json.loads(value)
            words(opened)
        except (ValueError, RecursionError):
            # Free text may begin so, and go on like that for thousands of brackets.
            return value
        value = opened
    if isinstance(value, columns.FormattableColumn):
        return value
    # Nothing is null for machines and an empty cell for people, not Python's word for it.
    plain = value is not None and not isinstance(value, Mapping | list | tuple)
    return value if plain else Structure(value)


def table(
    shown: Columns, rows: Iterable[Mapping[str, Any]]
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Return headings and rows for a Lister."""
    return (
        tuple(heading for heading, _ in shown),
        [tuple(cell(row.get(key)) for _, key in shown) for row in rows],
    )


def one(shown: Columns, row: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return headings and values for a ShowOne."""
    headings, rows = table(shown, [row])
    return headings, rows[0]
