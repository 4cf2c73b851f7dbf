# SPDX-License-Identifier: Apache-2.0
"""Conversion of frozen dataclasses to plain values for the bus, files and JSON columns, and back.

The annotation of a field decides its conversion; ``wire`` declares other rules for a field. A field
without a default is required. Unknown keys are ignored, so that a newer sender may add some.
"""

import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Any, Self, cast

from cyborg.core.validation import boolean, integer, number, optional, string

Convert = Callable[[Any], Any]

_WIRE = "wire"
_SCALARS: Mapping[Any, Convert] = {str: string, int: integer, bool: boolean, float: number}


@dataclass(frozen=True, slots=True)
class _Exceptions:
    """Rules of one field that replace the rules of its annotation."""

    dump: Convert | None = None
    load: Convert | None = None
    required: bool = False
    omit: Callable[[Any], bool] | None = None


def wire(**exceptions: Any) -> Mapping[str, Any]:
    """Return the ``metadata`` of a dataclass field whose annotation does not say how to convert it.

    The functions ``dump`` and ``load`` convert its value. ``required`` is set for a field with a
    default that must be present in plain values. The field is left out of the plain values if the
    function ``omit`` returns true for its value.
    """
    return {_WIRE: _Exceptions(**exceptions)}


class Serializable:
    """Base class of dataclasses that are converted to plain values."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, by name."""
        body = {}
        # Not dataclasses.asdict: it copies every value, and knows no field that is left out.
        for item in _fields_of(cast(Any, type(self))):
            value = getattr(self, item.name)
            if item.omit is None or not item.omit(value):
                body[item.name] = value if item.dump is None else item.dump(value)
        return body

    @classmethod
    def from_dict(cls, body: Any) -> Self:
        """Parse plain values.

        Raise KeyError, TypeError or ValueError if they are malformed, Invalid if the values are not
        allowed.
        """
        if not isinstance(body, Mapping):
            raise TypeError(f"expected an object, found {type(body).__name__}")
        # A field that is missing has its default: an older sender does not know it.
        return cls(
            **{
                item.name: item.load(body[item.name])
                for item in _fields_of(cast(Any, cls))
                if item.required or item.name in body
            }
        )


@dataclass(frozen=True, slots=True)
class _Field:
    """Conversion of one field; ``dump`` is None if its value is plain."""

    name: str
    dump: Convert | None
    load: Convert
    required: bool
    omit: Callable[[Any], bool] | None


# Cached: to evaluate the annotations of a class costs more than to convert a hundred values.
@functools.cache
def _fields_of(cls: Any) -> tuple[_Field, ...]:
    """Return how to dump and load each field of a class."""
    hints = typing.get_type_hints(cls)
    conversions = []
    for item in fields(cls):
        options = item.metadata.get(_WIRE, _Exceptions())
        dump, load = _converters(hints[item.name])
        required = item.default is MISSING and item.default_factory is MISSING
        conversions.append(
            _Field(
                item.name,
                dump=options.dump or dump,
                load=options.load or load,
                required=options.required or required,
                omit=options.omit,
            )
        )
    return tuple(conversions)


def _converters(annotation: Any) -> tuple[Convert | None, Convert]:
    """Return the functions that dump and load values of a type.

    The first function is None if the values are plain: they need no conversion.
    """
    if annotation is Any:
        return _dump_any, lambda value: value
    if annotation in _SCALARS:
        return None, _SCALARS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return None, string
    if origin in (typing.Union, types.UnionType):
        # Of a type and None: no field has another union.
        return _optional(*(a for a in arguments if a is not types.NoneType))
    if origin in (tuple, Sequence, frozenset):
        return _collection(frozenset if origin is frozenset else tuple, arguments[0])
    if origin is Mapping:
        return _mapping(*arguments)
    if issubclass(annotation, StrEnum):
        return str, annotation
    if issubclass(annotation, Serializable):
        return Serializable.to_dict, annotation.from_dict
    raise TypeError(f"no rule converts a field of type {annotation}")


def _optional(annotation: Any) -> tuple[Convert | None, Convert]:
    dump, load = _converters(annotation)
    return (
        None if dump is None else functools.partial(optional, dump),
        functools.partial(optional, load),
    )


def _collection(kind: type, annotation: Any) -> tuple[Convert, Convert]:
    dump, load = _converters(annotation)
    # A set has no order of its own, and the digest of a report must not depend on one.
    order: Convert = sorted if kind is frozenset else list
    return (
        order if dump is None else lambda values: order(map(dump, values)),
        lambda values: kind(load(value) for value in as_list(values)),
    )


def _mapping(key: Any, value: Any) -> tuple[Convert, Convert]:
    """Return the functions that dump and load mappings of these annotations."""
    # Keys are dumped as they are: all of them are texts.
    _, load_key = _converters(key)
    dump, load = _converters(value)

    def load_items(items: Any) -> dict[Any, Any]:
        if not isinstance(items, Mapping):
            raise TypeError(f"expected an object, found {type(items).__name__}")
        return {load_key(name): load(item) for name, item in items.items()}

    return (
        dict if dump is None else lambda items: {name: dump(item) for name, item in items.items()},
        load_items,
    )


def as_list(values: Any) -> Sequence[Any]:
    """Return the values. Raise TypeError if they are not a list."""
    if not isinstance(values, list | tuple):
        raise TypeError(f"expected a list, found {type(values).__name__}")
    return values


def _dump_any(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _dump_any(item) for name, item in value.items()}
    # A tuple becomes a list, as JSON makes of it: otherwise what is read differs from what was
    # dumped.
    return [_dump_any(item) for item in value] if isinstance(value, list | tuple) else value
