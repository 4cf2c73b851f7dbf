# SPDX-License-Identifier: Apache-2.0
"""WSME types as JSON schemas: the types say what there is, and nothing is told a second time."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types

Schema = dict[str, Any]

# What a text without line ends surely lacks; that it can be printed is more than a pattern tells.
_PLAIN = r"^[^\u0000-\u001f\u007f-\u009f]*$"
_LINES = r"^[^\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]*$"
_PRIMITIVES: Mapping[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    datetime: {"type": "string", "format": "date-time"},
}


class Schemas:
    """Makes schemas; ``named`` holds those of the objects that have been met, by their names."""

    def __init__(self) -> None:
        self.named: dict[str, Schema] = {}

    def of(self, datatype: Any) -> Schema:
        """Return the schema of a type; that of an object is a reference."""
        # Within a description a type may be written as a list or dict of another.
        if isinstance(datatype, list):
            datatype = wtypes.ArrayType(datatype[0])
        elif isinstance(datatype, dict):
            datatype = wtypes.DictType(*next(iter(datatype.items())))
        if wtypes.isarray(datatype):
            return {"type": "array", "items": self.of(datatype.item_type)}
        if wtypes.isdict(datatype):
            return {"type": "object", "additionalProperties": self.of(datatype.value_type)}
        if wtypes.iscomplex(datatype):
            return self._object(datatype)
        for kind, schema in _KINDS:
            if isinstance(datatype, kind):
                return schema(self, datatype)
        return dict(_PRIMITIVES[datatype])

    def body(self, datatype: Any, *, lenient: bool = False) -> Schema:
        """Return the schema of a body; unless ``lenient`` no field beside the type's is allowed."""
        schema = self.of(datatype)
        if wtypes.iscomplex(datatype) and not lenient:
            self.named[datatype.__name__]["additionalProperties"] = False
        return schema

    def _object(self, datatype: Any) -> Schema:
        name = datatype.__name__
        if name not in self.named:
            schema: Schema = {"type": "object", "description": datatype.__doc__}
            self.named[name] = schema
            attributes = wtypes.list_attributes(datatype)
            schema["properties"] = {
                a.name: self.of(a.datatype) if a.mandatory else nullable(self.of(a.datatype))
                for a in attributes
            }
            if required := [a.name for a in attributes if a.mandatory]:
                schema["required"] = required
        return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    """Return a schema that takes null besides."""
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _text(_: Schemas, datatype: Any) -> Schema:
    schema: Schema = {
        "type": "string",
        "maxLength": datatype.longest,
        "pattern": _LINES if datatype.lines else _PLAIN,
    }
    return {**schema, "minLength": datatype.shortest} if datatype.shortest else schema


def _checked(schemas: Schemas, datatype: Any) -> Schema:
    shape = {} if datatype.like is None else schemas.of(datatype.like)
    return {**shape, "description": datatype.name}


# The first that fits counts.
_KINDS: tuple[tuple[type, Callable[[Schemas, Any], Schema]], ...] = (
    (types.Text, _text),
    (types.Uuid, lambda _, datatype: {"type": "string", "format": "uuid"}),
    (types.Count, lambda _, datatype: {"type": "integer", "minimum": 1, "maximum": types.MOST}),
    (types.OneOf, lambda _, datatype: {"type": "string", "enum": list(datatype.words)}),
    (types.Many, lambda schemas, its: {"type": "array", "items": schemas.of(its.each)}),
    (types.Checked, _checked),
)
