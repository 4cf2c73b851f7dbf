# SPDX-License-Identifier: Apache-2.0
"""The sources of the API reference: the committed OpenAPI document, its examples and pages."""

import difflib
import json
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from cyborg.api import types
from cyborg.api.openapi.schemas import read_descriptions
from cyborg.tests.fixtures.reference.generator import ROOT, load_generator

PAGES = ROOT / "doc" / "source" / "api" / "reference"
COMMAND = "tools/dev reference"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_generator()


@pytest.fixture(scope="module")
def document(tool: ModuleType) -> Any:
    return json.loads(tool.DOCUMENT.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def examples(tool: ModuleType) -> Any:
    return json.loads(tool.EXAMPLES.read_text(encoding="utf-8"))


def list_operations(document: Any) -> dict[str, tuple[str, str, Any]]:
    return {
        operation["operationId"]: (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def compare(committed: str, served: str) -> str:
    """Return the unified difference of the committed document and the served one."""
    lines = (committed.splitlines(), served.splitlines())
    names = ("doc/source/api/openapi.json", "served")
    return "\n".join(difflib.unified_diff(*lines, *names, lineterm=""))


@pytest.mark.static
def test_committed_document_is_the_served_one(tool: ModuleType) -> None:
    committed = tool.DOCUMENT.read_text(encoding="utf-8")
    difference = compare(committed, tool.format_json(tool.make_document()))
    if difference:
        pytest.fail(
            f"run {COMMAND}, and review the change of the API:\n{difference}", pytrace=False
        )


def test_difference_names_the_changed_lines(document: Any, tool: ModuleType) -> None:
    committed = tool.format_json(document)
    document["info"]["version"] = "9.9"
    lines = compare(committed, tool.format_json(document)).splitlines()
    assert '+  "version": "9.9",' in lines
    assert len([line for line in lines if re.match(r"[-+] ", line)]) == 2


@pytest.mark.static
@pytest.mark.slow
def test_committed_document_is_valid_openapi_3_1(document: Any) -> None:
    OpenAPIV31SpecValidator(document).validate()


@pytest.mark.static
def test_every_parameter_has_a_description(document: Any) -> None:
    used, described = set(), read_descriptions()["parameters"]
    for operation_id, (_, _, operation) in list_operations(document).items():
        for parameter in operation["parameters"]:
            if name := parameter.get("name"):
                assert parameter["description"].endswith("."), (operation_id, name)
                own = f"{operation_id}:{name}"
                used.add(own if own in described else name)
    assert set(described) == used


def list_types(base: type = types.JsonObject) -> Iterator[type]:
    cls: type
    for cls in base.__subclasses__():
        yield cls
        yield from list_types(cls)


@pytest.mark.static
def test_every_field_has_a_description(document: Any) -> None:
    used, described = set(), read_descriptions()["fields"]
    owners = {
        cls.__name__: [re.sub(r"V\d+$", "", each.__name__) for each in cls.__mro__]
        for cls in list_types()
    }
    for name, schema in document["components"]["schemas"].items():
        for field, value in schema["properties"].items():
            assert value.get("description", "").endswith("."), (
                f"{name}.{field} is not described in cyborg/api/openapi/descriptions.ini"
            )
            keys = [*(f"{owner}.{field}" for owner in owners[name]), field]
            if not field.endswith("_links"):
                used.add(next(key for key in keys if key in described))
    assert set(described) == used


def test_fields_have_the_version_of_their_class(document: Any) -> None:
    properties = document["components"]["schemas"]["DeviceV26"]["properties"]
    versions = {
        name: properties[name].get("x-openstack")
        for name in ("uuid", "status", "health", "deliverable", "maintenance")
    }
    assert versions == {
        "uuid": None,
        "status": {"min-ver": "2.3"},
        "health": {"min-ver": "2.4"},
        "deliverable": {"min-ver": "2.5"},
        "maintenance": {"min-ver": "2.6"},
    }


@pytest.mark.static
def test_every_operation_has_an_example(document: Any, examples: Any) -> None:
    operations = list_operations(document)
    recorded = examples["operations"]
    assert set(recorded) == set(operations), f"extend fixtures/reference/scenario.py, run {COMMAND}"
    for operation_id, (method, path, operation) in operations.items():
        request = recorded[operation_id]["request"]
        assert request["method"] == method
        assert re.fullmatch(
            re.sub(r"{\w+}", "[^/]+", f"/v2{path}"), request["path"].split("?")[0]
        ), operation_id
        assert ("body" in request) == ("requestBody" in operation), operation_id


@pytest.mark.static
def test_examples_match_the_document(document: Any, examples: Any) -> None:
    for operation_id, (_, _, operation) in list_operations(document).items():
        example = examples["operations"][operation_id]
        answer = operation["responses"][str(example["response"]["status"])]
        for declared, actual in (
            (operation.get("requestBody", {}), example["request"]),
            (answer, example["response"]),
        ):
            assert ("content" in declared) == ("body" in actual), operation_id
            if "body" in actual:
                schema = declared["content"]["application/json"]["schema"]
                assert find_errors(document, schema, actual["body"]) == [], operation_id


@pytest.mark.static
def test_errors_have_the_documented_form(document: Any, examples: Any) -> None:
    schema = {"$ref": "#/components/schemas/Fault"}
    statuses = [error["response"]["status"] for error in examples["errors"]]
    assert statuses == [400, 404, 405, 406, 409]
    for error in examples["errors"]:
        assert find_errors(document, schema, error["response"]["body"]) == []
        assert json.loads(error["response"]["body"]["error_message"])["faultstring"]


def find_errors(document: Any, schema: Any, value: Any) -> list[str]:
    validator = jsonschema.Draft202012Validator(
        {**schema, "components": document["components"]},
        format_checker=jsonschema.FormatChecker(),
    )
    return [error.message for error in validator.iter_errors(value)]


@pytest.mark.static
def test_pages_have_every_operation_once(document: Any) -> None:
    documented = [
        tag
        for page in PAGES.glob("*.rst")
        for tags in re.findall(r"^\.\. api-operations:: (.*)$", page.read_text(), re.MULTILINE)
        for tag in tags.split()
    ]
    tags = {
        tag for _, _, operation in list_operations(document).values() for tag in operation["tags"]
    }
    assert sorted(documented) == sorted(tags)
