# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document matches the specification, the routes and the actual responses."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from cyborg.api import types
from cyborg.api.controller import ApiContext
from cyborg.api.openapi.document import OpenApiDocument
from cyborg.api.openapi.schemas import Schemas
from cyborg.api.routes import build_routes
from cyborg.core.errors import TimedOut, Unavailable
from cyborg.tests.fixtures.clouds.api import ApiEnv
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.unit.api.test_routes import rollout

PATH = "/v2/openapi.json"
ALL = {"400", "401", "403", "406", "500", "503"}


@pytest.fixture(scope="module")
def document() -> Any:
    context = ApiContext(None, None, None)  # type: ignore[arg-type]
    return OpenApiDocument(build_routes(context)).document("http://controller:6666")


def operations(document: Any) -> Iterator[tuple[str, str, Any]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method.upper(), operation


@pytest.mark.slow
def test_document_is_valid_openapi_3_1(document: Any) -> None:
    OpenAPIV31SpecValidator(json.loads(json.dumps(document))).validate()
    assert document["openapi"].startswith("3.1.")
    assert document["servers"] == [{"url": "http://controller:6666/v2"}]


def test_document_has_every_route(document: Any) -> None:
    context = ApiContext(None, None, None)  # type: ignore[arg-type]
    documented: dict[tuple[str, str], Any] = {}
    for path, method, operation in operations(document):
        segments = ["*" if s.startswith("{") else s for s in path.strip("/").split("/")]
        documented["/".join(segments), method] = operation
    routes = {
        (path, m): c for path, methods in build_routes(context).items() for m, c in methods.items()
    }
    assert documented.keys() == routes.keys()
    for key, controller in routes.items():
        spec, operation = controller.operation, documented[key]
        assert operation["summary"]
        assert spec.rule in operation["description"]
        names = {p["name"] for p in operation["parameters"] if "name" in p}
        paged = {"limit", "marker", "sort_key", "sort_dir"} if spec.paged else set()
        assert names == {*spec.path, *spec.query, *paged}, key
        assert ("requestBody" in operation) == (spec.body is not None), key
        assert ("content" in operation["responses"][str(spec.status)]) == (spec.answer is not None)
    ids = [operation["operationId"] for operation in documented.values()]
    assert len(ids) == len(set(ids))


def test_document_has_every_status(document: Any) -> None:
    for path, method, operation in operations(document):
        statuses = set(operation["responses"])
        operation_key = (method, path)
        assert statuses >= ALL, operation_key
        assert ({"408", "411", "413", "415"} <= statuses) == ("requestBody" in operation), (
            operation_key
        )
        assert ("504" in statuses) == (method != "GET"), operation_key
        assert ("409" in statuses) <= (method != "GET"), operation_key
        assert len([status for status in statuses if status < "300"]) == 1, operation_key
        if "{" in path:
            assert "404" in statuses, operation_key
    assert "423" in document["paths"]["/accelerator_requests"]["get"]["responses"]
    assert "409" in document["paths"]["/attributes"]["post"]["responses"]


@pytest.mark.parametrize(("error", "status"), [(Unavailable, "503"), (TimedOut, "504")])
def test_conductor_unavailable_has_documented_status(
    api: ApiEnv, document: Any, error: type[Exception], status: str
) -> None:
    api.create_profile()
    api.conductor.error = error("the broker at secret-host")
    answer = api.call("DELETE", "/v2/device_profiles/p1")
    assert str(answer.status_int) == status
    assert status in document["paths"]["/device_profiles/{key}"]["delete"]["responses"]


@pytest.mark.parametrize("mount", ["", "/accelerator"])
def test_document_is_public(api: ApiEnv, document: Any, mount: str) -> None:
    for path in (PATH, "/openapi.json"):
        answer = api.call("GET", path, SCRIPT_NAME=mount, REMOTE_ADDR="192.0.2.7")
        assert answer.status_int == 200
        assert answer.content_type == "application/json"
        assert answer.json["servers"] == [{"url": f"http://localhost{mount}/v2"}]
        assert answer.json | {"servers": document["servers"]} == document
    assert api.call("HEAD", PATH).body == b""
    for method in ("POST", "DELETE", "OPTIONS"):
        assert api.call(method, PATH, b"").status_int == 405


def test_responses_match_document(api: ApiEnv, document: Any) -> None:
    card = rows.insert_card(api.engine)
    rows.insert_agent(api.engine)
    api.create_profile()
    (arq,) = api.create_arqs()
    assert api.bind(arq, card.provider).status_int == 202
    (deployable,) = api.get("/v2/deployables")["deployables"]
    attribute = {"deployable_id": deployable["uuid"], "key": "rack", "value": "7"}
    assert api.call("POST", "/v2/attributes", attribute).status_int == 201
    rollout(api)
    non_empty = 0
    for path, method, operation in operations(document):
        if method == "GET" and "{" not in path:
            answer = api.get(f"/v2{path}")
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
            validator = jsonschema.Draft202012Validator(
                {**schema, "components": document["components"]},
                format_checker=jsonschema.FormatChecker(),
            )
            assert [error.message for error in validator.iter_errors(answer)] == [], path
            non_empty += bool(next(iter(answer.values())))
    assert non_empty == 13


@pytest.mark.parametrize(
    ("method", "path", "valid", "invalid"),
    [
        (
            "post",
            "/attributes",
            {"deployable_id": "9a17439a-85d0-4c53-a3d3-0f68a2eac896", "key": "k", "value": "v"},
            [{}, {"key": "k"}, {"attribute": {}}, [], {"deployable_id": 1, "key": "", "value": ""}],
        ),
        (
            "post",
            "/attachments",
            {"instance_uuid": "9a17439a-85d0-4c53-a3d3-0f68a2eac896", "device_profile": "p"},
            [{"instance_uuid": 1}, {"hostname": ""}, {"device_profile": ""}, {"mode": "fast"}, []],
        ),
        (
            "post",
            "/device_profiles",
            [{"name": "p", "groups": [{"resources:FPGA": "1"}], "description": None}],
            [[], [{"name": "p", "groups": []}] * 2, {"name": "p", "groups": [], "other": 1}],
        ),
        (
            "patch",
            "/deployables/{uuid}/program",
            [{"path": "/program", "op": "replace", "value": [{"image_uuid": "x"}]}],
            [{}, [{"path": "/else", "op": "replace", "value": []}], [{"path": "/program"}]],
        ),
        ("post", "/accelerator_requests", {"device_profile_name": "p", "image_uuid": None}, [{}]),
        ("post", "/discoveries", {"host": None}, [{"hots": "a"}, {"host": "a\nb"}]),
        (
            "patch",
            "/accelerators/{uuid}",
            {"name": None, "description": "two\nlines", "tags": ["a"]},
            [{"owner": "me"}, {"name": ""}, {"tags": "a"}, {"tags": [""]}, []],
        ),
        ("post", "/audits", {"host": "a", "repair": True}, [{"hots": "a"}, {"repair": 7}]),
        (
            "post",
            "/drivers",
            {"driver": "d", "hosts": ["a"], "config": {"n": 1, "rule": ["a"]}, "backend": None},
            [{}, [], {"driver": ""}, {"driver": "d", "hosts": "a"}, {"driver": "d", "config": []}],
        ),
        (
            "patch",
            "/drivers/{key}",
            {"status": "disabled", "reload": True},
            [{"status": "absent"}, {"reload": "yes"}, {"driver": "d"}, []],
        ),
        (
            "post",
            "/hardware",
            {"host": "a", "address": "0000:01:00.0", "backend": "b"},
            [{}, {"host": "a", "address": "", "backend": "b"}],
        ),
    ],
)
def test_body_schema(document: Any, method: str, path: str, valid: Any, invalid: list[Any]) -> None:
    body = document["paths"][path][method]["requestBody"]
    schema = {
        **body["content"]["application/json"]["schema"],
        "components": document["components"],
    }
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(valid)] == []
    for value in invalid:
        assert not validator.is_valid(value), value
    assert body["required"] == (path not in ("/discoveries", "/audits"))


def test_body_schema_allows_envelope(document: Any) -> None:
    (_, envelope) = document["paths"]["/attributes"]["post"]["requestBody"]["content"][
        "application/json"
    ]["schema"]["anyOf"]
    assert envelope["required"] == ["attribute"]


def test_document_has_service_token_requirements(document: Any) -> None:
    services = {
        (path, method)
        for path, method, operation in operations(document)
        if operation.get("security") == [{"token": [], "service_token": []}]
    }
    assert services == {
        ("/accelerator_requests", "PATCH"),
        ("/accelerator_requests/{uuid}", "PATCH"),
        ("/device_contexts/{uuid}/pre_bind", "POST"),
        ("/device_contexts/{uuid}/bind", "POST"),
        ("/device_contexts/{uuid}/unbind", "POST"),
    }


@pytest.mark.parametrize(
    ("datatype", "valid", "invalid"),
    [
        (types.Text(3), ["", "abc", "é"], ["abcd", "a\0", "\nb", 1, None]),
        (types.Text(3, min_length=1), ["a"], [""]),
        (types.Text(9, lines=True), ["a\n\tb"], ["a\0b"]),
        (types.Enum("a", "b"), ["a"], ["c", None]),
        (types.PositiveInt(), [1, 999999999], [0, 1000000000, "1"]),
        (types.Repeated(types.Enum("a")), [["a", "a"]], ["a", ["b"]]),
        (types.CommaSeparated(), ["a,b"], [1]),
        ([{str: str}], [[{"a": "b"}]], [[{"a": 1}], {}]),
    ],
)
def test_schema_of_type(datatype: Any, valid: list[Any], invalid: list[Any]) -> None:
    validator = jsonschema.Draft202012Validator(Schemas().schema_for(datatype))
    assert [value for value in valid if not validator.is_valid(value)] == []
    assert [value for value in invalid if validator.is_valid(value)] == []
