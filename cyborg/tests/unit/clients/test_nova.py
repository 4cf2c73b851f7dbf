# SPDX-License-Identifier: Apache-2.0
import threading
from datetime import datetime
from typing import Any

import pytest

from cyborg.clients import nova
from cyborg.core.errors import Invalid, Misconfigured, TimedOut, Unavailable
from cyborg.core.hosts import Instance
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.machine.options import make_conf


def event(tag: str, server: str = "server-1") -> dict[str, str]:
    return {"name": nova.BOUND, "server_uuid": server, "tag": tag, "status": "completed"}


def client(fake: FakeNova, timeout: float = 10.0) -> nova.Nova:
    return nova.Nova(fake.adapter(), timeout)


def test_send_uses_the_required_microversion(fake_nova: FakeNova) -> None:
    assert client(fake_nova).send([event("a"), event("b")]) == [None, None]
    (call,) = fake_nova.calls
    assert call["path"] == "/v2.1/os-server-external-events"
    assert call["headers"]["OpenStack-API-Version"] == "compute 2.82"
    assert call["events"] == [event("a"), event("b")]


def test_send_returns_an_error_per_event(fake_nova: FakeNova) -> None:
    fake_nova.codes = {"a": 422, "c": 404, "d": 400}
    errors = client(fake_nova).send([event(tag) for tag in "abcd"])
    assert errors == [None, None, None, "Nova answered 400 for this event"]


def test_send_without_any_instance_ends_the_events(fake_nova: FakeNova) -> None:
    fake_nova.status = 404
    fake_nova.body = {"itemNotFound": {"code": 404, "message": "none"}}
    assert client(fake_nova).send([event("a"), event("b")]) == [None, None]


def test_send_to_a_wrong_endpoint_is_invalid(fake_nova: FakeNova) -> None:
    fake_nova.status, fake_nova.body = 404, b"<html>not here</html>"
    with pytest.raises(Invalid, match="Nova answered 404"):
        client(fake_nova).send([event("a")])


@pytest.mark.parametrize("status", [500, 503, 401, 403, 429])
def test_send_to_a_failing_nova_is_unavailable(fake_nova: FakeNova, status: int) -> None:
    fake_nova.status, fake_nova.body = status, {}
    with pytest.raises(Unavailable) as raised:
        client(fake_nova).send([event("a")])
    assert raised.value.details == {"status": status}


def test_send_of_a_rejected_event_is_invalid(fake_nova: FakeNova) -> None:
    fake_nova.refused_servers = {"server-1"}
    with pytest.raises(Invalid, match="malformed"):
        client(fake_nova).send([event("a")])


def test_send_with_an_unexpected_response_is_unavailable(fake_nova: FakeNova) -> None:
    fake_nova.status, fake_nova.body = 207, {"unexpected": 1}
    with pytest.raises(Unavailable, match="no list of events"):
        client(fake_nova).send([event("a")])


def test_send_to_a_hanging_nova_times_out(fake_nova: FakeNova) -> None:
    fake_nova.hang = threading.Event()
    with pytest.raises(TimedOut, match=r"0\.2 s"):
        client(fake_nova, timeout=0.2).send([event("a")])


def test_send_to_an_unreachable_nova_is_unavailable() -> None:
    fake = FakeNova()
    fake.url = "http://127.0.0.1:1"
    with pytest.raises(Unavailable, match="cannot be reached"):
        client(fake).send([event("a")])


def test_make_without_auth_type_is_rejected() -> None:
    with pytest.raises(Misconfigured, match="auth_type is not set"):
        nova.make(make_conf())
    nova.make(make_conf(nova={"send_events": False}))


def test_make_with_an_unknown_auth_plugin_names_it() -> None:
    with pytest.raises(Misconfigured, match="nonsense"):
        nova.make(make_conf(nova={"auth_type": "nonsense"}))


def test_make_from_options_sends_events(fake_nova: FakeNova) -> None:
    options = {"auth_type": "none", "endpoint_override": fake_nova.url, "request_timeout": 5.0}
    from_options = nova.make(make_conf(nova=options))
    assert from_options.send([event("a")]) == [None]


def test_servers_on_host_reads_all_pages(fake_nova: FakeNova) -> None:
    fake_nova.page_size = 2
    for name in ("a", "b", "c", "d", "e"):
        fake_nova.add_server(name, "compute 1" if name != "e" else "compute-2")
    assert client(fake_nova).servers_on_host("compute 1") == {"a", "b", "c", "d"}
    assert client(fake_nova).servers_on_host("no-such-host") == frozenset()
    assert fake_nova.requested_paths[0] == "/v2.1/servers?all_tenants=1&host=compute%201&limit=1000"


def test_deleted_servers_are_listed_since_a_time(fake_nova: FakeNova) -> None:
    fake_nova.deleted = {"a", "b"}
    fake_nova.add_server("c", "h")
    since = datetime(2026, 1, 2, 3, 4, 5, 6)
    assert client(fake_nova).deleted_servers(since) == {"a", "b"}
    assert fake_nova.requested_paths[0] == (
        "/v2.1/servers?all_tenants=1&deleted=true&changes-since=2026-01-02T03%3A04%3A05Z&limit=1000"
    )


@pytest.mark.parametrize("building", [None, "BUILD", "REBUILD"])
def test_project_with_many_active_servers_builds_only_if_one_is_built(
    fake_nova: FakeNova, building: str | None
) -> None:
    fake_nova.page_size = 3
    for number in range(5):
        fake_nova.add_server(f"a{number}", "h", tenant_id="p")
    fake_nova.add_server("other", "h", "BUILD", tenant_id="q")
    fake_nova.add_server("shelved", None, "SHELVED_OFFLOADED", tenant_id="p")
    if building:
        fake_nova.add_server("new", None, building, tenant_id="p")
    assert client(fake_nova).is_building("p") is (building is not None)


def test_project_with_more_shelved_servers_than_a_page_may_build(fake_nova: FakeNova) -> None:
    fake_nova.page_size = 3
    for number in range(3):
        fake_nova.add_server(f"s{number}", None, "SHELVED_OFFLOADED", tenant_id="p")
    assert client(fake_nova).is_building("p")


def test_servers_on_host_with_too_many_pages_is_unavailable(
    fake_nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nova, "_PAGES", 2)
    fake_nova.page_size = 1
    for name in ("a", "b", "c"):
        fake_nova.add_server(name, "h")
    with pytest.raises(Unavailable, match="more than 2 servers on host h"):
        client(fake_nova).servers_on_host("h")


def test_get_server_returns_the_instance(fake_nova: FakeNova) -> None:
    fake_nova.add_server("a", "h", "RESIZE")
    fake_nova.add_server("b", None, **{"OS-EXT-STS:task_state": "spawning"})
    fake_nova.servers["c"] = {"id": "c", "status": "ACTIVE"}
    first, second, third = (client(fake_nova).get_server(name) for name in ("a", "b", "c"))
    assert first == Instance("a", "RESIZE", "h", "h")
    assert second == Instance("b", "ACTIVE", task="spawning")
    assert third == Instance("c", "ACTIVE", host_visible=False)
    assert client(fake_nova).get_server("d") is None


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
def test_unexpected_server_response_is_rejected(
    fake_nova: FakeNova, status: int, body: Any, kind: type[Exception]
) -> None:
    fake_nova.status, fake_nova.body = status, body
    with pytest.raises(kind):
        client(fake_nova).get_server("a")
    with pytest.raises(kind):
        client(fake_nova).servers_on_host("h")


def test_event_without_an_answer_is_sent_again(fake_nova: FakeNova) -> None:
    first, second = event("a"), event("b")
    fake_nova.status, fake_nova.body = 207, {"events": [{**first, "code": 200}]}
    assert client(fake_nova).send([first, second]) == [None, "Nova answered nothing for this event"]
