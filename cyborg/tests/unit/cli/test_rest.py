# SPDX-License-Identifier: Apache-2.0
import argparse
import json
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from webob import Request, Response

from cyborg.cli import app
from cyborg.cli.answers import Refused, at, fault
from cyborg.cli.rest import LATEST, Rest
from cyborg.standalone.http import HttpServer

Answering = Callable[[Request], Response]


@contextmanager
def serving(answer: Answering) -> Iterator[str]:
    def application(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        return answer(Request(environ))(environ, start)

    server = HttpServer("127.0.0.1", 0, "port")
    server.start(application, threads=1)
    try:
        yield server.url
    finally:
        server.stop()


def rest(endpoint: str, **more: str) -> Rest:
    words = ["--os-auth-type", "none", "--os-endpoint", endpoint]
    words += [word for key, value in more.items() for word in (f"--{key}", value)]
    return Rest(app.Cyborg(words).parser.parse_args(words))


@pytest.mark.parametrize("suffix", ["", "/", "/v2", "/v2/", "/accelerator"])
def test_the_version_is_in_the_path_once(suffix: str) -> None:
    with serving(lambda asked: Response(json={"path": asked.path})) as url:
        path = rest(url + suffix).call("GET", "/devices")["path"]
    assert path == ("/accelerator" if suffix == "/accelerator" else "") + "/v2/devices"


def test_the_microversion_is_asked_for() -> None:
    def version(asked: Request) -> Response:
        return Response(json={"version": asked.headers["OpenStack-API-Version"]})

    with serving(version) as url:
        assert rest(url).call("GET", "/devices") == {"version": f"accelerator {LATEST}"}
        older = rest(url, **{"os-accelerator-api-version": "2.1"})
        assert older.call("GET", "/devices") == {"version": "accelerator 2.1"}


def test_the_word_of_a_service_goes_beside_the_callers() -> None:
    def vouched(asked: Request) -> Response:
        return Response(json={"token": asked.headers.get("X-Service-Token")})

    with serving(vouched) as url:
        assert rest(url).call("GET", "/devices", service_token="novas") == {"token": "novas"}
        for token in (None, ""):
            assert rest(url).call("GET", "/devices", service_token=token) == {"token": None}


def test_every_page_is_read() -> None:
    def page(asked: Request) -> Response:
        number = int(asked.params.get("marker", 0))
        body: dict[str, Any] = {"devices": [{"uuid": number, "type": asked.params["type"]}]}
        if number < 2:
            query = f"type={asked.params['type']}&marker={number + 1}"
            body["devices_links"] = [{"rel": "next", "href": f"http://other/v2/devices?{query}"}]
        return Response(json=body)

    with serving(page) as url:
        rows = rest(url).rows("/devices", "devices", type="FPGA", vendor=None)
    assert rows == [{"uuid": n, "type": "FPGA"} for n in range(3)]


def test_a_refusal_is_the_servers_own_words() -> None:
    def refuse(_: Request) -> Response:
        inner = {"faultcode": "Client", "faultstring": "no such\nthing", "debuginfo": None}
        return Response(json={"error_message": json.dumps(inner)}, status=404)

    with serving(refuse) as url, pytest.raises(Refused, match=r"^no such thing \(HTTP 404\)$"):
        rest(url).call("GET", "/devices/x")


def test_nobody_there() -> None:
    with pytest.raises(Refused, match=r"^Unable to establish connection to http://[^ ]+$"):
        rest("http://127.0.0.1:1").call("GET", "/devices")


def test_not_json() -> None:
    with serving(lambda _: Response(text="<p>")) as url, pytest.raises(Refused, match="not JSON"):
        rest(url).call("GET", "/devices")


@pytest.mark.parametrize("text", ["[]", "null", '"up"', "{}", '{"versions": []}'])
def test_something_else_answers(text: str) -> None:
    answer = Response(text=text, content_type="application/json")
    with serving(lambda _: answer) as url, pytest.raises(Refused, match="answered"):
        rest(url).rows("/devices", "devices")


def test_a_page_that_leads_to_itself() -> None:
    links = [{"rel": "next", "href": "http://other/v2/devices?marker=1"}]
    answer = Response(json={"devices": [], "devices_links": links})
    with serving(lambda _: answer) as url, pytest.raises(Refused, match="this one again"):
        rest(url).rows("/devices", "devices")


def test_a_service_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        with pytest.raises(Refused, match="timed out"):
            rest(f"http://127.0.0.1:{port}", timeout="0.1").call("GET", "/devices")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no explanation (HTTP 502)"),
        ("<html>", "<html> (HTTP 502)"),
        ('{"error": {"message": "away"}}', "away (HTTP 502)"),
        ('{"error_message": "plain"}', "plain (HTTP 502)"),
        ('{"error_message": "{broken"}', '{"error_message": "{broken"} (HTTP 502)'),
        ("[1]", "[1] (HTTP 502)"),
        ("[" * 100_000, f"{'[' * 300} (HTTP 502)"),
        ('{"error_message": "\\u001b[31mred\\u0007"}', "[31mred (HTTP 502)"),
    ],
)
def test_other_errors(text: str, said: str) -> None:
    assert fault(502, text) == said


def test_names_cannot_leave_their_collection() -> None:
    assert at("/devices", "a/../b?c") == "/devices/a%2F..%2Fb%3Fc"
    for name in ("", ".", ".."):
        with pytest.raises(Refused):
            at("/devices", name)


def test_no_endpoint() -> None:
    options = argparse.Namespace(os_auth_type="none", os_accelerator_api_version=None, timeout=None)
    with pytest.raises(Refused, match="no accelerator service"):
        Rest(options).call("GET", "/devices")
