# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from webob import Request, Response

from cyborg.cli import accelerators, app
from cyborg.cli.common.rest import CommandError, RestClient
from cyborg.testing.fake_nova import OWN_PROJECT, FakeNova
from cyborg.tests.unit.cli.common.test_rest import serving

SERVERS = {"a": "ACTIVE", "b": "SHUTOFF"}


def add_servers(fake: FakeNova, number: int, **fields: str) -> list[str]:
    uuids = [f"s{n:03}" for n in range(number)]
    for uuid in uuids:
        fake.add_server(uuid, "h", **fields)
    return uuids


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the list of Nova be read for few servers."""
    monkeypatch.setattr(accelerators, "MAX_SINGLE", 100)
    monkeypatch.setattr(accelerators, "SERVERS_OF_PAGE", 10)


def nova(request: Request) -> Response:
    uuid = request.path.rsplit("/", 1)[-1]
    if uuid == "odd":
        return Response(json=["no server"])
    if uuid == "secret":
        return Response(status=403)
    if uuid not in SERVERS:
        return Response(status=404)
    return Response(json={"server": {"id": uuid, "status": SERVERS[uuid]}})


def rest(url: str, monkeypatch: pytest.MonkeyPatch) -> RestClient:
    monkeypatch.setenv("OS_COMPUTE_ENDPOINT_OVERRIDE", url)
    arguments = ["--os-auth-type", "none", "--os-endpoint", "http://127.0.0.1:1"]
    return RestClient(app.CyborgApp(arguments).parser.parse_args(arguments))


def test_fetch_states_requests_each_server_once(monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []

    def respond(request: Request) -> Response:
        paths.append(request.path)
        return nova(request)

    with serving(respond) as url:
        found = accelerators.fetch_states(
            rest(url, monkeypatch), ["a", "b", "a", "gone", "secret", "odd"]
        )
    assert found.warning == (
        "the status of 2 of 5 servers is unknown: unknown (unexpected response from Nova)"
    )
    assert found.states == {
        "a": "ACTIVE",
        "b": "SHUTOFF",
        "gone": accelerators.NOT_FOUND,
        "secret": "unknown (HTTP 403)",
        "odd": "unknown (unexpected response from Nova)",
    }
    assert sorted(paths) == [f"/servers/{uuid}" for uuid in ("a", "b", "gone", "odd", "secret")]


def test_fetch_states_without_uuids_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    client = rest("http://127.0.0.1:1", monkeypatch)
    assert accelerators.fetch_states(client, []) == accelerators.ServerStates({})


def test_fetch_states_nova_unreachable_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommandError, match="cannot get the status of servers from Nova"):
        accelerators.fetch_states(rest("http://127.0.0.1:1", monkeypatch), ["a"])


def test_fetch_states_unexpected_json_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda _: Response(body=json.dumps("x").encode())) as url:
        found = accelerators.fetch_states(rest(url, monkeypatch), ["a"])
    assert found.states == {"a": "unknown (unexpected response from Nova)"}


def test_fetch_states_of_many_servers_reads_the_list_of_nova(
    fake_nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuids = add_servers(fake_nova, 120)
    fake_nova.add_server("s999", "h")
    fake_nova.page_size = 50
    found = accelerators.fetch_states(rest(fake_nova.url, monkeypatch), [*uuids, "gone"])
    expected = {**dict.fromkeys(uuids, "ACTIVE"), "gone": accelerators.NOT_FOUND}
    assert found == accelerators.ServerStates(expected)
    *pages, last = fake_nova.requested_paths
    assert [path.partition("?")[2] for path in pages] == [
        f"all_tenants=1{marker}" for marker in ("", "&marker=s049", "&marker=s099", "&marker=s999")
    ]
    assert last == "/v2.1/servers/gone"


def test_fetch_states_stops_the_list_at_the_last_server(
    fake_nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuids = add_servers(fake_nova, 150)
    fake_nova.page_size = 60
    accelerators.fetch_states(rest(fake_nova.url, monkeypatch), uuids[:110])
    assert len(fake_nova.requested_paths) == 2


def test_fetch_states_of_a_member_reads_the_list_of_the_project(
    fake_nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuids = add_servers(fake_nova, 101, tenant_id=OWN_PROJECT)
    fake_nova.add_server("z", "h", tenant_id="other")
    fake_nova.is_admin = False
    found = accelerators.fetch_states(rest(fake_nova.url, monkeypatch), [*uuids, "z"])
    expected = {**dict.fromkeys(uuids, "ACTIVE"), "z": accelerators.NOT_FOUND}
    assert found == accelerators.ServerStates(expected)
    assert len(fake_nova.requested_paths) == 4


def test_fetch_states_repeats_a_lost_page_once(
    fake_nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuids = add_servers(fake_nova, 120)
    fake_nova.page_size, fake_nova.lost_requests = 60, {1}
    found = accelerators.fetch_states(rest(fake_nova.url, monkeypatch), uuids)
    assert found == accelerators.ServerStates(dict.fromkeys(uuids, "ACTIVE"))
    assert len(fake_nova.requested_paths) == 3


@pytest.mark.slow
def test_fetch_states_of_a_broken_list_requests_some_servers_one_by_one(
    fake_nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuids = add_servers(fake_nova, 220)
    fake_nova.page_size, fake_nova.lost_requests = 60, {1, 2}
    found = accelerators.fetch_states(rest(fake_nova.url, monkeypatch), uuids)
    assert found.states == {
        **dict.fromkeys(uuids[:160], "ACTIVE"),
        **dict.fromkeys(uuids[160:], accelerators.NOT_LISTED),
    }
    assert found.warning is not None
    assert found.warning.startswith("the status of 60 of 220 servers is unknown: Unable to")
    assert len(fake_nova.requested_paths) == 103


@pytest.mark.slow
def test_fetch_states_reads_few_pages_of_a_list_of_many_servers(
    fake_nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuids = add_servers(fake_nova, 240)
    fake_nova.page_size = 10
    found = accelerators.fetch_states(rest(fake_nova.url, monkeypatch), uuids[120:])
    # Of 24 pages 12 are read, which have none of them.
    assert len(fake_nova.requested_paths) == 12 + accelerators.MAX_SINGLE
    assert sorted(found.states.values()) == ["ACTIVE"] * 100 + [accelerators.NOT_LISTED] * 20


@pytest.mark.slow
def test_fetch_states_lost_connections_are_unknown(
    fake_nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuids = add_servers(fake_nova, 20)
    fake_nova.lost_requests = {3, 17}
    found = accelerators.fetch_states(rest(fake_nova.url, monkeypatch), uuids)
    assert sorted(found.states.values()) == ["ACTIVE"] * 18 + [accelerators.NO_RESPONSE] * 2
    assert found.warning is not None
    assert found.warning.startswith("the status of 2 of 20 servers is unknown: Unable to")


@pytest.mark.slow
def test_fetch_states_nova_stopped_sends_few_requests(
    fake_nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuids = add_servers(fake_nova, 90)
    fake_nova.status = None
    with pytest.raises(CommandError, match="cannot get the status of servers from Nova: Unable"):
        accelerators.fetch_states(rest(fake_nova.url, monkeypatch), uuids)
    assert len(fake_nova.requested_paths) < 2 * (
        accelerators.MAX_FAILURES + accelerators.MAX_CONCURRENT
    )


def test_accelerator_list_detail_warns_of_unknown_servers(
    fake_nova: FakeNova, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uuids = add_servers(fake_nova, 2)
    fake_nova.lost_requests = {0}
    fields = dict.fromkeys(key for _, key in accelerators.LONG)
    rows = [{**fields, "uuid": uuid, "instance_uuid": uuid} for uuid in uuids]
    with serving(lambda _: Response(json={"accelerators": rows})) as url:
        monkeypatch.setenv("OS_COMPUTE_ENDPOINT_OVERRIDE", fake_nova.url)
        arguments = ["--os-auth-type", "none", "--os-endpoint", url]
        arguments += ["accelerator-list", "--detail", "-f", "json"]
        assert app.CyborgApp(arguments).run(arguments) == 0
    output, error = capsys.readouterr()
    assert {row["Server"] for row in json.loads(output)} == {"ACTIVE", accelerators.NO_RESPONSE}
    assert error.startswith("the status of 1 of 2 servers is unknown: Unable to")


def test_accelerator_list_detail_shows_server_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = dict.fromkeys(key for _, key in accelerators.LONG)
    rows = [{**fields, "uuid": "1", "instance_uuid": "b"}, {**fields, "uuid": "2"}]

    def respond(request: Request) -> Response:
        if request.path == "/v2/accelerators":
            return Response(json={"accelerators": rows})
        return nova(request)

    with serving(respond) as url:
        monkeypatch.setenv("OS_COMPUTE_ENDPOINT_OVERRIDE", url)
        arguments = ["--os-auth-type", "none", "--os-endpoint", url]
        arguments += ["accelerator-list", "--detail", "-f", "json"]
        assert app.CyborgApp(arguments).run(arguments) == 0
    output = json.loads(capsys.readouterr().out)
    assert [(row["UUID"], row["Server"]) for row in output] == [("1", "SHUTOFF"), ("2", None)]
