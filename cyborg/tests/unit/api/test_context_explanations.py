# SPDX-License-Identifier: Apache-2.0
"""Explanation of a device context and of its allocation candidates, for each kind of caller."""

from datetime import datetime
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.api.v2 import device_contexts, explanations
from cyborg.core.contexts.refusals import make_job_failure
from cyborg.db import schema
from cyborg.db.contexts import read
from cyborg.testing.fake_keystone import FakeKeystone
from cyborg.tests.fixtures.clouds.api import INSTANCE, ApiEnv, error_message
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.unit.api.test_auth import keystone_conf
from cyborg.tests.unit.api.test_routes import _check

PATH = "/v2/device_contexts"
LATEST = {"OpenStack-API-Version": "accelerator latest"}
BODY = {"resources": {"FPGA": 1}, "requires": ["FAKE_DEVICE"], "config_data": {"key1": "val1"}}
SECRET = "99999999-2222-3333-4444-555555555555"


def create(api: ApiEnv, **more: Any) -> str:
    answer = api.call("POST", PATH, {**BODY, **more}, LATEST)
    assert answer.status_int == 201, answer.text
    return f"{PATH}/{answer.json['uuid']}"


def fill(api: ApiEnv) -> tuple[str, str]:
    """Insert a card and one that is unhealthy; return the uuids of their providers."""
    card = rows.insert_card(api.engine, handles=2)
    sick = rows.insert_card(api.engine, "compute-2", "0000:02:00.0", handles=4, health="unhealthy")
    for host in ("compute-1", "compute-2"):
        rows.insert_agent(api.engine, host)
    return card.provider, sick.provider


def codes(document: dict[str, Any]) -> dict[str, int]:
    (group,) = document["groups"]
    return {reason["code"]: reason["providers"] for reason in group["reasons"]}


@pytest.fixture
def keystone_api(sqlite_engine: sa.Engine, fake_keystone: FakeKeystone) -> ApiEnv:
    return ApiEnv(keystone_conf(**fake_keystone.options()), sqlite_engine)


def as_role(api: ApiEnv, keystone: FakeKeystone, *roles: str, project: str = "project-1") -> None:
    api.headers = {**LATEST, "X-Auth-Token": keystone.issue_token(list(roles), project)}


def test_context_explanation_is_that_of_its_hidden_profile(api: ApiEnv) -> None:
    card, sick = fill(api)
    path = create(api)
    document = api.get(f"{path}/explanation")
    _check(explanations.Explanation, document, "explanation")
    hidden = f"ctx-{document['uuid']}"
    assert document["name"] == hidden
    of_profile = api.get(f"/v2/device_profiles/{hidden}/explanation")
    assert {**document, "uuid": None} == {**of_profile, "uuid": None}
    assert codes(document) == {"unhealthy": 1}
    assert {row["uuid"] for row in document["providers"]} == {card, sick}
    one = api.get(f"{path}/explanation?host=compute-2")
    assert [row["uuid"] for row in one["providers"]] == [sick]


def test_context_explanation_considers_config_data(api: ApiEnv) -> None:
    """The hidden profile does not have the config data, which the ARQs have."""
    fill(api)
    path = create(api, config_data={"attach_target": "port"})
    assert codes(api.get(f"{path}/explanation")) == {"attach_target": 1, "unhealthy": 1}


def test_context_explanation_has_pages(api: ApiEnv) -> None:
    fill(api)
    path = create(api)
    page = api.get(f"{path}/explanation?limit=1")
    (link,) = page["providers_links"]
    assert f"{path}/explanation?" in link["href"]
    other = api.get(link["href"])
    assert len({row["uuid"] for row in page["providers"] + other["providers"]}) == 2


def test_context_explanation_of_bad_requests_is_refused(api: ApiEnv) -> None:
    path = create(api)
    for query, status in (("?host=%00", 400), ("?limit=0", 400), ("?rack=1", 400), ("", 200)):
        assert api.call("GET", f"{path}/explanation{query}", None, LATEST).status_int == status
    assert api.call("GET", f"{PATH}/{SECRET}/explanation", None, LATEST).status_int == 404
    assert api.call("GET", f"{PATH}/none/explanation", None, LATEST).status_int == 400


def test_member_sees_counts_of_context_and_no_other_instance(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    engine = keystone_api.engine
    as_role(keystone_api, fake_keystone, "member", "reader")
    path = create(keystone_api)
    card = rows.insert_card(engine, "secret-host", "0000:99:00.0", handles=2)
    profile = rows.insert_profile(engine, "p1")
    handles = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)
    owners = (("project-1", INSTANCE), ("other", SECRET))
    for handle, (project, instance) in zip(handles, owners, strict=True):
        bound = {"state": "Bound", "project_id": project, "instance_uuid": instance}
        provider = {"device_rp_uuid": card.provider}
        uuid = rows.insert_arq(engine, profile, **bound, **provider, instance_slot=0)
        (arq,) = rows.read(engine, schema.arqs, uuid=uuid)
        rows.update(engine, schema.attach_handles, handle["id"], arq_id=arq["id"])
    answer = keystone_api.call("GET", f"{path}/explanation")
    assert answer.status_int == 200, answer.text
    (reason,) = answer.json["groups"][0]["reasons"]
    assert reason["reason"] == (
        f"handle is taken by another project; taken by your project: instance {INSTANCE}"
    )
    assert (answer.json["providers"], reason["remedy"]) == ([], None)
    for secret in ("secret-host", "0000:99", SECRET, card.provider, "cyborg "):
        assert secret not in answer.text
    refused = keystone_api.call("GET", f"{path}/explanation?host=secret-host")
    assert (refused.status_int, error_message(refused)[:5]) == (403, "host:")
    for roles, project, status, providers in (
        (("reader",), "project-1", 200, 0),
        (("admin",), "other", 200, 1),
        (("accelerator_admin",), "other", 200, 1),
        (("member", "reader"), "other", 404, None),
        ((), "project-1", 403, None),
    ):
        as_role(keystone_api, fake_keystone, *roles, project=project)
        answer = keystone_api.call("GET", f"{path}/explanation")
        assert answer.status_int == status, roles
        assert providers is None or len(answer.json["providers"]) == providers, roles
    as_role(keystone_api, fake_keystone, "member", "reader", project="other")
    keystone_api.headers["X-Service-Token"] = fake_keystone.issue_token(["service"])
    seen = keystone_api.call("GET", f"{path}/explanation")
    assert (seen.status_int, seen.json["providers"]) == (200, [])


def test_quota_of_context_is_that_of_the_bind(
    sqlite_engine: sa.Engine, fake_keystone: FakeKeystone
) -> None:
    """The ARQs of a context count as created: only bound ones leave no room for it."""
    conf = keystone_conf(**fake_keystone.options())
    conf.set_override("driver", "static", group="quota")
    conf.set_override("default_limits", {"FPGA": "1"}, group="quota")
    api = ApiEnv(conf, sqlite_engine)
    as_role(api, fake_keystone, "member", "reader")
    fill(api)
    path = create(api)
    assert codes(api.call("GET", f"{path}/explanation").json) == {"unhealthy": 1}
    profile = rows.insert_profile(api.engine, "p1")
    bound = {"state": "Bound", "project_id": "project-1", "instance_uuid": INSTANCE}
    rows.insert_arq(api.engine, profile, **bound, instance_slot=0)
    assert codes(api.call("GET", f"{path}/explanation").json) == {"quota": 1, "unhealthy": 1}
    (context,) = rows.read(api.engine, schema.device_contexts)
    # The handles of a context for a host, or with a lease, have been counted too.
    for values in ({"state": "bound", "instance_uuid": INSTANCE}, {"instance_uuid": None}):
        rows.update(api.engine, schema.device_contexts, context["id"], **values)
        assert codes(api.call("GET", f"{path}/explanation").json) == {"unhealthy": 1}


def test_quota_of_context_is_that_of_its_project(
    sqlite_engine: sa.Engine, fake_keystone: FakeKeystone
) -> None:
    """An administrator or a service of another project sees the quota of the context's project."""
    conf = keystone_conf(**fake_keystone.options())
    conf.set_override("driver", "static", group="quota")
    conf.set_override("default_limits", {"FPGA": "1"}, group="quota")
    api = ApiEnv(conf, sqlite_engine)
    card, _ = fill(api)
    paths = {}
    for project in ("full", "empty"):
        as_role(api, fake_keystone, "member", project=project)
        paths[project] = create(api)
    profile = rows.insert_profile(api.engine, "p1")
    bound = {"state": "Bound", "project_id": "full", "instance_uuid": INSTANCE}
    rows.insert_arq(api.engine, profile, **bound, instance_slot=0)
    for asking in ("full", "empty"):
        as_role(api, fake_keystone, "admin", project=asking)
        full = api.get(f"{paths['full']}/explanation")
        assert codes(full) == {"quota": 1, "unhealthy": 1}
        shown = {row["uuid"]: row["groups"][0]["code"] for row in full["providers"]}
        assert shown[card] == "quota"
        assert codes(api.get(f"{paths['empty']}/explanation")) == {"unhealthy": 1}
        as_role(api, fake_keystone, "member", project=asking)
        api.headers["X-Service-Token"] = fake_keystone.issue_token(["service"])
        assert "quota" in codes(api.get(f"{paths['full']}/explanation"))
        assert "quota" not in codes(api.get(f"{paths['empty']}/explanation"))


def test_statements_of_context_explanation_are_constant(api: ApiEnv) -> None:
    fill(api)
    path = create(api)
    counts = []
    for start, end in ((0, 2), (2, 12)):
        for number in range(start, end):
            rows.insert_card(api.engine, f"host-{number}", handles=4)
        with count_statements(api.engine) as executed:
            api.get(f"{path}/explanation")
        counts.append(len(executed))
    assert counts == [11, 11]


def return_candidates(
    monkeypatch: pytest.MonkeyPatch,
    api: ApiEnv,
    *candidates: dict[str, list[str]],
    reason: str | None = None,
) -> None:
    """Let the conductor return these mappings, as if they came from Placement."""

    def find(uuid: str, project_scope: str | None, limit: int) -> dict[str, Any]:
        found = [{"hostname": "compute-1", "mappings": mappings} for mappings in candidates]
        return {"candidates": found[:limit], "reason": reason}

    monkeypatch.setattr(api.conductor, "device_context_candidates", find, raising=False)


def test_candidates_explain_the_other_providers(
    api: ApiEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, sick = fill(api)
    free = rows.insert_card(api.engine, "compute-2", "0000:03:00.0", handles=1).provider
    nic = rows.insert_card(api.engine, "compute-2", "0000:04:00.0", resource_class="CUSTOM_NIC")
    path = f"{create(api)}/allocation_candidates"
    return_candidates(monkeypatch, api, {"0": [card]})
    plain = api.get(path)
    assert set(plain) == {"allocation_candidates", "reason"}
    assert api.get(f"{path}?explain=0") == plain
    document = api.get(f"{path}?explain=1")
    _check(device_contexts.AllocationCandidates, document, "candidates")
    found = {row["uuid"]: row["groups"][0] for row in document["rejected_providers"]}
    # The provider that is nearest to a candidate comes first.
    assert list(found) == [free, sick, nic.provider]
    assert {uuid: row["code"] for uuid, row in found.items()} == {
        free: None,
        sick: "unhealthy",
        nic.provider: "resource_class",
    }
    assert found[free]["reason"].startswith("no predicate fails: the limit")
    assert "health_reason" in found[sick]["remedy"]
    return_candidates(monkeypatch, api)
    others = api.get(f"{path}?explain=1")["rejected_providers"]
    assert len(others) == len(found) + 1
    return_candidates(monkeypatch, api, reason="No such trait: CUSTOM_NONE.")
    nearest = api.get(f"{path}?explain=1")["rejected_providers"][0]["groups"][0]
    assert (nearest["code"], nearest["remedy"]) == (None, None)
    assert nearest["reason"].endswith("Placement rejects the query: No such trait: CUSTOM_NONE.")
    assert api.call("GET", f"{path}?explain=yes", None, LATEST).status_int == 400


def test_number_of_explained_providers_is_limited(
    api: ApiEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(api)
    monkeypatch.setattr(explanations, "MAX_REJECTED", 1)
    return_candidates(monkeypatch, api)
    document = api.get(f"{create(api)}/allocation_candidates?explain=1")
    assert len(document["rejected_providers"]) == 1


def test_only_administrators_explain_candidates_without_owners(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = keystone_api.engine
    as_role(keystone_api, fake_keystone, "member", "reader")
    path = f"{create(keystone_api)}/allocation_candidates?explain=1"
    assert keystone_api.call("GET", path).status_int == 403
    card = rows.insert_card(engine, "compute-1", handles=1)
    (handle,) = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)
    profile = rows.insert_profile(engine, "p1")
    bound = {"state": "Bound", "project_id": "other", "instance_uuid": SECRET}
    (arq,) = rows.read(
        engine, schema.arqs, uuid=rows.insert_arq(engine, profile, **bound, instance_slot=0)
    )
    rows.update(engine, schema.attach_handles, handle["id"], arq_id=arq["id"])
    return_candidates(monkeypatch, keystone_api)
    as_role(keystone_api, fake_keystone, "member")
    keystone_api.headers["X-Service-Token"] = fake_keystone.issue_token(["service"])
    refused = keystone_api.call("GET", path)
    assert refused.status_int == 403
    assert error_message(refused).startswith("explain: only administrators, with one of the roles")
    for secret in ("compute-1", card.provider, "cyborg "):
        assert secret not in refused.text
    assert keystone_api.call("GET", path.replace("explain=1", "explain=0")).status_int == 200
    for role in ("admin", "accelerator_admin"):
        as_role(keystone_api, fake_keystone, role)
        answer = keystone_api.call("GET", path)
        assert answer.status_int == 200, answer.text
        (provider,) = answer.json["rejected_providers"]
        assert provider["groups"][0]["code"] == "taken"
        assert SECRET not in answer.text


def test_last_failure_is_shown_without_hosts_to_a_member(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    api = keystone_api
    as_role(api, fake_keystone, "member", "reader")
    path = create(api, resources={"FPGA": 3})
    card, _ = fill(api)
    assert api.call("GET", f"{path}/explanation").json["last_failure"] is None
    as_role(api, fake_keystone, "admin")
    api.headers["X-Service-Token"] = fake_keystone.issue_token(["service"])
    body = {"hostname": "compute-1", "mappings": {"0": [card]}}
    refused = api.call("POST", f"{path}/pre_bind", body)
    assert refused.status_int == 409, refused.text
    document = api.get(f"{path}/explanation")
    _check(explanations.Explanation, document, "explanation")
    failure = document["last_failure"]
    group = {
        "group": 0,
        "code": "too_few_handles",
        "reason": "provider has too few handles",
        "handles": 2,
    }
    assert failure["groups"][0] == {**group, "provider_uuid": card}
    assert (failure["code"], failure["hostname"]) == ("too_few_handles", "compute-1")
    # What holds now is shown with it.
    assert document["groups"][0]["reasons"][0]["code"] == "too_few_handles"
    as_role(api, fake_keystone, "member", "reader")
    answer = api.call("GET", f"{path}/explanation")
    hidden = {"hostname": None, "job_uuid": None}
    assert answer.json["last_failure"] == {
        **failure,
        **hidden,
        "groups": [{**each, "provider_uuid": None} for each in failure["groups"]],
    }
    shown = api.call("GET", path)
    assert shown.json["error"].startswith("refused at ")
    for secret in ("compute-1", card):
        assert secret not in answer.text + shown.text


def test_error_of_host_work_is_shown_whole_to_administrators(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    api = keystone_api
    as_role(api, fake_keystone, "member", "reader")
    path = create(api, resources={"FPGA": 1})
    (context,) = rows.read(api.engine, schema.device_contexts)
    at = datetime(2026, 1, 2)
    failure = make_job_failure("prepare_failed", "/sys/x is missing", at, hostname="compute-1")
    rows.update(api.engine, schema.device_contexts, context["id"], failure=failure.to_dict())
    with api.engine.connect() as connection:
        (listed,) = read.find(connection)
    assert "failure" not in listed  # a list of contexts does not read what it does not show
    shown = api.get(f"{path}/explanation")["last_failure"]
    assert (shown["reason"], shown["hostname"]) == ("(hidden) is missing", None)
    as_role(api, fake_keystone, "admin")
    shown = api.get(f"{path}/explanation")["last_failure"]
    assert (shown["reason"], shown["hostname"]) == ("/sys/x is missing", "compute-1")
