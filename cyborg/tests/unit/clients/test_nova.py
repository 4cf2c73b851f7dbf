# SPDX-License-Identifier: Apache-2.0
import threading
from typing import Any

import pytest

from cyborg.clients import nova
from cyborg.core.audit_view import Instance
from cyborg.core.errors import Invalid, Misconfigured, TimedOut, Unavailable
from cyborg.fixtures.nova import FakeNova
from cyborg.fixtures.options import make_conf


def event(tag: str, server: str = "server-1") -> dict[str, str]:
    return {"name": nova.BOUND, "server_uuid": server, "tag": tag, "status": "completed"}


def client(fake: FakeNova, timeout: float = 10.0) -> nova.Nova:
    return nova.Nova(fake.adapter(), timeout)


def test_events_travel_at_the_microversion_that_knows_them(fake_nova: FakeNova) -> None:
    assert client(fake_nova).send([event("a"), event("b")]) == (200, 200)
    (call,) = fake_nova.calls
    assert call["path"] == "/v2.1/os-server-external-events"
    assert call["headers"]["OpenStack-API-Version"] == "compute 2.82"
    assert call["events"] == [event("a"), event("b")]


def test_each_event_has_its_own_code(fake_nova: FakeNova) -> None:
    fake_nova.codes = {"a": 422, "c": 404}
    assert client(fake_nova).send([event("a"), event("b"), event("c")]) == (422, 200, 404)


def test_no_instance_at_all_is_a_404_of_each(fake_nova: FakeNova) -> None:
    fake_nova.status = 404
    fake_nova.body = {"itemNotFound": {"code": 404, "message": "none"}}
    assert client(fake_nova).send([event("a"), event("b")]) == (404, 404)


def test_a_wrong_address_is_not_taken_for_a_missing_instance(fake_nova: FakeNova) -> None:
    fake_nova.status, fake_nova.body = 404, b"<html>not here</html>"
    with pytest.raises(Invalid, match="Nova answered 404"):
        client(fake_nova).send([event("a")])


@pytest.mark.parametrize("status", [500, 503, 401, 403, 429])
def test_a_nova_that_cannot_is_away(fake_nova: FakeNova, status: int) -> None:
    fake_nova.status, fake_nova.body = status, {}
    with pytest.raises(Unavailable) as raised:
        client(fake_nova).send([event("a")])
    assert raised.value.details == {"status": status}


def test_a_refusal_is_ours(fake_nova: FakeNova) -> None:
    fake_nova.refused_servers = {"server-1"}
    with pytest.raises(Invalid, match="malformed"):
        client(fake_nova).send([event("a")])


def test_an_answer_that_is_no_list_of_events(fake_nova: FakeNova) -> None:
    fake_nova.status, fake_nova.body = 207, {"unexpected": 1}
    with pytest.raises(Unavailable, match="no list of events"):
        client(fake_nova).send([event("a")])


def test_a_nova_that_hangs_runs_out_of_time(fake_nova: FakeNova) -> None:
    fake_nova.hang = threading.Event()
    with pytest.raises(TimedOut, match=r"0\.2 s"):
        client(fake_nova, timeout=0.2).send([event("a")])


def test_nobody_listens() -> None:
    fake = FakeNova()
    fake.url = "http://127.0.0.1:1"
    with pytest.raises(Unavailable, match="cannot be reached"):
        client(fake).send([event("a")])


def test_notifying_without_a_way_to_nova_is_refused_at_start() -> None:
    with pytest.raises(Misconfigured, match="auth_type is not set"):
        nova.make(make_conf())
    nova.make(make_conf(nova={"notify": False}))


def test_an_unknown_auth_plugin_is_named() -> None:
    with pytest.raises(Misconfigured, match="nonsense"):
        nova.make(make_conf(nova={"auth_type": "nonsense"}))


def test_the_client_of_the_options_works(fake_nova: FakeNova) -> None:
    reach = {"auth_type": "none", "endpoint_override": fake_nova.url, "request_timeout": 5.0}
    made = nova.make(make_conf(nova=reach))
    assert made.send([event("a")]) == (200,)


def test_the_servers_of_a_host_page_after_page(fake_nova: FakeNova) -> None:
    fake_nova.page = 2
    for name in ("a", "b", "c", "d", "e"):
        fake_nova.server(name, "compute 1" if name != "e" else "compute-2")
    assert client(fake_nova).on_host("compute 1") == {"a", "b", "c", "d"}
    assert client(fake_nova).on_host("nobody") == frozenset()
    assert fake_nova.asked[0] == "/v2.1/servers?all_tenants=1&host=compute%201&limit=1000"


def test_too_many_pages_are_not_believed(
    fake_nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nova, "_PAGES", 2)
    fake_nova.page = 1
    for name in ("a", "b", "c"):
        fake_nova.server(name, "h")
    with pytest.raises(Unavailable, match="more than 2 servers on host h"):
        client(fake_nova).on_host("h")


def test_a_server(fake_nova: FakeNova) -> None:
    fake_nova.server("a", "h", "RESIZE")
    fake_nova.server("b", None, **{"OS-EXT-STS:task_state": "spawning"})
    fake_nova.servers["c"] = {"id": "c", "status": "ACTIVE"}
    one, two, three = (client(fake_nova).server(name) for name in ("a", "b", "c"))
    assert one == Instance("a", "RESIZE", "h", "h")
    assert two == Instance("b", "ACTIVE", task="spawning")
    assert three == Instance("c", "ACTIVE", told=False)
    assert client(fake_nova).server("d") is None


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, b"<html>not here</html>", Invalid),
        (400, {}, Invalid),
        (403, {}, Unavailable),
        (503, {}, Unavailable),
        (200, b"what", Unavailable),
        (200, {"other": 1}, Unavailable),
        (200, [], Unavailable),
    ],
)
def test_what_is_no_server_is_not_taken_for_one(
    fake_nova: FakeNova, status: int, body: Any, kind: type[Exception]
) -> None:
    fake_nova.status, fake_nova.body = status, body
    with pytest.raises(kind):
        client(fake_nova).server("a")
    with pytest.raises(kind):
        client(fake_nova).on_host("h")
