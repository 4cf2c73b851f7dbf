# SPDX-License-Identifier: Apache-2.0
"""The WSME types that several resources share, and functions to load and serialize values.

A WSME type is the single description of a body: requests are validated by it, responses are
serialized by it, and the OpenAPI document is generated from it.
"""

import functools
from collections import abc
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import wsme.exc
from wsme import types as wtypes
from wsme.rest import json as wsme_json

from cyborg.core.errors import Invalid, NotFound
from cyborg.core.text import to_iso
from cyborg.core.validation import describe_non_uuid, parse_uuid

MAX_SHOWN = 60
MAX_INTEGER = 999_999_999
MAX_VALUES = 1024  # a database statement can have a few thousand parameters only
_LINE_CHARACTERS = "\n\r\t"


# A field of a JSON object that may be missing from a body, and null in a response.
optional = wtypes.wsattr


def required(datatype: Any) -> Any:
    """Return a field of a JSON object that is never missing and never null."""
    return wtypes.wsattr(datatype, mandatory=True)


# The JSON objects of row types, for the fields of other rows that have such rows.
_TYPES: dict[Any, Any] = {}
_NO_NAMES: Mapping[str, str] = {}


class _ObjectType(wtypes.BaseMeta):  # type: ignore[misc]
    """Metaclass of JSON objects: adds the fields of a row type to the class."""

    # Not a class decorator, which would be too late: WSME reads a class when it is created.

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        body: dict[str, Any],
        *,
        row: Any = None,
        only: Collection[str] | None = None,
        without: Collection[str] = (),
        names: Mapping[str, str] = _NO_NAMES,
        counts: Collection[str] = (),
        links: bool = False,
    ) -> Any:
        """Return a class with the fields of ``body`` and of ``row``; see JsonObject."""
        hints = get_type_hints(row) if row is not None else {}
        # Only some queries, such as those of the conductor, read the optional keys of a row.
        omitted = {*without, *getattr(row, "__optional_keys__", ())} - body.keys()
        # Of the row; a field in the body replaces it.
        derived = {
            field: body.get(field) or _field(field, hints[field], names.get(field))
            for field in only or [field for field in hints if field not in omitted]
        }
        declared = {key: value for key, value in body.items() if isinstance(value, wtypes.wsattr)}
        fields = {**derived, **declared, **{field: required(int) for field in counts}}
        if links:
            fields["links"] = required([Link])
        inherited = getattr(bases[0], "_wsme_attr_order", ()) if bases else ()
        # Without _wsme_attr_order, WSME parses the source of each class at import, which takes a
        # second for this API.
        order = tuple(dict.fromkeys([*fields, *inherited]))
        cls = super().__new__(mcs, name, bases, {**body, **fields, "_wsme_attr_order": order})
        # For ``_datatype``: the type of a field that has such a row. A row may have several types
        # with ``only``, which are never that of a field.
        if row is not None and only is None:
            _TYPES[row] = cls
        return cls

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, body)


class JsonObject(wtypes.Base, metaclass=_ObjectType):  # type: ignore[misc]
    """Base class of JSON objects. The fields of a subclass precede those of its base class.

    ``class Audit(JsonObject, row=AuditRow)`` has a field for each field of a row: a TypedDict or a
    dataclass. Keys that are not required are left out. ``without`` leaves out more fields,
    ``names`` has other names for JSON, and ``links`` adds the links to the object. ``counts`` are
    more fields, which are integers and always present. A field in the
    body of the class replaces that of the row: for a narrower type, such as the values of a string,
    or a value that is not shown as it is stored. With ``only``, the class is one of several views
    of the row, and not the type of a field that has such a row.
    """


def _field(name: str, hint: Any, shown: str | None) -> Any:
    """Return the field for a field of a row; it is mandatory unless the row's may be None."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    (kind,) = (option for option in options if option is not NoneType)
    # A uuid is known by its name: that in the row, or that in JSON.
    datatype = Uuid() if kind is str and _names_uuid(name, shown) else _datatype(name, kind)
    return wtypes.wsattr(datatype, name=shown, mandatory=NoneType not in options)


def _names_uuid(*names: str | None) -> bool:
    return any(name and (name == "uuid" or name.endswith("_uuid")) for name in names)


def _datatype(name: str, hint: Any) -> Any:
    """Return the WSME type of the values of a field, from their type in the row.

    ``name`` is for the error only. Raise TypeError if the class has to declare the field.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return Enum(*arguments)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return Enum(*hint)
    if origin in (dict, abc.Mapping):
        key_type, value_type = arguments
        return {key_type: _datatype("", value_type)}
    # Of a tuple, whose arguments are such as (str, ...), the first one is the type of the items.
    if origin in (list, tuple, frozenset, abc.Sequence):
        return [_datatype("", arguments[0])]
    # A row type stands for its JSON object.
    datatype = _TYPES.get(hint, hint)
    if datatype not in (str, int, bool, datetime) and not wtypes.iscomplex(datatype):
        raise TypeError(f"{name}: declare the field: a row type does not define {hint} in JSON")
    return datatype


class Link(JsonObject):
    """A link to a related document."""

    href = required(str)
    rel = required(str)


class Text(wtypes.UserType):  # type: ignore[misc]
    """A string of limited length without control characters.

    With ``lines`` it may have line ends and tabs.
    """

    # Databases reject NUL and lone surrogates.

    basetype = str
    name = "string"

    def __init__(self, max_length: int = 255, *, min_length: int = 0, lines: bool = False) -> None:
        self.max_length = max_length
        self.min_length = min_length
        self.lines = lines

    def validate(self, value: Any) -> str:
        """Return the string. Raise ValueError if it is too short, too long or not printable."""
        if not isinstance(value, str):
            raise ValueError("must be a string")
        if len(value) > self.max_length:
            raise ValueError(f"has {len(value)} characters, at most {self.max_length} are allowed")
        if len(value) < self.min_length:
            raise ValueError(f"has {len(value)} characters, at least {self.min_length} are needed")
        plain = value.translate(dict.fromkeys(map(ord, _LINE_CHARACTERS))) if self.lines else value
        if not plain.isprintable():
            raise ValueError("has non-printable characters")
        return value


class CommaSeparated(Text):
    """A comma-separated list of strings."""

    name = "comma-separated strings"

    def __init__(self, max_length: int = 65536) -> None:
        super().__init__(max_length)

    def validate(self, value: Any) -> tuple[str, ...]:  # type: ignore[override]
        """Return the non-empty strings. Raise ValueError if there are too many."""
        values = tuple(item for raw in super().validate(value).split(",") if (item := raw.strip()))
        if len(values) > MAX_VALUES:
            raise ValueError(f"has {len(values)} values, at most {MAX_VALUES} are allowed")
        return values


class Uuid(wtypes.UserType):  # type: ignore[misc]
    """A uuid in any form that RFC 9562 allows; converted to the canonical form."""

    basetype = str
    name = "uuid"

    def validate(self, value: Any) -> str:
        """Return the canonical form. Raise ValueError if it is not a uuid."""
        try:
            return parse_uuid(value, "uuid")
        except Invalid:
            raise ValueError(describe_non_uuid(str(value)[:MAX_SHOWN])) from None


class UuidOrName(Text):
    """A uuid or a name in a path; a string that cannot be a name gives 404."""

    name = "uuid or name"

    def validate(self, value: Any) -> str:
        """Return the string. Raise NotFound if it cannot be a name."""
        try:
            return super().validate(value)
        except ValueError:
            raise NotFound(f"no object is named {value[:MAX_SHOWN]!r}") from None


class PositiveInt(wtypes.UserType):  # type: ignore[misc]
    """An integer from 1 to MAX_INTEGER, written in decimal digits."""

    basetype = str
    name = "integer"

    def validate(self, value: Any) -> int:
        """Return the number. Raise ValueError if it is not in the range."""
        # isdigit alone accepts other digits than those of ASCII.
        if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value)):
            raise ValueError(f"{value[:MAX_SHOWN]!r} is not an integer from 1 to {MAX_INTEGER}")
        return int(value)


class Enum(wtypes.UserType):  # type: ignore[misc]
    """One of several strings."""

    basetype = str

    def __init__(self, *values: str) -> None:
        self.values = values
        self.name = " or ".join(values)

    def validate(self, value: Any) -> str:
        """Return the string. Raise ValueError if it is none of the values."""
        if value not in self.values:
            raise ValueError(f"{str(value)[:MAX_SHOWN]!r} is unknown, expected {self.name}")
        return str(value)


# A boolean of a query.
TRUTH = Enum("true", "false")


class Repeated(wtypes.UserType):  # type: ignore[misc]
    """A query parameter that may be repeated; each value is of the inner type."""

    basetype = str
    repeated = True

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.name = f"{inner.name}, repeated"

    def validate(self, value: Any) -> Any:
        """Return one value. Raise ValueError if the inner type rejects it."""
        return self.inner.validate(value)


class Validated(wtypes.UserType):  # type: ignore[misc]
    """A value that a function validates. The function returns the value or raises Invalid.

    ``schema`` is the WSME type of the JSON value, for the OpenAPI document only.
    """

    # None: WSME converts nothing, and the function gets the JSON value.
    basetype = None

    def __init__(self, name: str, check: Callable[[Any], Any], schema: Any = None) -> None:
        self.name = name
        self.schema = schema
        self._check = check

    def validate(self, value: Any) -> Any:
        """Return the result of the function. Raise Invalid if it rejects the value."""
        return self._check(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


# A JSON boolean: WSME would accept other types too, such as the string "true".
BOOLEAN = Validated("boolean", _boolean, schema=bool)


def load(datatype: Any, value: Any, name: str) -> Any:
    """Return a value of a request, validated and converted. Raise Invalid with the field."""
    try:
        if wtypes.iscomplex(datatype):
            return _load_object(datatype, value, name)
        if value is None:
            # WSME accepts null for any type without validation.
            raise ValueError("must not be null")
        return wtypes.validate_value(datatype, value)
    except wsme.exc.InvalidInput as exc:
        raise Invalid(f"{exc.fieldname}: {exc.msg}", field=exc.fieldname) from exc
    except ValueError as exc:
        raise Invalid(f"{name}: {exc}", field=name) from exc


def _load_object(datatype: Any, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    attributes = {attribute.name: attribute for attribute in wtypes.list_attributes(datatype)}
    # WSME would name no supported field in its message.
    if unknown := sorted(set(value) - set(attributes)):
        shown = unknown[0][:MAX_SHOWN]
        supported = ", ".join(sorted(attributes))
        raise Invalid(f"{shown}: unknown field, supported: {supported}", field=shown)
    for field, attribute in attributes.items():
        if attribute.mandatory and value.get(field) is None:
            raise Invalid(f"{field}: missing", field=field)
    return wsme_json.fromjson(datatype, value)


def serialize(datatype: Any, row: Any) -> dict[str, Any]:
    """Return a row, a mapping or a dataclass, as the JSON object that its type describes.

    The row may have more fields.
    """
    # WSME's own instances would validate each value, which is ten times slower.
    read = row.__getitem__ if isinstance(row, Mapping) else functools.partial(getattr, row)
    return {name: convert(read(key)) for name, key, convert in _plan(datatype)}


# Cached for each type: the attributes of WSME resolve their types at each access.
@functools.cache
def _plan(datatype: Any) -> tuple[tuple[str, str, Callable[[Any], Any]], ...]:
    return tuple((a.name, a.key, _converter(a.datatype)) for a in wtypes.list_attributes(datatype))


def _converter(datatype: Any) -> Callable[[Any], Any]:
    """Return the function that converts a value of a row; nested objects are rows too."""
    if datatype is datetime:
        return _isoformat
    if wtypes.isarray(datatype) and wtypes.iscomplex(datatype.item_type):
        return lambda rows: [serialize(datatype.item_type, row) for row in rows]
    if wtypes.iscomplex(datatype):
        return lambda row: None if row is None else serialize(datatype, row)
    return lambda value: value


def _isoformat(value: datetime | str | None) -> str | None:
    # Times in the database are naive UTC; times from RPC results are already strings.
    if value is None or isinstance(value, str):
        return value
    return to_iso(value)
