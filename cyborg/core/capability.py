# SPDX-License-Identifier: Apache-2.0
"""The capability tree of an accelerator: ``{"num": 2, "ipsec": {"aes": {"3des": 50, "num": 1}}}``.

A key is a function; what stands below it is how the function can be had. ``num`` counts and is no
function. A function whose value is ``0``, ``false``, ``null`` or the empty text is one that the
accelerator lacks. The tree is kept as its driver told it, and flattened to traits for Placement.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from cyborg.core.errors import Invalid
from cyborg.core.names import custom

MAX_DEPTH = 6  # objects within each other
MAX_BYTES = 16 * 1024  # of the tree as compact JSON in UTF-8
MAX_TRAITS = 128
UNLIMITED = sys.maxsize
COUNT = "num"
FACT = "acc_capability"
_PIECE = 4000  # characters: a fact of a device is cut at 4096


def check(tree: Any) -> Mapping[str, Any]:
    """Return a tree that can be kept. Raises Invalid, saying where it is wrong."""
    if not isinstance(tree, Mapping):
        raise _wrong(f"expected an object, found {type(tree).__name__}")
    _check(tree, ())
    try:
        # Escapes would count a letter beyond ASCII six times.
        size = len(_text(tree, ascii_only=False).encode("utf-8", "surrogatepass"))
    except ValueError as bad:
        raise _wrong(f"it is not JSON: {bad}") from bad
    if size > MAX_BYTES:
        raise _wrong(f"it has {size} bytes, at most {MAX_BYTES} (16 KiB) fit")
    return tree


def traits(kind: str, tree: Mapping[str, Any]) -> frozenset[str]:
    """Return a trait for each function, such as ``CUSTOM_CRYPTO_IPSEC_AES``.

    ``kind`` is the accelerator's type. Raises Invalid for names of which no trait can be made, and
    for more than 128 traits.
    """
    found = frozenset(custom("_".join((kind, *path))) for path in _functions(tree, ()))
    if len(found) > MAX_TRAITS:
        raise _wrong(f"it comes to {len(found)} traits, at most {MAX_TRAITS} fit")
    return found


def facts(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the tree as entries of a device's ``vendor_board_info``; none for an empty tree."""
    text = _text(tree) if tree else ""
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    return {f"{FACT}.{number}" if number else FACT: piece for number, piece in enumerate(pieces)}


def of_facts(board: Mapping[str, str]) -> dict[str, Any]:
    """Return the tree that ``facts`` put there, empty if there is none or it cannot be read."""
    return read(told(board))


def told(board: Mapping[str, str]) -> str:
    """Return the text of the tree that ``facts`` put there, empty if there is none."""
    pieces: list[str] = []
    while (key := f"{FACT}.{len(pieces)}" if pieces else FACT) in board:
        pieces.append(board[key])
    return "".join(pieces)


def read(text: str) -> dict[str, Any]:
    """Return the tree of a text that ``told`` gave, empty if it is none."""
    try:
        tree = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}  # another driver's fact of the same name
    return tree if isinstance(tree, dict) else {}


def limits(tree: Mapping[str, Any]) -> dict[tuple[str, ...], int]:
    """Return how many accelerators can have each function at once, UNLIMITED where nothing says.

    ``num`` bounds the function it stands in and all below that; ``()`` is the accelerator as a
    whole. Keys are spelled by ``spell``; of two that are then one the larger counts. The tree is
    one that ``check`` has taken.
    """
    found: dict[tuple[str, ...], int] = {}
    _limit(tree, (), UNLIMITED, found)
    return found


def spell(key: str) -> str:
    """Return a key as names of functions have it: ``AES-GCM`` becomes ``aes_gcm``."""
    return re.sub(r"[^A-Z0-9]+", "_", key.upper()).strip("_").lower()


def _check(tree: Mapping[str, Any], path: tuple[str, ...]) -> None:
    if len(path) >= MAX_DEPTH:
        raise _wrong(f"{_at(path)} is deeper than {MAX_DEPTH} levels")
    for key, value in tree.items():
        here = (*path, key)
        if not isinstance(key, str):
            raise _wrong(f"{_at(path)} has a key that is no text: {key!r}")
        try:
            custom(key)
        except Invalid as bad:
            raise _wrong(f"{_at(here)}: {bad.message}") from bad
        if isinstance(value, Mapping):
            _check(value, here)
        elif value is not None and not isinstance(value, str | int | float):
            raise _wrong(
                f"{_at(here)} is a {type(value).__name__}; expected an object, a number, a text, "
                "true, false or null"
            )
        elif key == COUNT and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise _wrong(f"{_at(here)} counts, and {str(value)[:40]!r} is no whole number from 0")


def _functions(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        if _is_function(key, value):
            yield (*path, key)
        if isinstance(value, Mapping):
            yield from _functions(value, (*path, key))


def _limit(value: Any, path: tuple[str, ...], most: int, found: dict[tuple[str, ...], int]) -> None:
    below = value if isinstance(value, Mapping) else {}
    number = below.get(COUNT)
    if isinstance(number, int):
        most = min(most, number)
    found[path] = max(most, found.get(path, 0))
    for key, inner in below.items():
        if _is_function(key, inner):
            _limit(inner, (*path, spell(key)), most, found)


def _is_function(key: str, value: Any) -> bool:
    return isinstance(value, Mapping) or (bool(value) and key != COUNT)


def _text(tree: Mapping[str, Any], *, ascii_only: bool = True) -> str:
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=ascii_only, allow_nan=False)


def _at(path: tuple[str, ...]) -> str:
    return "/".join(str(key)[:40] for key in path) or "the root"


def _wrong(what: str) -> Invalid:
    return Invalid(f"acc_capability: {what}", field="acc_capability")
