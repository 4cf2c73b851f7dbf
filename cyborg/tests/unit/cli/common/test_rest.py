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
from cyborg.cli.common.rest import (
    DEFAULT_MICROVERSION,
    CommandError,
    RestClient,
    format_fault,
    object_path,
)
from cyborg.standalone.http import HttpServer

Respond = Callable[[Request], Response]


@contextmanager
def serving(respond: Respond) -> Iterator[str]:
    def application(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        return respond(Request(environ))(environ, start)

    server = HttpServer("127.0.0.1", 0, "port")
    # With one thread, waitress would log that the second of two quick requests waits.
    server.start(application, threads=2)
    try:
        yield server.url
    finally:
        server.stop()


def rest(endpoint: str, **options: str) -> RestClient:
    arguments = ["--os-auth-type", "none", "--os-endpoint", endpoint]
    arguments += [argument for key, value in options.items() for argument in (f"--{key}", value)]
    return RestClient(app.CyborgApp(arguments).parser.parse_args(arguments))


@pytest.mark.parametrize("suffix", ["", "/", "/v2", "/v2/", "/accelerator"])
def test_call_path_contains_version_once(suffix: str) -> None:
    with serving(lambda request: Response(json={"path": request.path})) as url:
        path = rest(url + suffix).call("GET", "/devices")["path"]
    assert path == ("/accelerator" if suffix == "/accelerator" else "") + "/v2/devices"


def test_call_sends_microversion() -> None:
    def version(request: Request) -> Response:
        return Response(json={"version": request.headers["OpenStack-API-Version"]})

    with serving(version) as url:
        assert rest(url).call("GET", "/devices") == {
            "version": f"accelerator {DEFAULT_MICROVERSION}"
        }
        older = rest(url, **{"os-accelerator-api-version": "2.1"})
        assert older.call("GET", "/devices") == {"version": "accelerator 2.1"}


def test_call_sends_service_token() -> None:
    def echo_token(request: Request) -> Response:
        return Response(json={"token": request.headers.get("X-Service-Token")})

    with serving(echo_token) as url:
        assert rest(url).call("GET", "/devices", service_token="novas") == {"token": "novas"}
        for token in (None, ""):
            assert rest(url).call("GET", "/devices", service_token=token) == {"token": None}


def test_list_all_follows_pages() -> None:
    def page(request: Request) -> Response:
        number = int(str(request.params.get("marker", 0)))
        body: dict[str, Any] = {"devices": [{"uuid": number, "type": request.params["type"]}]}
        if number < 2:
            query = f"type={request.params['type']}&marker={number + 1}"
            body["devices_links"] = [{"rel": "next", "href": f"http://other/v2/devices?{query}"}]
        return Response(json=body)

    with serving(page) as url:
        rows = rest(url).list_all("/devices", "devices", type="FPGA", vendor=None)
    assert rows == [{"uuid": n, "type": "FPGA"} for n in range(3)]


def test_read_whole_has_object_and_rows_of_all_pages() -> None:
    def page(request: Request) -> Response:
        body: dict[str, Any] = {"servers": 3, "hosts": [request.params.get("marker", "a")]}
        if "marker" not in request.params:
            body["hosts_links"] = [{"rel": "next", "href": "http://other/v2/capacity?marker=b"}]
        return Response(json=body)

    with serving(page) as url:
        whole = rest(url).read_whole("/capacity", "hosts", host=None)
    assert (whole["servers"], whole["hosts"]) == (3, ["a", "b"])


def test_call_error_has_message_of_service() -> None:
    def refuse(_: Request) -> Response:
        inner = {"faultcode": "Client", "faultstring": "no such\nthing", "debuginfo": None}
        return Response(json={"error_message": json.dumps(inner)}, status=404)

    with serving(refuse) as url, pytest.raises(CommandError, match=r"^no such thing \(HTTP 404\)$"):
        rest(url).call("GET", "/devices/x")


def test_call_connection_refused_raises() -> None:
    with pytest.raises(CommandError, match=r"^Unable to establish connection to http://[^ ]+$"):
        rest("http://127.0.0.1:1").call("GET", "/devices")


def test_call_response_not_json_raises() -> None:
    with (
        serving(lambda _: Response(text="<p>")) as url,
        pytest.raises(CommandError, match="not JSON"),
    ):
        rest(url).call("GET", "/devices")


@pytest.mark.parametrize("text", ["[]", "null", '"up"', "{}", '{"versions": []}'])
def test_list_all_unexpected_response_raises(text: str) -> None:
    response = Response(text=text, content_type="application/json")
    with (
        serving(lambda _: response) as url,
        pytest.raises(CommandError, match="unexpected response"),
    ):
        rest(url).list_all("/devices", "devices")
    with (
        serving(lambda _: response) as url,
        pytest.raises(CommandError, match="unexpected response"),
    ):
        rest(url).read_whole("/devices", "devices")


def test_list_all_page_linking_to_itself_raises() -> None:
    links = [{"rel": "next", "href": "http://other/v2/devices?marker=1"}]
    response = Response(json={"devices": [], "devices_links": links})
    with (
        serving(lambda _: response) as url,
        pytest.raises(CommandError, match="a page links to itself"),
    ):
        rest(url).list_all("/devices", "devices")


def test_call_timeout_raises() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        with pytest.raises(CommandError, match="timed out"):
            rest(f"http://127.0.0.1:{port}", timeout="0.1").call("GET", "/devices")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no error message (HTTP 502)"),
        ("<html>", "<html> (HTTP 502)"),
        ('{"error": {"message": "away"}}', "away (HTTP 502)"),
        ('{"error_message": "plain"}', "plain (HTTP 502)"),
        ('{"error_message": "{broken"}', '{"error_message": "{broken"} (HTTP 502)'),
        ("[1]", "[1] (HTTP 502)"),
        ("[" * 100_000, f"{'[' * 300} (HTTP 502)"),
        ('{"error_message": "\\u001b[31mred\\u0007"}', "[31mred (HTTP 502)"),
    ],
)
def test_format_fault_handles_any_body(text: str, message: str) -> None:
    assert format_fault(502, text) == message


def test_object_path_cannot_leave_collection() -> None:
    assert object_path("/devices", "a/../b?c") == "/devices/a%2F..%2Fb%3Fc"
    for name in ("", ".", ".."):
        with pytest.raises(CommandError):
            object_path("/devices", name)


def test_call_without_endpoint_raises() -> None:
    options = argparse.Namespace(os_auth_type="none", os_accelerator_api_version=None, timeout=None)
    with pytest.raises(CommandError, match="no accelerator service"):
        RestClient(options).call("GET", "/devices")
