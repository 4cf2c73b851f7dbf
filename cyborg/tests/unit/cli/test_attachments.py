# SPDX-License-Identifier: Apache-2.0
"""Which attachments ``detach-instance --wait`` waits for, and what it refuses."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

import pytest
from webob import Request, Response

from cyborg.cli import app
from cyborg.cli.attachments import _measure_detach
from cyborg.cli.common import progress
from cyborg.tests.unit.cli.common.test_progress import Clock
from cyborg.tests.unit.cli.common.test_rest import serving

SERVER, CHOSEN, OTHER, ACCELERATOR, ARQ = (str(uuid4()) for _ in range(5))


class Service:
    """The attachments of a server; the chosen one is detached at once, another one is not."""

    def __init__(self, accelerator: str | None, arqs: list[str]) -> None:
        self.deleted: list[str] = []
        self.chosen = {"uuid": CHOSEN, "accelerator": accelerator, "arqs": arqs}

    def respond(self, request: Request) -> Response:
        if request.method == "DELETE":
            self.deleted.append(request.path_qs)
            return Response(status=202)
        if "/accelerators/" in request.path:
            return Response(json={"uuid": ACCELERATOR, "arq_uuid": ARQ})
        if request.path.endswith(CHOSEN):
            return Response(json=self._row(self.chosen))
        other: dict[str, Any] = {"uuid": OTHER, "accelerator": None, "arqs": []}
        rows = [self._row(other)] + ([self._row(self.chosen)] if not self.deleted else [])
        return Response(json={"attachments": rows})

    def _row(self, values: dict[str, Any]) -> dict[str, Any]:
        more = {"instance_uuid": SERVER, "state": "detaching", "step": "guest", "error": "stop it"}
        return values | more


class PagedService(Service):
    """A service whose pages have one attachment; the chosen one is the second of those detached.

    It is detached after ``polls`` responses that show it.
    """

    def __init__(self, polls: int) -> None:
        super().__init__(ACCELERATOR, [])
        self.polls = polls

    def respond(self, request: Request) -> Response:
        if request.method == "DELETE" or not request.path.endswith("/attachments"):
            return super().respond(request)
        rows = [
            self._row({"uuid": str(uuid4()), "accelerator": None, "arqs": [], "state": "attached"}),
            self._row({"uuid": OTHER, "accelerator": None, "arqs": []}),
        ]
        if self.polls:
            rows.append(self._row(self.chosen))
        state = request.GET.get("state")
        rows = [row for row in rows if state in (None, row["state"])]
        number = int(request.GET.get("marker", "0"))
        page = rows[number : number + 1]
        if self.deleted and CHOSEN in [row["uuid"] for row in page]:
            self.polls -= 1
        href = f"{request.path_url}?{urlencode({**request.GET, 'marker': number + 1})}"
        links = [{"rel": "next", "href": href}] if number + 1 < len(rows) else []
        return Response(json={"attachments": page, "attachments_links": links})


@pytest.fixture(
    params=[(ACCELERATOR, []), (None, [ARQ])], ids=["by its accelerator", "by its request"]
)
def service(request: pytest.FixtureRequest) -> Service:
    return Service(*request.param)


@pytest.fixture
def endpoint(service: Service) -> Iterator[str]:
    with serving(service.respond) as url:
        yield url


def run(endpoint: str, *words: str) -> int:
    login = ["--os-auth-type", "none", "--os-endpoint", endpoint]
    return app.main([*login, "detach-instance", SERVER, *words])


@pytest.mark.parametrize("option", [("--accelerator", ACCELERATOR), ("--attachment", CHOSEN)])
def test_other_detaches_of_the_server_are_not_awaited(
    endpoint: str, service: Service, option: tuple[str, str]
) -> None:
    assert run(endpoint, *option, "--wait", "--within", "5") == 0
    assert len(service.deleted) == 1


@pytest.mark.parametrize("option", [("--accelerator", ACCELERATOR), ("--attachment", CHOSEN)])
def test_detach_that_is_not_on_the_first_page_is_awaited(
    monkeypatch: pytest.MonkeyPatch, option: tuple[str, str]
) -> None:
    monkeypatch.setattr(progress, "time", Clock())
    service = PagedService(polls=2)
    with serving(service.respond) as url:
        assert run(url, *option, "--wait", "--within", "5") == 0
    assert service.polls == 0


@pytest.mark.parametrize("selected", [None, {CHOSEN}, {CHOSEN, OTHER}])
def test_selected_detaches_are_awaited(selected: set[str] | None) -> None:
    row: dict[str, Any] = {
        "uuid": CHOSEN,
        "state": "detaching",
        "step": "guest",
        "error": "stop it",
    }
    page = {"attachments": [{**row, "instance_uuid": SERVER, "hostname": "compute-1"}]}
    progress = _measure_detach(SERVER, selected, page)
    assert progress.pending == f"server {SERVER} has 1 attachments: step guest: stop it"
    # Servers on the host have attachments of their own.
    page["attachments"].append({**row, "instance_uuid": None, "hostname": "compute-1"})
    progress = _measure_detach("compute-1", selected, page)
    assert progress.pending == "host compute-1 has 1 attachments: step guest: stop it"


@pytest.mark.parametrize("name", ["attachment", "accelerator"])
def test_empty_option_detaches_nothing(
    endpoint: str, service: Service, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(endpoint, f"--{name}", "") == 1
    assert f"--{name} is empty" in capsys.readouterr().err
    assert service.deleted == []
