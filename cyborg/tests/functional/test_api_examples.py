# SPDX-License-Identifier: Apache-2.0
"""Run the examples of the API documentation in order and compare the answers."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborg.tests.fixtures.clouds.standalone import running
from cyborg.tests.fixtures.machine.processes import wait_until

PAGE = Path(__file__).parents[3] / "doc" / "source" / "api" / "index.rst"
BASE = "http://controller:6666"
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MOMENT = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00$")
_HASH = re.compile(r"[0-9a-f]{64}")
_BLOCK = re.compile(r"^\.\. code-block:: text\n\n((?:   .*\n|\n)+)", re.MULTILINE)
_CALL = re.compile(
    r"(GET|POST|PATCH|DELETE) (/\S*)\n(.*?)\n*^(\d{3})\n(.*)", re.DOTALL | re.MULTILINE
)


def examples() -> list[tuple[str, ...]]:
    """Return method, path, body, status and answer of each example, as text."""
    blocks = (re.sub(r"^   ", "", b, flags=re.MULTILINE) for b in _BLOCK.findall(PAGE.read_text()))
    return [match.groups() for block in blocks if (match := _CALL.match(block))]


class UuidMapping:
    """The mapping of uuids in the documentation to actual uuids."""

    def __init__(self) -> None:
        self.real: dict[str, str] = {}

    def translate(self, text: str) -> str:
        """Replace the uuids of the documentation by the actual ones."""
        return _UUID.sub(lambda m: self.real.get(m[0], m[0]), text)

    def compare(self, expected: Any, actual: Any, place: str) -> None:
        """Compare expected and actual answer: uuids by mapping, any times, all else equal."""
        if isinstance(expected, dict) and isinstance(actual, dict):
            assert sorted(expected) == sorted(actual), place
            for key, value in expected.items():
                self.compare(value, actual[key], f"{place}.{key}")
        elif isinstance(expected, list) and isinstance(actual, list):
            assert len(expected) == len(actual), place
            for number, pair in enumerate(zip(expected, actual, strict=True)):
                self.compare(*pair, f"{place}[{number}]")
        elif isinstance(expected, str) and _UUID.fullmatch(expected):
            assert _UUID.fullmatch(actual), place
            assert self.real.setdefault(expected, actual) == actual, place
        elif isinstance(expected, str) and _MOMENT.match(expected):
            # The time of an update depends on timing.
            assert actual is None or _MOMENT.match(actual), place
        elif isinstance(expected, str) and _HASH.fullmatch(expected):
            assert _HASH.fullmatch(actual), place
        elif place.endswith(".attempts"):
            # The number of attempts depends on timing.
            assert isinstance(actual, int), place
        elif expected is None and place.endswith(".updated_at"):
            assert actual is None or _MOMENT.match(actual), place
        else:
            expected = self.translate(expected) if isinstance(expected, str) else expected
            assert actual == expected, place


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield a separate stack: the examples show all of its objects."""
    with running(tmp_path_factory.mktemp("examples")) as stack:
        yield stack.endpoint


def answer_if(
    condition: Callable[[requests.Response], Any], ask: Callable[[], requests.Response]
) -> Any:
    return condition(ask())


@pytest.mark.matrix
def test_api_page_examples_match_the_service(endpoint: str) -> None:
    documented = examples()
    assert len(documented) > 12
    like = UuidMapping()
    for method, path, body, status, answer in documented:
        place = f"{method} {path}"

        def ask(method: str = method, path: str = path, body: str = body) -> requests.Response:
            return requests.request(
                method,
                endpoint + like.translate(path),
                json=json.loads(like.translate(body)) if body.strip() else None,
                headers={"OpenStack-API-Version": "accelerator 2.6"},
                timeout=60,
            )

        if "/jobs/" in path:
            response = wait_until("the job ends", partial(answer_if, _finished, ask))
        elif path.endswith("/deployables"):
            response = wait_until("Placement is told", partial(answer_if, _in_sync, ask))
        else:
            response = ask()
        assert response.status_code == int(status), f"{place}: {response.text}"
        if answer.strip():
            like.compare(
                json.loads(answer), json.loads(response.text.replace(endpoint, BASE)), place
            )
        else:
            assert not response.content, place


def _finished(answer: requests.Response) -> requests.Response | None:
    return answer if answer.json().get("state") != "pending" else None


def _in_sync(answer: requests.Response) -> requests.Response | None:
    deployables = answer.json().get("deployables", [{}])
    return answer if all(d["placement"]["status"] == "in_sync" for d in deployables) else None
