# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from webob import Request, Response

from cyborg.cli import accelerators, app, servers
from cyborg.cli.answers import Refused
from cyborg.cli.rest import Rest
from cyborg.tests.unit.cli.test_rest import serving

KNOWN = {"a": "ACTIVE", "b": "SHUTOFF"}


def nova(asked: Request) -> Response:
    uuid = asked.path.rsplit("/", 1)[-1]
    if uuid == "odd":
        return Response(json=["no server"])
    if uuid == "secret":
        return Response(status=403)
    if uuid not in KNOWN:
        return Response(status=404)
    return Response(json={"server": {"id": uuid, "status": KNOWN[uuid]}})


def rest(url: str, monkeypatch: pytest.MonkeyPatch) -> Rest:
    monkeypatch.setenv("OS_COMPUTE_ENDPOINT_OVERRIDE", url)
    words = ["--os-auth-type", "none", "--os-endpoint", "http://127.0.0.1:1"]
    return Rest(app.Cyborg(words).parser.parse_args(words))


def test_each_server_is_asked_after_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def answer(asked: Request) -> Response:
        seen.append(asked.path)
        return nova(asked)

    with serving(answer) as url:
        found = servers.states(rest(url, monkeypatch), ["a", "b", "a", "gone", "secret", "odd"])
    assert found == {
        "a": "ACTIVE",
        "b": "SHUTOFF",
        "gone": servers.GONE,
        "secret": "unknown (HTTP 403)",
        "odd": "unknown (no answer of Nova's)",
    }
    assert sorted(seen) == [f"/servers/{uuid}" for uuid in ("a", "b", "gone", "odd", "secret")]


def test_none_to_ask_after(monkeypatch: pytest.MonkeyPatch) -> None:
    assert servers.states(rest("http://127.0.0.1:1", monkeypatch), []) == {}


def test_a_nova_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="Nova does not say"):
        servers.states(rest("http://127.0.0.1:1", monkeypatch), ["a"])


def test_json_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda _: Response(body=json.dumps("x").encode())) as url:
        found = servers.states(rest(url, monkeypatch), ["a"])
    assert found == {"a": "unknown (no answer of Nova's)"}


def test_accelerators_with_their_servers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = dict.fromkeys(key for _, key in accelerators.LONG)
    held = [{**fields, "uuid": "1", "instance_uuid": "b"}, {**fields, "uuid": "2"}]

    def answer(asked: Request) -> Response:
        if asked.path == "/v2/accelerators":
            return Response(json={"accelerators": held})
        return nova(asked)

    with serving(answer) as url:
        monkeypatch.setenv("OS_COMPUTE_ENDPOINT_OVERRIDE", url)
        words = ["--os-auth-type", "none", "--os-endpoint", url]
        words += ["accelerator-list", "--detail", "-f", "json"]
        assert app.Cyborg(words).run(words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(row["UUID"], row["Server"]) for row in shown] == [("1", "SHUTOFF"), ("2", None)]
