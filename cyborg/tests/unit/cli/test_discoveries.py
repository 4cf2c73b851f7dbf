# SPDX-License-Identifier: Apache-2.0
"""Exit status and errors of ``discover-services --wait``."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from webob import Request, Response

from cyborg.cli import app
from cyborg.cli.common.base import MAX_PARTS
from cyborg.tests.unit.cli.common.test_rest import serving

UUID = "a0000000-0000-4000-8000-00000000000a"
Run = Callable[..., tuple[str, str]]


class Service:
    """A service that starts a discovery and then shows it in one state."""

    def __init__(self) -> None:
        self.backends: list[dict[str, Any]] = []
        self.reads: list[str] = []
        self.page_size = 1000

    def __call__(self, request: Request) -> Response:
        if request.method == "POST":
            return Response(json={"uuid": UUID, "state": "IN-PROGRESS", "links": []}, status=202)
        self.reads.append(request.path_qs.removeprefix("/v2"))
        states = Counter(backend["state"] for backend in self.backends)
        state = next(s for s in ("IN-PROGRESS", "FAILED", "DONE") if s in states)
        if "uuid" in request.params:
            row = {"uuid": UUID, "state": state, "progress": states}
            return Response(json={"discoveries": [row]})
        found: dict[str, Any] = {"uuid": UUID, "state": state, "progress": states}
        start = int(str(request.params.get("marker", 0)))
        page = self.backends[start : start + self.page_size]
        if (end := start + self.page_size) < len(self.backends):
            found["backends_links"] = [{"rel": "next", "href": f"http://other/?marker={end}"}]
        return Response(json={**found, "backends": page})


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


@pytest.mark.parametrize("options", [(), ("--wait",)])
def test_all_pages_of_backends_are_shown(
    service: Service, cyborg: Run, options: tuple[str, ...]
) -> None:
    service.backends = [backend(host, "DONE") for host in "abc"]
    service.page_size = 2
    assert cyborg(*options, "-f", "value", "-c", "Host")[0].split() == ["a", "b", "c"]


def test_wait_timeout_names_pending_backends(service: Service, cyborg: Run) -> None:
    service.backends = [backend("a", "DONE"), backend("b", "IN-PROGRESS")]
    _, err = cyborg("--wait", "--within", "0", code=1)
    assert "1 of 2 backends have not reported (b (gpus)) after 0 s" in err


def test_wait_reads_many_backends_once_at_the_end(service: Service, cyborg: Run) -> None:
    service.backends = [backend(f"h{n}", "DONE") for n in range(MAX_PARTS)]
    service.backends.append(backend("late", "FAILED", "the driver hangs"))
    out, err = cyborg("--wait", "-f", "json", code=1)
    assert len(json.loads(out)) == MAX_PARTS + 1
    assert "late (gpus): the driver hangs" in err
    assert service.reads == [f"/discoveries?uuid={UUID}", f"/discoveries/{UUID}"]


def test_wait_timeout_of_many_backends_reads_none_of_them(service: Service, cyborg: Run) -> None:
    service.backends = [backend(f"h{n}", "IN-PROGRESS") for n in range(MAX_PARTS + 1)]
    _, err = cyborg("--wait", "--within", "0", code=1)
    assert f"101 of 101 backends have not reported (discovery {UUID}) after 0 s" in err
    assert set(service.reads) == {f"/discoveries?uuid={UUID}"}


def test_failed_backend_without_wait_exits_with_0(service: Service, cyborg: Run) -> None:
    service.backends = [backend("b", "FAILED", "the driver hangs")]
    assert "FAILED" in cyborg()[0]
