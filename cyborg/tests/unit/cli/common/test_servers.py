# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from webob import Request, Response

from cyborg.cli import accelerators, app
from cyborg.cli.common import servers
from cyborg.cli.common.errors import CommandError
from cyborg.cli.common.rest import RestClient
from cyborg.tests.unit.cli.common.test_rest import serving

SERVERS = {"a": "ACTIVE", "b": "SHUTOFF"}


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
        states = servers.fetch_states(
            rest(url, monkeypatch), ["a", "b", "a", "gone", "secret", "odd"]
        )
    assert states == {
        "a": "ACTIVE",
        "b": "SHUTOFF",
        "gone": servers.NOT_FOUND,
        "secret": "unknown (HTTP 403)",
        "odd": "unknown (unexpected response from Nova)",
    }
    assert sorted(paths) == [f"/servers/{uuid}" for uuid in ("a", "b", "gone", "odd", "secret")]


def test_fetch_states_without_uuids_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    assert servers.fetch_states(rest("http://127.0.0.1:1", monkeypatch), []) == {}


def test_fetch_states_nova_unreachable_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommandError, match="cannot get the status of servers from Nova"):
        servers.fetch_states(rest("http://127.0.0.1:1", monkeypatch), ["a"])


def test_fetch_states_unexpected_json_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda _: Response(body=json.dumps("x").encode())) as url:
        states = servers.fetch_states(rest(url, monkeypatch), ["a"])
    assert states == {"a": "unknown (unexpected response from Nova)"}


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
