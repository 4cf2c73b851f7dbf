# SPDX-License-Identifier: Apache-2.0
"""Formatting of objects: text in tables, plain values in JSON, YAML, CSV and ``value``."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cliff import columns

# A column is (heading, key of the REST object).
Columns = Sequence[tuple[str, str]]

_HEADINGS = {"uuid": "UUID", "numa_node": "NUMA node"}


def columns_of(fields: str, after: Columns = ()) -> Columns:
    """Return the columns ``after``, followed by the columns of these fields.

    The heading is derived from the name of the field unless it is given.

    >>> columns_of("uuid, state_reasons, created_at, hostname=Host")[1:]
    (('State reasons', 'state_reasons'), ('Created', 'created_at'), ('Host', 'hostname'))
    """
    pairs = (field.strip().partition("=") for field in fields.split(","))
    return (*after, *((heading or _heading(key), key) for key, _, heading in pairs))


def _heading(key: str) -> str:
    return _HEADINGS.get(key) or key.removesuffix("_at").replace("_", " ").capitalize()


UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
UUID_LENGTH = 36  # characters
MAX_JSON_DEPTH = 100  # nested brackets of parsed JSON
UUID_PREFIXES = (8, 13, 18)  # lengths of abbreviated uuids, which end before a dash
SHORT_UUID = UUID_PREFIXES[0]
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?\+00:00")
_JSON_FIELDS = frozenset({"std_board_info", "vendor_board_info", "attributes_list"})
_PCI = frozenset({"domain", "bus", "device", "function"})


class Cell(columns.FormattableColumn[Any]):
    """A value with a display text. Cells are sorted by value; empty cells are last."""

    def human_readable(self) -> str:
        """Return the display text."""
        return "" if self._value is None else str(self._value)

    def __lt__(self, other: object) -> bool:
        return _rank(self) < _rank(other)

    def __gt__(self, other: object) -> bool:
        # A comparison of a plain string with a cell calls this method of the cell.
        return _rank(self) > _rank(other)


class Structure(Cell):
    """An object or list, displayed as ``key=value`` text."""

    def human_readable(self) -> str:
        """Return the display text."""
        return to_text(self._value)


class Text(Cell):
    """A value with a different display text, such as an abbreviated uuid."""

    def __init__(self, value: Any, text: str) -> None:
        super().__init__(value)
        self._text = text

    def human_readable(self) -> str:
        """Return the display text."""
        return self._text


class Time(Cell):
    """A time in UTC, displayed without microseconds."""

    def human_readable(self) -> str:
        """Return the time without fractions of seconds."""
        return _TIME.sub(r"\1Z", str(self._value))


def _rank(item: object) -> tuple[bool, str]:
    value = item.machine_readable() if isinstance(item, columns.FormattableColumn) else item
    # By text: values of one column can have types that do not compare.
    return value is None, str(value)


def to_text(value: Any) -> str:
    """Return a structure as one line of text.

    >>> to_text([{"resources:FPGA": "1", "trait:CUSTOM_A": "required"}, {"a": {"b": 1}}])
    'resources:FPGA=1 trait:CUSTOM_A=required, a=(b=1)'

    The four fields of a PCI address are joined.

    >>> to_text({"domain": "0000", "bus": "3b", "device": "00", "function": "1"})
    '0000:3b:00.1'
    """
    if isinstance(value, Mapping):
        # Only if there is no other field, which would be lost.
        if value.keys() == _PCI:
            return _pci_address(value)
        return " ".join(f"{k}={_nested_text(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(to_text(v) for v in value)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def _nested_text(value: Any) -> str:
    return f"({to_text(value)})" if isinstance(value, Mapping | list | tuple) else to_text(value)


def _pci_address(fields: Mapping[str, Any]) -> str:
    return "{domain}:{bus}:{device}.{function}".format_map(fields)


def format_address(info: Any) -> str | None:
    """Return the address of an attach handle as one string, for all output formats.

    >>> handle = {"domain": "0000", "bus": "3b", "device": "00", "function": "1", "vgpu_mark": "x"}
    >>> format_address(handle)
    '0000:3b:00.1'
    """
    value = _parse_json(info)
    if isinstance(value, Mapping) and value.keys() >= _PCI:
        return _pci_address(value)
    return to_text(value) or None


def _parse_json(value: Any) -> Any:
    """Return the parsed value of a JSON string; any other value unchanged."""
    # Free text can begin with a bracket, and can contain thousands of nested brackets.
    if not isinstance(value, str) or value[:1] not in ("{", "[") or _depth(value) > MAX_JSON_DEPTH:
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _depth(text: str) -> int:
    """Return the maximum nesting of brackets in a text, including those in strings."""
    max_depth = depth = 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        max_depth = max(max_depth, depth)
    return max_depth


def read_value(row: Mapping[str, Any], key: str) -> Any:
    """Return a value of an object, parsed if the service has it as the text of a JSON object.

    Any other text is unchanged.
    """
    # Not by the look of a text: the name of a user can look like JSON.
    value = row.get(key)
    return _parse_json(value) if key in _JSON_FIELDS else value


def to_cell(value: Any, digits: int = UUID_LENGTH) -> Any:
    """Return a value in the form that cliff can print: a plain value or a cell.

    ``digits`` is the number of displayed characters of a uuid.
    """
    if isinstance(value, columns.FormattableColumn):
        return value
    if isinstance(value, str):
        if UUID.fullmatch(value) and digits < UUID_LENGTH:
            return Text(value, value[:digits])
        return Time(value) if _TIME.fullmatch(value) else value
    # In tables, None is an empty cell and a boolean has the spelling of JSON.
    is_plain = value is not None and not isinstance(value, bool | Mapping | list | tuple)
    return value if is_plain else Structure(value)


def uuid_digits(values: Iterable[Any]) -> int:
    """Return how many digits of each uuid to display in a column of these values.

    They are eight, or more if the first eight digits of two uuids are equal.
    """
    uuids = {value for value in values if isinstance(value, str) and UUID.fullmatch(value)}
    # The same length for all rows, so that a column is aligned.
    unambiguous = (n for n in UUID_PREFIXES if len({uuid[:n] for uuid in uuids}) == len(uuids))
    return next(unambiguous, UUID_LENGTH)


def build_object(shown: Columns, row: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return headings and values for a ShowOne."""
    values = (to_cell(read_value(row, key)) for _, key in shown)
    return tuple(heading for heading, _ in shown), tuple(values)
