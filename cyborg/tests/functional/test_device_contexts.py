# SPDX-License-Identifier: Apache-2.0
"""A device context from its creation to its deletion, with a real Placement, as Nova uses it."""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any
from urllib.parse import parse_qsl

import pytest
import requests
import sqlalchemy as sa

from cyborg import os_acc
from cyborg.cli import app
from cyborg.db import schema
from cyborg.standalone.stack import StandaloneStack
from cyborg.tests.fixtures.clouds.api import bind_body
from cyborg.tests.fixtures.clouds.standalone import HOST, running
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample

Run = Callable[..., str]
PROJECT = "noauth"
HEADERS = {"OpenStack-API-Version": "accelerator 2.6"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneStack]:
    """Yield a separate stack, whose accelerators are all free."""
    with running(tmp_path_factory.mktemp("contexts"), handles=4) as service:
        yield service


@pytest.fixture
def cyborg(stack: StandaloneStack, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: str, code: int = 0) -> str:
        connection = ["--os-auth-type", "none", "--os-endpoint", stack.endpoint]
        assert app.main([*connection, *words]) == code, capsys.readouterr()
        output = capsys.readouterr()
        return output.err if code else output.out

    return run


@pytest.fixture
def ask(cyborg: Run) -> Callable[..., Any]:
    return lambda *words: json.loads(cyborg(*words, "-f", "json"))


class NovaSteps:
    """The calls of Nova to build and delete a server, without a microversion."""

    def __init__(self, stack: StandaloneStack) -> None:
        self.placement, self.endpoint = stack.placement, stack.endpoint
        self.instance = str(uuid.uuid4())

    def call(self, method: str, path: str, body: Any = None) -> Any:
        answer = requests.request(method, f"{self.endpoint}/v2{path}", json=body, timeout=60)
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    def schedule(self, profile: str) -> dict[str, str]:
        """Allocate what a profile asks for; return the provider of each group, by its number."""
        (found,) = self.call("GET", f"/device_profiles?name={profile}")["device_profiles"]
        query = "&".join(build_query(found["groups"]))
        answer = self.placement.get(f"/allocation_candidates?{query}", microversion="1.36")
        candidate = answer.json()["allocation_requests"][0]
        self.allocate(candidate["allocations"])
        mappings = candidate["mappings"]
        return {name.removeprefix("_accel"): mappings[name][0] for name in mappings}

    def allocate(self, allocations: Mapping[str, Any]) -> None:
        """Create the allocation of the server."""
        body = {
            "allocations": allocations,
            "project_id": PROJECT,
            "user_id": "user",
            "consumer_generation": None,
            "consumer_type": "INSTANCE",
        }
        path = f"/allocations/{self.instance}"
        answer = self.placement.put(path, json=body, microversion="1.38")
        assert answer.status_code == 204, answer.text

    def bind(self, profile: str) -> list[dict[str, Any]]:
        """Build a server with the profile; return its ARQs."""
        providers = self.schedule(profile)
        arqs = self.call("POST", "/accelerator_requests", {"device_profile_name": profile})["arqs"]
        body: dict[str, Any] = {}
        for arq in arqs:
            provider = providers[str(arq["device_profile_group_id"])]
            body |= bind_body(arq["uuid"], provider, self.instance)
        self.call("PATCH", "/accelerator_requests", body)
        return list(self.call("GET", f"/accelerator_requests?instance={self.instance}")["arqs"])

    def delete(self) -> None:
        """Delete the server."""
        self.call("DELETE", f"/accelerator_requests?instance={self.instance}")
        assert self.placement.delete(f"/allocations/{self.instance}").status_code == 204


def build_query(groups: list[Mapping[str, str]]) -> Iterator[str]:
    """Yield the parameters that Nova sends for the groups of a profile."""
    for number, group in enumerate(groups):
        for kind, prefix in (("resources", "resources:"), ("required", "trait:")):
            items = {
                key.removeprefix(prefix): value
                for key, value in group.items()
                if key.startswith(prefix)
            }
            texts = (
                f"{name}:{value}"
                if kind == "resources"
                else name
                if value == "required"
                else f"!{name}"
                for name, value in items.items()
            )
            yield f"{kind}_accel{number}={','.join(texts)}"


def rows_of(stack: StandaloneStack, *tables: Any) -> list[int]:
    """Return the number of rows of tables."""
    with stack.reader.connect() as connection:
        return [len(connection.execute(table.select()).all()) for table in tables]


def test_context_lives_through_two_servers(
    stack: StandaloneStack, cyborg: Run, ask: Callable[..., Any]
) -> None:
    words = ("--resources=FPGA:2", "--requires=FAKE_DEVICE", "--config-data=key1:val1")
    context = cyborg("device-context-create", *words).strip()
    assert str(uuid.UUID(context)) == context
    shown = ask("device-context-show", context)
    profile = shown["Profile"]
    assert (shown["State"], profile) == ("unbound", f"ctx-{context}")
    cyborg("device-context-set", context, "--name", "gzip", "--config-data=key1:val2")
    nova = NovaSteps(stack)
    for _ in range(2):
        nova = NovaSteps(stack)
        arqs = nova.bind(profile)
        assert [arq["state"] for arq in arqs] == ["Bound", "Bound"]
        (row,) = ask("device-context-list", "--instance", nova.instance)
        assert (row["UUID"], row["State"], row["Host"]) == (context, "bound", HOST)
        error = cyborg("device-context-delete", context, code=1)
        assert "(HTTP 409)" in error
        assert nova.instance in error
        nova.delete()
        wait_until("the context is unbound", lambda: _is_unbound(ask, context))
    cyborg("device-context-delete", context)
    assert rows_of(stack, schema.device_contexts, schema.arqs, schema.device_profiles) == [0, 0, 0]
    assert {row["State"] for row in ask("accelerator-list")} == {"free"}


def test_service_deletes_a_context_that_a_server_uses(
    stack: StandaloneStack, cyborg: Run, ask: Callable[..., Any]
) -> None:
    context = cyborg("device-context-create", "--resources=FPGA:2").strip()
    nova = NovaSteps(stack)
    nova.bind(f"ctx-{context}")
    url, service = f"{stack.endpoint}/v2/device_contexts/{context}", {"X-Service-Token": "any"}
    assert requests.delete(url, headers=HEADERS, timeout=60).status_code == 409
    assert requests.delete(url, headers=HEADERS | service, timeout=60).status_code == 204
    assert requests.get(url, headers=HEADERS, timeout=60).status_code == 404
    assert nova.call("GET", f"/accelerator_requests?instance={nova.instance}")["arqs"] == []
    wait_until(
        "all accelerators are free",
        lambda: {row["State"] for row in ask("accelerator-list")} == {"free"},
    )
    nova.delete()


def test_context_is_reserved_and_bound_by_commands(
    stack: StandaloneStack, cyborg: Run, ask: Callable[..., Any]
) -> None:
    """Reserve, renew, bind and unbind a context: Nova reads its ARQs as after a bind of its own."""
    context = cyborg("device-context-create", "--resources=FPGA:2").strip()
    nova = NovaSteps(stack)
    provider = nova.schedule(f"ctx-{context}")["0"]
    target = ("--host", HOST, "--mapping", f"0={provider}")
    shown = ask("device-context-pre-bind", context, *target, "--lease-seconds", "60")
    assert (shown["State"], shown["Host"], shown["Epoch"]) == ("reserved", HOST, 1)
    error = cyborg("device-context-pre-bind", context, *target, code=1)
    assert "(HTTP 409)" in error
    assert ask("device-context-pre-bind", context, *target, "--epoch", "1")["State"] == "reserved"
    bind = ("device-context-bind", context, "--host", HOST, "--instance", nova.instance)
    assert "no lease with epoch 2" in cyborg(*bind, "--epoch", "2", code=1)
    shown = ask(*bind, "--epoch", "1")
    assert (shown["State"], shown["Instance"]) == ("bound", nova.instance)
    arqs = nova.call("GET", f"/accelerator_requests?instance={nova.instance}")["arqs"]
    assert [arq["state"] for arq in arqs] == ["Bound", "Bound"]
    assert "not for epoch 7" in cyborg("device-context-unbind", context, "--epoch", "7", code=1)
    cyborg("device-context-unbind", context, "--instance", nova.instance)
    wait_until("the context is unbound", lambda: _is_unbound(ask, context))
    assert nova.call("GET", f"/accelerator_requests?instance={nova.instance}")["arqs"] == []
    assert stack.placement.delete(f"/allocations/{nova.instance}").status_code == 204
    cyborg("device-context-delete", context)


def _is_unbound(ask: Callable[..., Any], context: str) -> bool:
    return bool(ask("device-context-show", context)["State"] == "unbound")


def test_request_groups_are_a_query_of_placement(stack: StandaloneStack, cyborg: Run) -> None:
    groups = (
        "--group",
        "resources:FPGA=1,trait:FAKE_DEVICE=required",
        "--group",
        "resources:FPGA=2",
    )
    context = cyborg("device-context-create", *groups).strip()
    url = f"{stack.endpoint}/v2/device_contexts/{context}"
    asked = requests.get(f"{url}/request_groups", headers=HEADERS, timeout=60).json()
    answer = stack.placement.get(f"/allocation_candidates?{asked['query']}", microversion="1.36")
    (candidate,) = answer.json()["allocation_requests"]
    found = requests.get(f"{url}/allocation_candidates", headers=HEADERS, timeout=60).json()
    assert found == {
        "allocation_candidates": [
            {
                "hostname": HOST,
                "mappings": {
                    str(number): candidate["mappings"][group["suffix"]]
                    for number, group in enumerate(asked["request_groups"])
                },
            }
        ],
        "reason": None,
    }
    cyborg("device-context-delete", context)


def test_library_binds_what_the_api_shows(stack: StandaloneStack, cyborg: Run) -> None:
    """The steps of the page on os_acc, with the objects that the API and Placement return."""
    words = ("--group", "resources:FPGA=1", "--group", "resources:FPGA=1")
    uuid_of_context = cyborg("device-context-create", *words).strip()
    url = f"{stack.endpoint}/v2/device_contexts/{uuid_of_context}"

    def get(path: str = "") -> Any:
        return requests.get(f"{url}{path}", headers=HEADERS, timeout=60).json()

    context = get()
    groups = os_acc.to_request_groups(context)
    asked = get("/request_groups")
    assert [group.name for group in groups] == [g["suffix"] for g in asked["request_groups"]]
    assert os_acc.build_query(groups) == dict(parse_qsl(asked["query"]))
    answer = stack.placement.get(f"/allocation_candidates?{asked['query']}", microversion="1.36")
    mappings = answer.json()["allocation_requests"][0]["mappings"]
    nova = NovaSteps(stack)
    found = os_acc.parse(context, HOST, nova.instance, mappings)
    numbers = get("/allocation_candidates?limit=1")["allocation_candidates"][0]["mappings"]
    assert os_acc.parse(context, HOST, nova.instance, numbers) == found
    profile = context["hidden_profile"]
    created = nova.call("POST", "/accelerator_requests", {"device_profile_name": profile})["arqs"]
    renewed = os_acc.parse(context, HOST, nova.instance, mappings, arqs=created)
    assert not {arq.arq_uuid for arq in renewed} & {arq.arq_uuid for arq in found}
    found = os_acc.parse(get(), HOST, nova.instance, mappings)
    assert found == renewed
    nova.call("PATCH", "/accelerator_requests", os_acc.build_patch(found))
    bound = nova.call("GET", f"/accelerator_requests?instance={nova.instance}")["arqs"]
    assert [(arq["state"], arq["device_rp_uuid"]) for arq in bound] == [
        ("Bound", item.device_rp_uuid) for item in found
    ]
    nova.call("DELETE", f"/accelerator_requests?instance={nova.instance}")
    wait_until("the context is unbound", lambda: get()["state"] == "unbound")
    cyborg("device-context-delete", uuid_of_context)


@pytest.mark.parametrize(
    ("words", "name", "failure"),
    [
        (
            ["--resources=NO_SUCH_CLASS:1"],
            "CUSTOM_NO_SUCH_CLASS",
            ("resource_class", "resource class differs: FPGA"),
        ),
        (
            ["--resources=FPGA:1", "--requires=NO_SUCH_TRAIT"],
            "CUSTOM_NO_SUCH_TRAIT",
            ("trait_missing", "trait missing: CUSTOM_NO_SUCH_TRAIT"),
        ),
    ],
    ids=["class", "trait"],
)
def test_name_that_placement_does_not_know_gives_no_candidates(
    stack: StandaloneStack, cyborg: Run, words: list[str], name: str, failure: tuple[str, str]
) -> None:
    """A context may be created before the devices that it needs."""
    context = cyborg("device-context-create", *words).strip()
    url = f"{stack.endpoint}/v2/device_contexts/{context}/allocation_candidates?explain=1"
    found = requests.get(url, headers=HEADERS, timeout=60).json()
    assert found["allocation_candidates"] == []
    assert name in found["reason"]
    (rejected,) = found["rejected_providers"]
    (group,) = rejected["groups"]
    assert (group["code"], group["reason"]) == failure
    cyborg("device-context-delete", context)


@pytest.fixture
def foreign_providers(stack: StandaloneStack) -> Iterator[dict[str, str]]:
    """Yield providers that Placement has and this service has not, by their place."""
    found = stack.placement.get(f"/resource_providers?name={HOST}", microversion="1.36").json()
    node = found["resource_providers"][0]["uuid"]
    created = {"below the node": str(uuid.uuid4()), "in another tree": str(uuid.uuid4())}
    for place, provider in created.items():
        parent = {"parent_provider_uuid": node} if place == "below the node" else {}
        body = {"uuid": provider, "name": f"foreign-{provider}", **parent}
        answer = stack.placement.post("/resource_providers", json=body, microversion="1.36")
        assert answer.status_code == 200, answer.text
        body = {"resource_provider_generation": 0, "inventories": {"FPGA": {"total": 1}}}
        path = f"/resource_providers/{provider}/inventories"
        assert stack.placement.put(path, json=body, microversion="1.36").status_code == 200
    yield {"the node": node, **created}
    for provider in created.values():
        answer = stack.placement.delete(f"/resource_providers/{provider}", microversion="1.36")
        assert answer.status_code == 204, answer.text


def read_state(stack: StandaloneStack, context: str, providers: Iterable[str]) -> list[Any]:
    """Return what a lease or a bind of a context changes, here and in Placement."""
    handles, jobs = schema.attach_handles.c, schema.jobs
    queries = (
        schema.device_contexts.select(),
        schema.arqs.select(),
        jobs.select().where(jobs.c.subject == context),
        sa.select(handles.uuid, handles.arq_id).order_by(handles.uuid),
    )
    with stack.reader.connect() as connection:
        rows = [connection.execute(query).all() for query in queries]
    paths = [f"/resource_providers/{provider}/allocations" for provider in providers]
    answers = [stack.placement.get(path, microversion="1.36").json() for path in paths]
    return [*rows, *(answer["allocations"] for answer in answers)]


@pytest.mark.parametrize(
    ("verb", "number"),
    sample(product(["pre_bind", "bind"], [0, 1]), ("bind", 1)),
)
def test_provider_of_another_service_is_refused_and_changes_nothing(
    stack: StandaloneStack,
    cyborg: Run,
    foreign_providers: dict[str, str],
    verb: str,
    number: int,
) -> None:
    """Placement has each of these providers; two have the class that the context needs."""
    words = ("--group", "resources:FPGA=1", "--group", "resources:FPGA=1")
    context = cyborg("device-context-create", *words).strip()
    url = f"{stack.endpoint}/v2/device_contexts/{context}"
    found = requests.get(f"{url}/allocation_candidates", headers=HEADERS, timeout=60).json()
    own = found["allocation_candidates"][0]["mappings"]
    nova = NovaSteps(stack)
    nova.allocate({own["0"][0]: {"resources": {"FPGA": 2}}})
    body: dict[str, Any] = {"hostname": HOST}
    if verb == "bind":
        body["instance_uuid"] = nova.instance
    known = [*own["0"], *foreign_providers.values()]
    before = read_state(stack, context, known)
    for place, provider in foreign_providers.items():
        wrong = {**body, "mappings": {**own, str(number): [provider]}}
        answer = requests.post(f"{url}/{verb}", json=wrong, headers=HEADERS, timeout=60)
        assert answer.status_code == 400, (place, answer.text)
        text = json.loads(answer.json()["error_message"])["faultstring"]
        assert f"mappings['device_profile_{number}']: resource provider {provider}" in text
        assert "is no device of this service" in text
        assert read_state(stack, context, known) == before, place
    assert stack.placement.delete(f"/allocations/{nova.instance}").status_code == 204
    cyborg("device-context-delete", context)


def test_create_prints_the_context_in_other_formats(cyborg: Run, ask: Callable[..., Any]) -> None:
    created = ask("device-context-create", "--resources=FPGA:1", "--name=a", "--description=b")
    assert (created["Name"], created["Description"], created["State"]) == ("a", "b", "unbound")
    name = cyborg("device-context-create", "--device-profile-id=none", "--name=x", code=1)
    assert "(HTTP 404)" in name
    named = cyborg("device-context-create", "--resources=FPGA:1", "-f", "value", "-c", "State")
    assert named.strip() == "unbound"
    contexts = [row["UUID"] for row in ask("device-context-list")]
    assert len(contexts) == 2
    cyborg("device-context-set", contexts[0], "--no-expiry", "--name", "")
    shown = ask("device-context-show", contexts[0])
    assert (shown["Expires"], shown["Name"]) == (None, None)
    assert len(shown["ARQs"]) == 1
    assert "ARQs" not in created
    assert "nothing to change" in cyborg("device-context-set", contexts[0], code=1)
    cyborg("device-context-delete", *contexts)
    assert ask("device-context-list") == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resources=FPGA:0"], "resources"),
        (["--resources=FPGA"], "CLASS:AMOUNT"),
        ([], "exactly one of"),
        (["--device-profile=p", "--requires=X"], "requires"),
        (["--resources=FPGA:1", "--config-data=k:a", "--config-data=k:b"], "must be different"),
    ],
)
def test_wrong_words_give_one_line(cyborg: Run, words: list[str], message: str) -> None:
    assert message in cyborg("device-context-create", *words, code=1)
