# SPDX-License-Identifier: Apache-2.0
"""The table of routes against the rules, the types against the rows, and the cost of a call."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from oslo_policy import policy
from wsme import types as wtypes

from cyborg.api.resource import Desk
from cyborg.api.routes import table
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.fixtures import rows
from cyborg.fixtures.api import INSTANCE, ApiBed, wish
from cyborg.policies import list_rules

ARQS = "/v2/accelerator_requests"


def operations() -> Iterator[tuple[str, str, Any]]:
    desk = Desk(None, None, None)  # type: ignore[arg-type]
    for path, methods in table(desk).items():
        for method, controller in methods.items():
            yield method, path, controller


def test_every_operation_has_a_rule_and_every_rule_its_operations() -> None:
    documented = {
        (rule.name, call["method"], re.sub(r"{\w+}", "*", call["path"]))
        for rule in list_rules()
        if isinstance(rule, policy.DocumentedRuleDefault)
        for call in rule.operations
    }
    served = {
        (controller.operation.rule, method, f"/v2/{path}")
        for method, path, controller in operations()
    }
    assert served == documented


def test_every_operation_is_described() -> None:
    for method, path, controller in operations():
        told = controller._wsme_definition
        assert told.doc, (method, path)
        assert told.body_type is controller.operation.body
        for argument in told.arguments:
            assert getattr(argument.datatype, "name", None) or wtypes.iscomplex(argument.datatype)
        if method == "GET":
            assert wtypes.iscomplex(told.return_type)


def _check(datatype: Any, value: Any, where: str, optional: tuple[str, ...] = ()) -> None:
    """Hold a piece of an answer against its WSME type, all the way down."""
    if value is None:
        return
    if wtypes.isarray(datatype):
        for item in value:
            _check(datatype.item_type, item, f"{where}[]", optional)
    elif wtypes.iscomplex(datatype):
        attributes = {a.name: a for a in wtypes.list_attributes(datatype)}
        assert set(value) <= set(attributes), where
        for name, attribute in attributes.items():
            if attribute.mandatory and name not in optional:
                assert value.get(name) is not None, f"{where}.{name}"
            _check(attribute.datatype, value.get(name), f"{where}.{name}", optional)
    elif wtypes.isusertype(datatype):
        datatype.validate(value)
    elif datatype.__name__ == "datetime" if isinstance(datatype, type) else False:
        assert value.endswith("+00:00"), where
    else:
        wtypes.validate_value(datatype, value)


def rollout(api: ApiBed) -> None:
    """Insert a driver that is installed, used and wanted, and a job about it."""
    agent = {"service_id": rows.agent(api.engine, "compute-9")}
    option = {"name": "n", "kind": "int", "default": 1, "help": "How many."}
    its = {"support": "supported", "abilities": ["measures"], "options": [option], "type": "GPU"}
    rows.insert(api.engine, schema.drivers, name="acme", version="1", **agent, **its)
    one = {"driver": "acme", **agent}
    rows.insert(api.engine, schema.backends, name="acme0", status="READY", **one)
    wanted = {"wish": "enabled", "config": {}, "revision": 1, "applied": True}
    rows.insert(api.engine, schema.wanted_backends, backend="acme1", **one, **wanted)
    job = {"kind": "install", "host": "", "subject": "acme", "arguments": {}}
    step = {"job_id": rows.insert(api.engine, schema.jobs, **job), "state": "rolling"}
    rows.insert(api.engine, schema.job_steps, host="compute-9", backend="acme1", **step)


def test_answers_are_what_their_types_say(api: ApiBed) -> None:
    card = rows.card(api.engine)
    rows.agent(api.engine)
    api.profile()
    (arq,) = api.arqs()
    assert api.bind(arq, card.provider).status_int == 202
    rollout(api)
    seen = 0
    for method, path, controller in operations():
        if method == "GET" and "*" not in path:
            body = api.get(f"/v2/{path}")
            _check(controller.operation.answer, body, path)
            for row in next(iter(body.values())):
                if f"{path}/*" in {p for m, p, _ in operations() if m == "GET"}:
                    one = api.get(f"/v2/{path}/{row['uuid']}")
                    # What is listed without its parts is shown with them.
                    assert row.items() <= one.get("device_profile", one).items()
                    seen += 1
    assert seen == 22


def test_a_device_has_no_status_before_2_3(api: ApiBed) -> None:
    rows.card(api.engine)
    for version, has in (("2.0", False), ("2.2", False), ("2.3", True), ("2.4", True)):
        (device,) = api.get("/v2/devices", version)["devices"]
        assert ("status" in device) is has


def test_one_call_on_the_bus_for_each_changing_request(api: ApiBed) -> None:
    card = rows.card(api.engine)
    api.profile(**{"resources:FPGA": "3"})
    arqs = api.arqs()
    assert len(arqs) == 3
    body = {key: value for arq in arqs for key, value in wish(arq, card.provider).items()}
    assert api.call("PATCH", ARQS, body).status_int == 202
    assert api.call("DELETE", f"{ARQS}?instance={INSTANCE}").status_int == 204
    assert api.call("DELETE", "/v2/device_profiles/p1").status_int == 204
    assert api.line.calls == [
        "device_profile_create",
        "arq_create",
        "arq_patch",
        "arq_delete",
        "device_profile_delete",
    ]


def test_unresolved_requests_of_an_instance(api: ApiBed) -> None:
    profile = rows.profile(api.engine)
    rows.request(api.engine, profile, instance_uuid=INSTANCE, instance_slot=0, state="Bound")
    path = f"{ARQS}?instance={INSTANCE}&bind_state=resolved"
    assert len(api.get(path)["arqs"]) == 1
    rows.request(api.engine, profile, instance_uuid=INSTANCE, instance_slot=1, state="BindStarted")
    assert api.call("GET", path).status_int == 423
    assert len(api.get(f"{ARQS}?bind_state=resolved")["arqs"]) == 1
    assert len(api.get(f"{ARQS}?instance={INSTANCE}")["arqs"]) == 2


@pytest.mark.parametrize(
    "path",
    [
        "devices",
        "deployables",
        "device_profiles",
        "hardware",
        "accelerators",
        "services",
    ],
)
def test_the_cost_of_a_list_does_not_follow_its_length(api: ApiBed, path: str) -> None:
    def fill(start: int, end: int) -> None:
        for n in range(start, end):
            rows.card(api.engine, f"host-{n}", handles=1)
            rows.agent(api.engine, f"host-{n}")
            rows.profile(api.engine, f"p{n}")

    counts = []
    for start, end in ((0, 2), (2, 12)):
        fill(start, end)
        with counting(api.engine) as statements:
            assert len(api.get(f"/v2/{path}")[path]) == end
        counts.append(len(statements))
    assert counts[0] == counts[1] <= 2


def test_pages_end_and_hold_every_row_once(api: ApiBed) -> None:
    for n in range(7):
        rows.profile(api.engine, f"p{n}")
    api.conf.set_override("max_limit", 3, group="api")
    path, seen, pages = "/v2/device_profiles?limit=100&sort_key=name&sort_dir=desc", [], 0
    while path:
        body = api.get(path)
        seen += [row["name"] for row in body["device_profiles"]]
        pages += 1
        path = next((x["href"] for x in body.get("device_profiles_links", ())), "")
    assert seen == [f"p{n}" for n in reversed(range(7))]
    assert pages == 3
    # Who asks for no pages gets none.
    assert len(api.get("/v2/device_profiles")["device_profiles"]) == 7
