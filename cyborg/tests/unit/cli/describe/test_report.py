# SPDX-License-Identifier: Apache-2.0
import json
from typing import Any

import pytest
from webob import Request, Response

from cyborg.cli import app
from cyborg.tests.unit.cli.common.test_rest import serving

DEVICE = "6a1c3e9d-5f70-4248-8b1e-0c9d7e5f3a21"


class Cloud:
    """An API with devices, accelerators, and nothing else; ``forbidden`` paths are refused."""

    def __init__(self, handles: int) -> None:
        row = {"uuid": DEVICE, "address": "0000:3b:00.0", "hostname": "h", "backend": "gpus"}
        state = {"state": "ready", "placement": "in_sync", "model": "\x1b[1mModel " + "x" * 200}
        self.rows: dict[str, list[dict[str, Any]]] = {
            "devices": [{**row, **state, "std_board_info": '{"class": "0108"}'}],
            "accelerators": [
                {"uuid": f"{n:08}" + DEVICE[8:], "name": f"card-{n}", "address": f"0000:3b:00.{n}"}
                for n in range(handles)
            ],
        }
        self.forbidden: set[str] = set()
        self.requests: list[str] = []

    def __call__(self, request: Request) -> Response:
        self.requests.append(request.path_info)
        _, _, name, *below = request.path_info.split("/")
        if {name, *below} & self.forbidden:
            return Response(json={"error_message": "not allowed"}, status=403)
        if below:
            return Response(json={"error_message": "none"}, status=404)
        key = {"accelerator_requests": "arqs"}.get(name, name)
        rows = [row for row in self.rows.get(name, ()) if _matches(row, request)]
        links = [{"rel": "next", "href": f"http://h/v2/{name}?marker=x"}]
        return Response(json={key: rows, **({f"{key}_links": links} if len(rows) > 30 else {})})


def _matches(row: dict[str, Any], request: Request) -> bool:
    """Return whether a row is after the marker and has the values of the filters."""
    filters = {key: value for key, value in request.GET.items() if key in row}
    after = row["uuid"] > request.GET.get("marker", "")
    return after and all(row[key] == value for key, value in filters.items())


def run(cloud: Cloud, *arguments: str) -> int:
    with serving(cloud) as url:
        return app.main(["--os-auth-type", "none", "--os-endpoint", url, "describe", *arguments])


@pytest.mark.parametrize("handles", [1, 500])
def test_number_of_requests_does_not_depend_on_that_of_objects(
    handles: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud = Cloud(handles)
    assert run(cloud, DEVICE) == 0
    assert len(cloud.requests) == 6
    out = capsys.readouterr().out
    assert ("\nAccelerators (500+)\n" in out) is (handles == 500)
    assert ("\n  480 more\n" in out) is (handles == 500)


@pytest.mark.parametrize("text", ["card-3", "0000:3b:00.3"])
def test_one_page_finds_an_accelerator_by_name_or_address(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud = Cloud(8)
    assert run(cloud, text, "-f", "json") == 0
    assert json.loads(capsys.readouterr().out)["object"]["uuid"] == f"{3:08}" + DEVICE[8:]
    assert cloud.requests.count("/v2/accelerators") == 1


def test_text_fits_and_has_no_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert run(Cloud(1), "0000:3b:00.0") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 60
    assert "class=0108" in out


def test_json_has_types_and_the_errors_of_sections(capsys: pytest.CaptureFixture[str]) -> None:
    cloud = Cloud(2)
    cloud.forbidden = {"jobs", "services", "custody"}
    assert run(cloud, DEVICE[:8], "-f", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["object"]["std_board_info"] == {"class": "0108"}
    related = found["related"]
    assert len(related["accelerators"]["rows"]) == 2
    assert related["jobs"] == {"rows": [], "has_more": False, "error": "not allowed (HTTP 403)"}


def test_search_tells_what_the_caller_may_not_see(capsys: pytest.CaptureFixture[str]) -> None:
    cloud = Cloud(0)
    cloud.forbidden = {"services"}
    assert run(cloud, "compute-1") == 1
    assert capsys.readouterr().err.endswith("; services are not visible to you\n")
