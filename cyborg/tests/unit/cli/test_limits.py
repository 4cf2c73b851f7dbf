# SPDX-License-Identifier: Apache-2.0
"""``cyborg limits-show``."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from webob import Request, Response

from cyborg.cli import app
from cyborg.tests.unit.cli.common.test_rest import serving

LIMITS = {
    "project_id": "p",
    "accelerator_requests": {"limit": 1000, "used": 4},
    "attachments": {"limit": 1000, "used": 1},
    "device_contexts": {"limit": -1, "used": 2},
    "resources": [
        {"resource_class": "CUSTOM_QAT", "limit": -1, "used": 1, "bound": 0},
        {"resource_class": "FPGA", "limit": 32, "used": 3, "bound": 2},
    ],
}


@pytest.fixture
def requests() -> list[str]:
    return []


@pytest.fixture
def endpoint(requests: list[str]) -> Iterator[str]:
    def respond(request: Request) -> Response:
        requests.append(request.path_qs)
        return Response(json=LIMITS)

    with serving(respond) as url:
        yield url


def run(endpoint: str, *words: str) -> int:
    login = ["--os-auth-type", "none", "--os-endpoint", endpoint]
    return app.main([*login, "limits-show", *words])


def test_limits_show_prints_a_row_for_each_class(
    endpoint: str, requests: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(endpoint) == 0
    lines = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in line] for line in lines if len(line) > 1]
    assert cells == [
        ["Resource", "Limit", "Used", "Bound"],
        ["accelerator requests", "1000", "4", ""],
        ["attachments", "1000", "1", ""],
        ["device contexts", "unlimited", "2", ""],
        ["CUSTOM_QAT", "unlimited", "1", "0"],
        ["FPGA", "32", "3", "2"],
    ]
    assert requests == ["/v2/limits"]


def test_limits_show_of_another_project_in_json(
    endpoint: str, requests: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(endpoint, "--project", "p", "-f", "json") == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert rows[0] == {"Resource": "accelerator requests", "Limit": 1000, "Used": 4, "Bound": None}
    assert rows[1] == {"Resource": "attachments", "Limit": 1000, "Used": 1, "Bound": None}
    assert rows[2] == {"Resource": "device contexts", "Limit": -1, "Used": 2, "Bound": None}
    assert rows[3] == {"Resource": "CUSTOM_QAT", "Limit": -1, "Used": 1, "Bound": 0}
    assert requests == ["/v2/limits?project_id=p"]
