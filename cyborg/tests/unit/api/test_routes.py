# SPDX-License-Identifier: Apache-2.0
"""Routes match the policy rules, types match the rows; paging and query counts."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_policy import policy
from oslo_utils import timeutils
from wsme import types as wtypes

from cyborg.api.controller import ApiContext
from cyborg.api.routes import build_routes
from cyborg.core.errors import OverLimit
from cyborg.db import schema
from cyborg.policies.rules import list_rules
from cyborg.tests.fixtures.clouds.api import INSTANCE, ApiEnv, bind_body, error_message
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.scale.lists import LISTS

ARQS = "/v2/accelerator_requests"
LATEST = {"OpenStack-API-Version": "accelerator latest"}


# Rules that an operation requires in addition to its own, for some requests.
ADDITIONAL = {
    ("cyborg:attachment:create_by_accelerator", "POST", "/v2/attachments"),
    ("cyborg:attachment:create_for_host", "POST", "/v2/attachments"),
    ("cyborg:attachment:delete_for_host", "DELETE", "/v2/attachments"),
    ("cyborg:attachment:delete_for_host", "DELETE", "/v2/attachments/*"),
}


def operations() -> Iterator[tuple[str, str, Any]]:
    context = ApiContext(None, None, None)  # type: ignore[arg-type]
    for path, methods in build_routes(context).items():
        for method, controller in methods.items():
            yield method, path, controller


def test_operations_match_policy_rules() -> None:
    documented = {
        (rule.name, call["method"], re.sub(r"{\w+}", "*", call["path"]))
        for rule in list_rules()
        if isinstance(rule, policy.DocumentedRuleDefault)
        for call in rule.operations
    }
    rules_by_operation = {
        (controller.operation.rule, method, f"/v2/{path}")
        for method, path, controller in operations()
    }
    assert rules_by_operation | ADDITIONAL == documented


def test_operations_have_definitions() -> None:
    for method, path, controller in operations():
        definition = controller._wsme_definition
        assert definition.doc, (method, path)
        assert definition.body_type is controller.operation.body
        for argument in definition.arguments:
            assert getattr(argument.datatype, "name", None) or wtypes.iscomplex(argument.datatype)
        if method == "GET":
            assert wtypes.iscomplex(definition.return_type)


def _check(datatype: Any, value: Any, path: str, optional: tuple[str, ...] = ()) -> None:
    """Check a value of a response against its WSME type, recursively."""
    if value is None:
        return
    if wtypes.isarray(datatype):
        for item in value:
            _check(datatype.item_type, item, f"{path}[]", optional)
    elif wtypes.iscomplex(datatype):
        attributes = {a.name: a for a in wtypes.list_attributes(datatype)}
        assert set(value) <= set(attributes), path
        for name, attribute in attributes.items():
            if attribute.mandatory and name not in optional:
                assert value.get(name) is not None, f"{path}.{name}"
            _check(attribute.datatype, value.get(name), f"{path}.{name}", optional)
    elif wtypes.isusertype(datatype):
        datatype.validate(value)
    elif datatype.__name__ == "datetime" if isinstance(datatype, type) else False:
        assert value.endswith("+00:00"), path
    else:
        wtypes.validate_value(datatype, value)


def rollout(api: ApiEnv) -> None:
    """Insert a driver with a backend and a desired backend, and a job that changes it."""
    agent = {"service_id": rows.insert_agent(api.engine, "compute-9")}
    option = {"name": "n", "kind": "int", "default": 1, "help": "How many."}
    option |= {"host_only": False, "secret": False}
    facts = {"support": "supported", "abilities": ["measures"], "options": [option], "type": "GPU"}
    rows.insert(api.engine, schema.drivers, name="acme", version="1", **agent, **facts)
    keys = {"driver": "acme", **agent}
    rows.insert(api.engine, schema.backends, name="acme0", status="READY", **keys)
    values = {"status": "enabled", "config": {}, "generation": 1, "applied": True}
    rows.insert(api.engine, schema.desired_backends, backend="acme1", **keys, **values)
    job = {"kind": "install", "host": "", "subject": "acme", "arguments": {}}
    step = {"job_id": rows.insert(api.engine, schema.jobs, **job), "state": "in_progress"}
    rows.insert(api.engine, schema.job_steps, host="compute-9", backend="acme1", **step)


def test_responses_match_types(api: ApiEnv) -> None:
    card = rows.insert_card(api.engine)
    rows.insert_agent(api.engine)
    api.create_profile()
    (arq,) = api.create_arqs()
    assert api.bind(arq, card.provider).status_int == 202
    rollout(api)
    context = {"resources": "FPGA:1", "config_data": {"k": "v"}}
    assert api.call("POST", "/v2/device_contexts", context, LATEST).status_int == 201
    count = 0
    for method, path, controller in operations():
        if method == "GET" and "*" not in path:
            body = api.get(f"/v2/{path}")
            _check(controller.operation.answer, body, path)
            for row in next(iter(body.values())):
                if f"{path}/*" in {p for m, p, _ in operations() if m == "GET"}:
                    document = api.get(f"/v2/{path}/{row['uuid']}")
                    # A single object may have more fields than in a list.
                    assert row.items() <= (document.get("device_profile") or document).items()
                    count += 1
    assert count == 24


def test_device_has_no_status_before_2_3(api: ApiEnv) -> None:
    rows.insert_card(api.engine)
    for version, has_status in (("2.0", False), ("2.2", False), ("2.3", True), ("2.4", True)):
        (device,) = api.get("/v2/devices", version)["devices"]
        assert ("status" in device) is has_status


def test_accelerator_request_has_no_attachment_before_2_6(api: ApiEnv) -> None:
    api.create_profile(**{"resources:FPGA": "1"})
    api.create_arqs()
    with api.engine.begin() as tx:
        tx.execute(sa.update(schema.arqs).values(attach_error="No more available PCI slots"))
    for version in ("2.0", "2.5"):
        (arq,) = api.get(ARQS, version)["arqs"]
        assert arq.keys().isdisjoint({"attached_at", "attach_error"})
    (arq,) = api.get(ARQS, "2.6")["arqs"]
    assert (arq["attached_at"], arq["attach_error"]) == (None, "No more available PCI slots")


def test_accelerator_requests_are_filtered_by_a_failed_attachment(api: ApiEnv) -> None:
    api.create_profile(**{"resources:FPGA": "3"})
    failed, *others = api.create_arqs()
    with api.engine.begin() as tx:
        failing = sa.update(schema.arqs).where(schema.arqs.c.uuid == failed)
        tx.execute(failing.values(attach_error="No slots", attach_failed_at=timeutils.utcnow()))
    for value, expected in (("true", [failed]), ("false", others)):
        found = api.get(f"{ARQS}?attach_failed={value}")["arqs"]
        assert sorted(arq["uuid"] for arq in found) == sorted(expected)
    found = api.get(f"{ARQS}?attach_failed=true&state=Bound")["arqs"]
    assert found == []
    headers = {"OpenStack-API-Version": "accelerator 2.5"}
    assert api.call("GET", f"{ARQS}?attach_failed=true", headers=headers).status_int == 400


def test_accelerator_requests_of_an_instance_are_filtered_too(api: ApiEnv) -> None:
    """Without a filter, the list of an instance is one statement of its own."""
    instance = "0d6b2c57-3f4e-4c55-8a39-7c1e1f0f8f11"
    profile = rows.insert_profile(api.engine)
    facts = {"state": "Bound", "instance_uuid": instance}
    rows.insert_arq(api.engine, profile, **facts, instance_slot=0)
    now = timeutils.utcnow()
    failed = rows.insert_arq(
        api.engine, profile, **facts, instance_slot=1, attach_error="a", attach_failed_at=now
    )
    for query, count in (("", 2), ("&attach_failed=false", 1)):
        assert len(api.get(f"{ARQS}?instance={instance}{query}")["arqs"]) == count
    (found,) = api.get(f"{ARQS}?instance={instance}&attach_failed=true")["arqs"]
    assert found["uuid"] == failed


def test_write_request_makes_one_rpc_call(api: ApiEnv) -> None:
    card = rows.insert_card(api.engine)
    api.create_profile(**{"resources:FPGA": "3"})
    arqs = api.create_arqs()
    assert len(arqs) == 3
    body = {key: value for arq in arqs for key, value in bind_body(arq, card.provider).items()}
    assert api.call("PATCH", ARQS, body).status_int == 202
    assert api.call("DELETE", f"{ARQS}?instance={INSTANCE}").status_int == 204
    assert api.call("DELETE", "/v2/device_profiles/p1").status_int == 204
    assert api.conductor.calls == [
        "device_profile_create",
        "arq_create",
        "arq_bind",
        "arq_delete",
        "device_profile_delete",
    ]


def test_find_unresolved_arqs_of_instance_is_423(api: ApiEnv) -> None:
    profile = rows.insert_profile(api.engine)
    rows.insert_arq(api.engine, profile, instance_uuid=INSTANCE, instance_slot=0, state="Bound")
    path = f"{ARQS}?instance={INSTANCE}&bind_state=resolved"
    with count_statements(api.engine) as count:
        assert len(api.get(path)["arqs"]) == 1
    assert len(count) == 1
    rows.insert_arq(
        api.engine, profile, instance_uuid=INSTANCE, instance_slot=1, state="BindStarted"
    )
    assert api.call("GET", path).status_int == 423
    assert len(api.get(f"{ARQS}?bind_state=resolved")["arqs"]) == 1
    assert len(api.get(f"{ARQS}?instance={INSTANCE}")["arqs"]) == 2


@pytest.mark.parametrize(
    "path",
    [
        "devices",
        "deployables",
        "device_contexts",
        "device_profiles",
        "hardware",
        "accelerators",
        "services",
    ],
)
def test_find_query_count_is_constant(api: ApiEnv, path: str) -> None:
    def fill(start: int, end: int) -> None:
        for n in range(start, end):
            rows.insert_card(api.engine, f"host-{n}", handles=1)
            rows.insert_agent(api.engine, f"host-{n}")
            rows.insert_profile(api.engine, f"p{n}")
            api.call("POST", "/v2/device_contexts", {"resources": "FPGA:1"}, LATEST)

    counts = []
    for start, end in ((0, 2), (2, 12)):
        fill(start, end)
        with count_statements(api.engine) as statements:
            assert len(api.get(f"/v2/{path}")[path]) == end
        counts.append(len(statements))
    # Devices are shown with the use of their handles.
    assert counts[0] == counts[1] <= (4 if path == "devices" else 2)


def test_find_pages_have_every_row_once(api: ApiEnv) -> None:
    for n in range(7):
        rows.insert_profile(api.engine, f"p{n}")
    api.conf.set_override("max_limit", 3, group="api")
    path, names, pages = "/v2/device_profiles?limit=100&sort_key=name&sort_dir=desc", [], 0
    while path:
        body = api.get(path)
        names += [row["name"] for row in body["device_profiles"]]
        pages += 1
        path = next((x["href"] for x in body.get("device_profiles_links", ())), "")
    assert names == [f"p{n}" for n in reversed(range(7))]
    assert pages == 3


@pytest.mark.parametrize(
    ("path", "version"),
    [
        (path, version)
        for path in ("devices", "deployables", "device_profiles")
        for version in ("2.0", "2.1", "2.2", "2.3", "latest")
    ]
    + [(path, "latest") for path in ("accelerators", "services", "hardware")],
)
def test_find_without_limit_returns_max_limit_rows_and_next_link(
    api: ApiEnv, path: str, version: str
) -> None:
    for n in range(7):
        rows.insert_card(api.engine, f"host-{n}", handles=1)
        rows.insert_agent(api.engine, f"host-{n}")
        rows.insert_profile(api.engine, f"p{n}")
    api.conf.set_override("max_limit", 3, group="api")
    uuids, pages, url = [], 0, f"/v2/{path}"
    while url:
        body = api.get(url, version)
        assert len(body[path]) <= 3
        uuids += [row["uuid"] for row in body[path]]
        pages += 1
        url = next((x["href"] for x in body.get(f"{path}_links", ())), "")
    assert (len(uuids), len(set(uuids)), pages) == (7, 7, 3)


def test_find_arqs_of_instance_without_limit_returns_all(api: ApiEnv) -> None:
    api.conf.set_override("max_limit", 3, group="api")
    profile = rows.insert_profile(api.engine)
    bound = {"state": "Bound", "instance_uuid": INSTANCE}
    for n in range(7):
        rows.insert_arq(api.engine, profile, **bound, instance_slot=n)
    for query in ("", "&bind_state=resolved"):
        for version in ("2.0", "2.3"):
            body = api.get(f"/v2/accelerator_requests?instance={INSTANCE}{query}", version)
            assert len(body["arqs"]) == 7
            assert "arqs_links" not in body
    assert len(api.get(f"/v2/accelerator_requests?instance={INSTANCE}&limit=5")["arqs"]) == 3
    body = api.get("/v2/accelerator_requests", "2.0")
    assert len(body["arqs"]) == 3
    assert body["arqs_links"]


def test_create_arq_over_project_limit_is_forbidden(api: ApiEnv) -> None:
    api.conf.set_override("max_project_arqs", 2, group="conductor")
    api.create_profile()
    api.conductor.error = OverLimit("project p has 2 accelerator requests and may have 2", limit=2)
    refused = api.call("POST", "/v2/accelerator_requests", {"device_profile_name": "p1"})
    assert refused.status_int == 403
    assert "may have 2" in error_message(refused)


# Their pages are parts of evaluations of the cloud, with tests of their own.
EVALUATED = {
    "device_profiles/{key}/explanation",
    "device_profiles/{key}/capacity",
    "device_contexts/{uuid}/explanation",
}


def test_statements_of_each_list_have_a_test_of_their_costs() -> None:
    context = ApiContext(None, None, None)  # type: ignore[arg-type]
    operations = [
        method.operation
        for methods in build_routes(context).values()
        for method in methods.values()
    ]
    paged = {operation.template for operation in operations if operation.paged}
    # If one is missing here, add it to LISTS, and its rows to ``fill``.
    assert {name.split("?")[0] for name in LISTS} == paged - EVALUATED
    assert paged >= EVALUATED
