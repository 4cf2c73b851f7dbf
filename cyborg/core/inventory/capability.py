# SPDX-License-Identifier: Apache-2.0
"""The capability tree of an accelerator: ``{"num": 2, "ipsec": {"aes": {"3des": 50, "num": 1}}}``.

A key is a function: a capability such as encryption, not a PCI function. Its value has the variants
of the function. ``num`` is a count, not a function. A value of ``0``, ``false``, ``null`` or ``""``
means that the accelerator does not have the function. The tree is stored as the driver reports it,
and flattened to traits for Placement.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from cyborg.core.errors import Invalid
from cyborg.core.naming import make_custom_name

# Levels of nested objects.
MAX_DEPTH = 6
# Bytes of the tree as compact JSON in UTF-8.
MAX_BYTES = 16 * 1024
MAX_TRAITS = 128
# An integer, so that a limit and its absence can be compared.
UNLIMITED = sys.maxsize
COUNT = "num"
INFO_KEY = "acc_capability"
# Characters of one entry: a longer one than 4096 would be cut.
_PIECE = 4000


def validate(tree: Any) -> Mapping[str, Any]:
    """Return the tree if it is valid. Raise Invalid with the path of the first error."""
    if not isinstance(tree, Mapping):
        raise _invalid(f"expected an object, found {type(tree).__name__}")
    _check(tree, path=())
    try:
        # Not as ASCII: an escaped letter would count as six bytes.
        size = len(_text(tree, ascii_only=False).encode("utf-8", "surrogatepass"))
    except ValueError as exc:
        raise _invalid(f"it is not JSON: {exc}") from exc
    if size > MAX_BYTES:
        raise _invalid(f"it has {size} bytes, at most {MAX_BYTES} (16 KiB) are allowed")
    return tree


def build_traits(kind: str, tree: Mapping[str, Any]) -> frozenset[str]:
    """Return a trait for each function, such as ``CUSTOM_CRYPTO_IPSEC_AES``.

    ``kind`` is the accelerator's type. Raise Invalid for a name that cannot be a trait, and for
    more than MAX_TRAITS traits.
    """
    found = frozenset(make_custom_name("_".join((kind, *path))) for path in _functions(tree, ()))
    if len(found) > MAX_TRAITS:
        raise _invalid(f"it has {len(found)} traits, at most {MAX_TRAITS} are allowed")
    return found


def to_board_info(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a device's ``vendor_board_info`` that encode the tree."""
    text = _text(tree) if tree else ""
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    return {
        f"{INFO_KEY}.{number}" if number else INFO_KEY: piece for number, piece in enumerate(pieces)
    }


def from_board_info(board: Mapping[str, str]) -> dict[str, Any]:
    """Return the tree that ``to_board_info`` encoded; empty if it is missing or malformed."""
    return decode_tree(encoded_text(board))


def encoded_text(board: Mapping[str, str]) -> str:
    """Return the text of the tree that ``to_board_info`` encoded; empty if it is missing."""
    pieces: list[str] = []
    # The entries are numbered, since one entry of the board information is cut at 4096 characters.
    while (key := f"{INFO_KEY}.{len(pieces)}" if pieces else INFO_KEY) in board:
        pieces.append(board[key])
    return "".join(pieces)


def decode_tree(text: str) -> dict[str, Any]:
    """Return the tree of an encoded text; empty if the text is empty or malformed."""
    try:
        tree = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}  # another driver's entry of the same name
    return tree if isinstance(tree, dict) else {}


def function_limits(tree: Mapping[str, Any]) -> dict[tuple[str, ...], int]:
    """Return how many accelerators can have each function concurrently, by its path.

    The value is UNLIMITED if the tree has no limit. ``num`` limits its function and all functions
    below it; the path ``()`` is the whole accelerator. Keys are normalised; if two keys become
    equal, the larger limit counts. The tree must be valid.
    """
    found: dict[tuple[str, ...], int] = {}
    _limit(tree, (), UNLIMITED, found)
    return found


def normalise_key(key: str) -> str:
    """Return a key in the form of function names: ``AES-GCM`` becomes ``aes_gcm``."""
    return re.sub(r"[^A-Z0-9]+", "_", key.upper()).strip("_").lower()


def _check(tree: Mapping[str, Any], path: tuple[str, ...]) -> None:
    """Raise Invalid for a malformed part of a capability tree, at ``path``."""
    # Before the recursion goes on: a tree from a driver must not exhaust the stack.
    if len(path) >= MAX_DEPTH:
        raise _invalid(f"{_format_path(path)} is deeper than {MAX_DEPTH} levels")
    for key, value in tree.items():
        key_path = (*path, key)
        if not isinstance(key, str):
            raise _invalid(f"{_format_path(path)} has a key that is not a string: {key!r}")
        try:
            make_custom_name(key)
        except Invalid as exc:
            raise _invalid(f"{_format_path(key_path)}: {exc.message}") from exc
        if isinstance(value, Mapping):
            _check(value, key_path)
        elif value is not None and not isinstance(value, str | int | float):
            raise _invalid(
                f"{_format_path(key_path)} is a {type(value).__name__}; expected an object, "
                "number, string, true, false or null"
            )
        # True is an integer in Python, and no count.
        elif key == COUNT and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise _invalid(
                f"{_format_path(key_path)} is {str(value)[:40]!r}: expected an integer of at "
                "least 0"
            )


def _functions(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        if _is_function(key, value):
            yield (*path, key)
        if isinstance(value, Mapping):
            yield from _functions(value, (*path, key))


def _limit(
    value: Any, path: tuple[str, ...], max_count: int, found: dict[tuple[str, ...], int]
) -> None:
    below = value if isinstance(value, Mapping) else {}
    number = below.get(COUNT)
    if isinstance(number, int):
        max_count = min(max_count, number)
    found[path] = max(max_count, found.get(path, 0))
    for key, inner in below.items():
        if _is_function(key, inner):
            _limit(inner, (*path, normalise_key(key)), max_count, found)


def _is_function(key: str, value: Any) -> bool:
    return isinstance(value, Mapping) or (bool(value) and key != COUNT)


def _text(tree: Mapping[str, Any], *, ascii_only: bool = True) -> str:
    # NaN and infinity are refused: they are no JSON, and other parsers fail on them.
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=ascii_only, allow_nan=False)


def _format_path(path: tuple[str, ...]) -> str:
    return "/".join(str(key)[:40] for key in path) or "the root"


def _invalid(problem: str) -> Invalid:
    return Invalid(f"acc_capability: {problem}", field="acc_capability")
