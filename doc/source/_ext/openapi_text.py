# SPDX-License-Identifier: Apache-2.0
"""Describe the operations and objects of an OpenAPI document in reStructuredText."""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]
Lines = list[str]
_VERSIONED = re.compile(r"V\d+$")
_PLAIN_TYPES = {"boolean": "true or false", "number": "number", "object": "object"}
_FORMATS = {"uuid": "uuid", "date-time": "time (ISO 8601, UTC)"}
_FIRST_VERSION = "2.0"
_POLICY = re.compile(r"\n\nPolicy: (?P<rule>\S+)\.$")
_SINCE = re.compile(r"\n\nFrom version \S+ on\.")


class Reference:
    """The texts of one page: ``page`` is the prefix of the labels of its objects."""

    def __init__(self, document: Json, examples: Json, page: str) -> None:
        self._document, self._examples, self._page = document, examples, page
        self._schemas: Json = document["components"]["schemas"]

    def list_operations(self, tag: str | None = None) -> Iterator[tuple[str, str, Json]]:
        """Yield path, method and declaration of each operation, or of those with a tag."""
        for path, methods in self._document["paths"].items():
            for method, operation in methods.items():
                if tag is None or tag in operation["tags"]:
                    yield path, method.upper(), operation

    def describe_tags(self, tags: Sequence[str]) -> Lines:
        """Return the sections of all operations with the tags, and of their objects."""
        lines: Lines = []
        found: dict[str, None] = {}
        for tag in tags:
            for path, method, operation in self.list_operations(tag):
                lines += self._describe_operation(path, method, operation)
                found |= dict.fromkeys(self._find_objects(operation))
        lines += ["Objects", "=======", ""]
        for name in sorted(found, key=short_name):
            lines += self._describe_object(name)
        return lines

    def list_all(self) -> Lines:
        """Return a table of all operations with links."""
        rows = [
            [
                f":ref:`{method} /v2{path} <{operation_label(operation)}>`",
                since(operation) or _FIRST_VERSION,
                operation["summary"],
            ]
            for path, method, operation in self.list_operations()
        ]
        return table(["Operation", "Since", "What it does"], rows, "44 8 48")

    def describe_errors(self) -> Lines:
        """Return a table of the error statuses, and the recorded errors."""
        responses = self._document["components"]["responses"]
        rows = [[f"``{status}``", answer["description"]] for status, answer in responses.items()]
        lines = table(["Status", "When"], rows, "12 88")
        for example in self._examples["errors"]:
            lines += exchange(example)
        return lines

    def _describe_operation(self, path: str, method: str, operation: Json) -> Lines:
        title = f"{method} /v2{path}"
        description = operation["description"]
        policy = _POLICY.search(description)
        text = _SINCE.sub("", _POLICY.sub("", description))
        lines = [f".. _{operation_label(operation)}:", "", title, "=" * len(title), "", text, ""]
        lines += [f":Since: microversion {since(operation) or _FIRST_VERSION}"]
        if policy:
            lines += [f":Policy: ``{policy['rule']}``"]
        if "security" in operation:
            lines += [":Tokens: of the user, and of a service (``X-Service-Token``)"]
        lines += ["", *self._describe_parameters(operation)]
        if "requestBody" in operation:
            lines += [*rubric("Body"), *self._describe_body(operation["requestBody"])]
        lines += [*rubric("Answers"), *self._describe_answers(operation)]
        example = self._examples["operations"][operation["operationId"]]
        return [*lines, *rubric("Example"), *exchange(example)]

    def _describe_parameters(self, operation: Json) -> Lines:
        rows = [
            [
                f"``{parameter['name']}``" + (" (required)" if parameter["required"] else ""),
                parameter["in"],
                self.type_of(parameter["schema"]),
                since(parameter) or since(operation) or _FIRST_VERSION,
                parameter["description"],
            ]
            for parameter in operation["parameters"]
            if "name" in parameter
        ]
        if not rows:
            return []
        header = ["Parameter", "In", "Type", "Since", "Description"]
        return [*rubric("Parameters"), *table(header, rows, "20 8 24 8 40")]

    def _describe_body(self, body: Json) -> Lines:
        schema = body["content"]["application/json"]["schema"]
        kind = self.type_of(schema)
        lines = [f"{kind[0].upper()}{kind[1:]}" + ("" if body["required"] else " (optional)"), ""]
        for name in references(schema, deep=False):
            lines += [self._schemas[name]["description"], "", *self._fields(name, is_body=True)]
        return lines

    def _describe_answers(self, operation: Json) -> Lines:
        rows = []
        for status, answer in operation["responses"].items():
            if "$ref" in answer:
                shared = self._document["components"]["responses"][status]
                rows.append([f"``{status}``", shared["description"], ":ref:`api-errors`"])
            else:
                content = answer.get("content", {}).get("application/json")
                kind = self.type_of(content["schema"]) if content else "empty"
                rows.append([f"``{status}``", answer["description"], kind])
        return table(["Status", "Meaning", "Body"], rows, "10 65 25")

    def _find_objects(self, operation: Json) -> Iterator[str]:
        """Yield the objects of the answer and of the body."""
        pending = references([operation["responses"], operation.get("requestBody", {})])
        found: set[str] = set()
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                pending += references(self._schemas[name])
                yield name

    def _describe_object(self, name: str) -> Lines:
        title = short_name(name)
        schema = self._schemas[name]
        label = [f".. _{self._label(name)}:", ""]
        text = ["", schema["description"], ""]
        return [*label, title, "-" * len(title), *text, *self._fields(name)]

    def _fields(self, name: str, *, is_body: bool = False) -> Lines:
        schema = self._schemas[name]
        required = schema.get("required", ())
        properties: Json = schema["properties"]
        middle = "Required" if is_body else "Since"
        rows = [
            [
                f"``{field}``",
                self.type_of(each),
                ("yes" if field in required else "no") if is_body else since(each) or "\\-",
                each.get("description", ""),
            ]
            for field, each in properties.items()
        ]
        return table(["Field", "Type", middle, "Description"], rows, "20 30 10 40")

    def type_of(self, schema: Json) -> str:
        """Return the type of a value in words."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return f":ref:`{short_name(name)} <{self._label(name)}>`"
        if "anyOf" in schema:
            return " or ".join(self.type_of(each) for each in schema["anyOf"])
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not kinds:
            return str(schema.get("title", "any JSON value"))
        return " or ".join(self._type(kind, schema) for kind in kinds)

    def _type(self, kind: str, schema: Json) -> str:
        if kind == "array":
            size = " of one" if schema.get("maxItems") == 1 else ""
            return f"list{size}: {self.type_of(schema['items'])}"
        if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
            return f"object with values: {self.type_of(schema['additionalProperties'])}"
        if kind == "object" and "properties" in schema:
            inner = [f"``{n}``: {self.type_of(s)}" for n, s in schema["properties"].items()]
            return f"object with {', '.join(inner)}"
        if kind == "string":
            return string_type(schema)
        if kind == "integer":
            limits = [schema[key] for key in ("minimum", "maximum") if key in schema]
            return "integer" + (f", {' to '.join(map(str, limits))}" if limits else "")
        return _PLAIN_TYPES.get(kind, kind)

    def _label(self, name: str) -> str:
        return f"api-{self._page}-{name.lower()}"


def string_type(schema: Json) -> str:
    """Return the type of a string in words."""
    if "enum" in schema:
        return ", ".join(f"``{value}``" for value in schema["enum"])
    if "maxLength" in schema:
        least = f"{schema['minLength']} to " if "minLength" in schema else "at most "
        return f"string, {least}{schema['maxLength']} characters"
    return _FORMATS.get(schema.get("format", ""), "string")


def references(value: Any, *, deep: bool = True) -> list[str]:
    """Return the names of the objects that a schema refers to; of an envelope only the object."""
    if isinstance(value, Mapping):
        if "$ref" in value:
            kind, _, name = value["$ref"].rpartition("/")
            return [name] if kind.endswith("schemas") else []
        if not deep and "anyOf" in value:
            return references(value["anyOf"][0], deep=False)
        return [name for each in value.values() for name in references(each, deep=deep)]
    if isinstance(value, list):
        return [name for each in value for name in references(each, deep=deep)]
    return []


def operation_label(operation: Json) -> str:
    """Return the label of the section of an operation."""
    return f"api-{operation['operationId']}"


def short_name(name: str) -> str:
    """Return the name of an object without the version that added its last field."""
    return _VERSIONED.sub("", name)


def since(value: Json) -> str:
    """Return the microversion that added an operation, a parameter or a field, or nothing."""
    return str(value.get("x-openstack", {}).get("min-ver", ""))


def rubric(title: str) -> Lines:
    """Return a title that is not in the table of contents."""
    return ["", f".. rubric:: {title}", ""]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], widths: str) -> Lines:
    """Return a table."""
    lines = [".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", ""]
    for row in (header, *rows):
        marks = ("   * - ", *["     - "] * (len(row) - 1))
        lines += [mark + " ".join(cell.split()) for mark, cell in zip(marks, row, strict=True)]
    return [*lines, ""]


def exchange(example: Json) -> Lines:
    """Return a request and its answer."""
    request, response = example["request"], example["response"]
    head = f"{request['method']} {request['path']}\nOpenStack-API-Version: {request['version']}"
    lines = block("text", head)
    if "body" in request:
        lines += block("json", pretty(request["body"]))
    status = str(response["status"])
    if "location" in response:
        status += f"\nLocation: {response['location']}"
    lines += block("text", status)
    return lines + (block("json", pretty(response["body"])) if "body" in response else [])


def pretty(value: Any) -> str:
    """Return JSON with short objects and lists on one line."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= 72 or not isinstance(value, dict | list) or not value:
        return text
    if isinstance(value, dict):
        inner = [f"{json.dumps(key)}: {pretty(item)}" for key, item in value.items()]
    else:
        inner = [pretty(item) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    lines = ",\n".join(inner)
    return f"{begin}\n{textwrap.indent(lines, '  ')}\n{end}"


def block(language: str, text: str) -> Lines:
    """Return a block of code."""
    indented = textwrap.indent(text, "   ").split("\n")
    return [f".. code-block:: {language}", "", *indented, ""]
