# SPDX-License-Identifier: Apache-2.0
"""Exit status and errors of ``discover-services --wait``."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from webob import Request, Response

from cyborg.cli import app
from cyborg.tests.unit.cli.common.test_rest import serving

UUID = "a0000000-0000-4000-8000-00000000000a"
Run = Callable[..., tuple[str, str]]


class Service:
    """A service that starts a discovery and then shows it in one state."""

    def __init__(self) -> None:
        self.backends: list[dict[str, Any]] = []

    def __call__(self, request: Request) -> Response:
        if request.method == "POST":
            return Response(json={"uuid": UUID, "state": "IN-PROGRESS", "links": []}, status=202)
        states = {backend["state"] for backend in self.backends}
        state = next(s for s in ("IN-PROGRESS", "FAILED", "DONE") if s in states)
        return Response(json={"uuid": UUID, "state": state, "backends": self.backends})


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def cyborg(service: Service, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    with serving(service) as url:

        def run(*arguments: str, code: int = 0) -> tuple[str, str]:
            options = ["--os-auth-type", "none", "--os-endpoint", url]
            assert app.main([*options, "discover-services", *arguments]) == code
            output = capsys.readouterr()
            return output.out, output.err

        yield run


def backend(host: str, state: str, error: str | None = None) -> dict[str, Any]:
    return {"host": host, "backend": "gpus", "state": state, "error": error}


def test_wait_failed_backend_exits_with_1(service: Service, cyborg: Run) -> None:
    service.backends = [backend("a", "DONE"), backend("b", "FAILED", "the driver hangs")]
    out, err = cyborg("--wait", "-f", "json", code=1)
    assert [row["State"] for row in json.loads(out)] == ["DONE", "FAILED"]
    assert "b (gpus): the driver hangs" in err


def test_wait_successful_backends_exit_with_0(service: Service, cyborg: Run) -> None:
    service.backends = [backend("a", "DONE")]
    assert cyborg("--wait", "-f", "value", "-c", "State")[0] == "DONE\n"


def test_wait_timeout_names_pending_backends(service: Service, cyborg: Run) -> None:
    service.backends = [backend("a", "DONE"), backend("b", "IN-PROGRESS")]
    _, err = cyborg("--wait", "--within", "0", code=1)
    assert "1 of 2 backends have not reported (b (gpus)) after 0 s" in err


def test_failed_backend_without_wait_exits_with_0(service: Service, cyborg: Run) -> None:
    service.backends = [backend("b", "FAILED", "the driver hangs")]
    assert "FAILED" in cyborg()[0]
