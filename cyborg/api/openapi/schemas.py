# SPDX-License-Identifier: Apache-2.0
"""Convert WSME types to JSON schemas; the descriptions of fields and parameters.

The descriptions are in ``descriptions.ini``.
"""

import configparser
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib import resources
from typing import Any

from wsme import types as wtypes

from cyborg.api import types, versions

Schema = dict[str, Any]

# These exclude control characters. Text.validate is stricter: it requires printable characters,
# which a pattern cannot express.
_PLAIN = r"^[^\u0000-\u001f\u007f-\u009f]*$"
_VERSIONED = re.compile(r"V(\d)(\d+)$")
_LINES = r"^[^\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]*$"
NEXT_LINK = "A link to the next page; absent on the last page."
_PRIMITIVES: Mapping[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    datetime: {"type": "string", "format": "date-time"},
}


class Schemas:
    """Schema generator; ``named`` collects the schemas of object types by name."""

    def __init__(self) -> None:
        self.named: dict[str, Schema] = {}

    def schema_for(self, datatype: Any) -> Schema:
        """Return the schema of a type; for an object type, a reference to its schema."""
        # WSME resolves [item_type] and {key_type: value_type} in attributes of objects, but does
        # not see the schema of a ``types.Validated``, which may have them too.
        if isinstance(datatype, list):
            (item_type,) = datatype
            datatype = wtypes.ArrayType(item_type)
        elif isinstance(datatype, dict):
            ((key_type, value_type),) = datatype.items()
            datatype = wtypes.DictType(key_type, value_type)
        if wtypes.isarray(datatype):
            return _array(self, datatype.item_type)
        if wtypes.isdict(datatype):
            return {"type": "object", "additionalProperties": self.schema_for(datatype.value_type)}
        if wtypes.iscomplex(datatype):
            return self._object(datatype)
        for kind, make_schema in _KINDS:
            if isinstance(datatype, kind):
                return make_schema(self, datatype)
        return dict(_PRIMITIVES[datatype])

    def body_schema(self, datatype: Any, *, ignore_unknown: bool = False) -> Schema:
        """Return the schema of a body; unknown fields are errors unless ``ignore_unknown``."""
        schema = self.schema_for(datatype)
        if wtypes.iscomplex(datatype) and not ignore_unknown:
            self.named[datatype.__name__]["additionalProperties"] = False
        return schema

    def _object(self, datatype: Any) -> Schema:
        name = datatype.__name__
        if name not in self.named:
            schema: Schema = {"type": "object", "description": inspect.getdoc(datatype)}
            # Before its fields: an object may have one of its own type.
            self.named[name] = schema
            attributes = wtypes.list_attributes(datatype)
            schema["properties"] = {a.name: self._property(datatype, a) for a in attributes}
            if required := [a.name for a in attributes if a.mandatory]:
                schema["required"] = required
        return {"$ref": f"#/components/schemas/{name}"}

    def _property(self, datatype: Any, attribute: Any) -> Schema:
        schema = self.schema_for(attribute.datatype)
        if not attribute.mandatory:
            schema = nullable(schema)
        description = describe_field(datatype, attribute.name)
        return {
            **schema,
            **({"description": description} if description else {}),
            **since(_version_of(datatype, attribute.key)),
        }


@functools.cache
def read_descriptions() -> configparser.ConfigParser:
    """Return the descriptions, in the sections ``fields`` and ``parameters``."""
    # Only the first request for the document needs them, no other one of a worker. A name may
    # contain a colon, and upper case has a meaning, other than in most files of this format.
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(resources.files(__package__).joinpath("descriptions.ini").read_text("utf-8"))
    return parser


def _describe(section: str, *names: str) -> str | None:
    """Return the description of the first of the names that has one."""
    texts = read_descriptions()[section]
    text = next((texts[name] for name in names if name in texts), None)
    return None if text is None else text.replace("\n", " ")


def describe_field(datatype: type, name: str) -> str:
    """Return the description of a field of an object, empty if it has none."""
    if name.endswith("_links"):
        return NEXT_LINK
    owners = (_VERSIONED.sub("", cls.__name__) for cls in datatype.__mro__)
    return _describe("fields", *(f"{owner}.{name}" for owner in owners), name) or ""


def describe_parameter(operation_id: str, name: str) -> str:
    """Return the description of a parameter. Raise KeyError if it has none."""
    text = _describe("parameters", f"{operation_id}:{name}", name)
    if text is None:
        raise KeyError(name)
    return text


def since(version: versions.Version) -> Schema:
    """Return the note of a version in an operation, a parameter or a property."""
    if version <= versions.MINIMUM:
        return {}
    return {"x-openstack": {"min-ver": ".".join(map(str, version))}}


def _version_of(datatype: Any, name: str) -> versions.Version:
    """Return the version that added a field, according to the name of its class."""
    # The oldest class with the field: a newer one may narrow its type.
    (owner, *_) = (cls for cls in reversed(datatype.__mro__) if name in vars(cls))
    match = _VERSIONED.search(owner.__name__)
    return (int(match[1]), int(match[2])) if match else versions.MINIMUM


def nullable(schema: Schema) -> Schema:
    """Return a schema that also allows null."""
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _text(_: Schemas, datatype: Any) -> Schema:
    schema: Schema = {
        "type": "string",
        "maxLength": datatype.max_length,
        "pattern": _LINES if datatype.lines else _PLAIN,
    }
    return {**schema, "minLength": datatype.min_length} if datatype.min_length else schema


def _validated(schemas: Schemas, datatype: Any) -> Schema:
    schema = {} if datatype.schema is None else schemas.schema_for(datatype.schema)
    return {**schema, "title": datatype.name}


def _array(schemas: Schemas, item: Any) -> Schema:
    return {"type": "array", "items": schemas.schema_for(item)}


# The first match is used: some types are subclasses of others.
_KINDS: tuple[tuple[type, Callable[[Schemas, Any], Schema]], ...] = (
    (types.Text, _text),
    (types.Uuid, lambda _, datatype: {"type": "string", "format": "uuid"}),
    (
        types.PositiveInt,
        lambda _, datatype: {"type": "integer", "minimum": 1, "maximum": types.MAX_INTEGER},
    ),
    (types.Enum, lambda _, datatype: {"type": "string", "enum": list(datatype.values)}),
    (types.Repeated, lambda schemas, datatype: _array(schemas, datatype.inner)),
    (types.Validated, _validated),
)
