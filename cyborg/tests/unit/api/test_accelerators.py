# SPDX-License-Identifier: Apache-2.0
"""Accelerators as each caller sees and labels them."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.api import INSTANCE, ApiBed, fault
from cyborg.fixtures.keystone import FakeKeystone
from cyborg.tests.unit.api.test_auth import keystone_conf

PATH = "/v2/accelerators"
LATEST = {"OpenStack-API-Version": "accelerator latest"}


@pytest.fixture
def guarded(sqlite_engine: sa.Engine, fake_keystone: FakeKeystone) -> ApiBed:
    """Return an API that asks keystone, with one card of three handles."""
    bed = ApiBed(keystone_conf(**fake_keystone.options()), sqlite_engine)
    rows.card(bed.engine, handles=3)
    profile = rows.profile(bed.engine)
    for n, handle in enumerate(rows.read(bed.engine, schema.attach_handles)[:2], 1):
        arq = rows.request(bed.engine, profile, state="Bound", project_id=f"project-{n}")
        (request,) = rows.read(bed.engine, schema.requests, uuid=arq)
        rows.change(bed.engine, schema.attach_handles, handle["id"], request_id=request["id"])
    return bed


def test_each_project_sees_and_labels_its_own(guarded: ApiBed, fake_keystone: FakeKeystone) -> None:
    first, second, free = [row["uuid"] for row in rows.read(guarded.engine, schema.attach_handles)]

    def ask(who: tuple[str, ...], method: str, path: str, body: Any = None) -> Any:
        *roles, project = who
        headers = {"X-Auth-Token": fake_keystone.token(roles, project), **LATEST}
        if "vouched" in roles:
            headers["X-Service-Token"] = fake_keystone.token(["service"])
        return guarded.call(method, PATH + path, body, headers)

    everything = {first, second, free}
    table = [
        (("member", "project-1"), {first}, {first: 200, second: 404, free: 404}),
        (("member", "project-2"), {second}, {first: 404, second: 200, free: 404}),
        (("reader", "project-1"), {first}, {first: 403, second: 403, free: 403}),
        (("member", "project-3"), set(), {first: 404, second: 404, free: 404}),
        (("accelerator_admin", "x"), everything, {first: 200, second: 200, free: 409}),
        (("vouched", "x"), everything, {first: 200, second: 200, free: 409}),
        # Without a service token a service's user is one of its project, as it is for ARQs.
        (("service", "project-2"), {second}, {first: 404, second: 200, free: 404}),
    ]
    for who, seen, labelled in table:
        # A member without the reader's role, as keystone gives it, would see nothing.
        roles = ("reader", *who) if who[0] == "member" else who
        found = ask(roles, "GET", "").json["accelerators"]
        assert {row["uuid"] for row in found} == seen, who
        for uuid, status in labelled.items():
            one = ask(roles, "GET", f"/{uuid}")
            assert one.status_int == (200 if uuid in seen else 404), (who, uuid)
            named = ask(roles, "PATCH", f"/{uuid}", {"name": "-".join(who)})
            assert named.status_int == status, (who, uuid)
    assert ask(("admin", "x"), "GET", f"/{first}").json["name"] == "vouched-x"
    for path in ("", f"/{first}"):
        assert ask(("swift_user", "project-1"), "GET", path).status_int == 403


def test_a_page_of_a_project_starts_behind_its_own(
    guarded: ApiBed, fake_keystone: FakeKeystone
) -> None:
    other = rows.read(guarded.engine, schema.attach_handles)[1]["uuid"]
    token = fake_keystone.token(["member", "reader"], "project-1")
    answer = guarded.call("GET", f"{PATH}?marker={other}", None, {"X-Auth-Token": token, **LATEST})
    assert answer.status_int == 400
    assert "is no row of this list" in fault(answer)


def test_from_bind_to_release(api: ApiBed) -> None:
    card = rows.card(api.engine, handles=2)
    api.profile()
    (arq,) = api.arqs()
    assert {a["state"] for a in api.get(PATH)["accelerators"]} == {"free"}
    assert api.bind(arq, card.provider).status_int == 202
    (held,) = api.get(f"{PATH}?instance={INSTANCE}")["accelerators"]
    assert (held["state"], held["arq_uuid"], held["tags"]) == ("bound", arq, [])
    mine = f"{PATH}/{held['uuid']}"
    made = api.call("PATCH", mine, {"name": "fast", "tags": ["a", "a"]}, LATEST)
    assert made.json == held | {"name": "fast", "tags": ["a"]} == api.get(mine)
    assert [r["uuid"] for r in api.get(f"{PATH}?state=bound")["accelerators"]] == [held["uuid"]]
    gone = api.call("DELETE", f"/v2/accelerator_requests?instance={INSTANCE}")
    assert gone.status_int == 204
    assert (api.get(mine)["name"], api.get(mine)["state"]) == (None, "free")
    # An ARQ as clients know it does not grow by its label.
    assert not any(key.startswith("label") for key in api.get("/v2/accelerator_requests"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "nothing to change"),
        ({"name": ""}, "name"),
        ({"name": "n" * 256}, "name"),
        ({"tags": "a"}, "tags"),
        ({"tags": [7]}, "tags"),
        ({"tags": ["t"] * 51}, "tags"),
        ({"description": "a\0"}, "description"),
        ({"state": "free"}, "state: unknown field"),
        ([], "object"),
    ],
)
def test_what_is_no_label(api: ApiBed, body: Any, said: str) -> None:
    rows.card(api.engine, handles=1)
    (handle,) = rows.read(api.engine, schema.attach_handles)
    answer = api.call("PATCH", f"{PATH}/{handle['uuid']}", body, LATEST)
    assert answer.status_int == 400
    assert said in fault(answer)
    assert api.line.calls == []
