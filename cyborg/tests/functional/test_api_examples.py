# SPDX-License-Identifier: Apache-2.0
"""The examples of the API's documentation, run one after another: what it shows is what happens."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborg.fixtures.processes import until
from cyborg.fixtures.stack import running

PAGE = Path(__file__).parents[3] / "doc" / "source" / "api" / "index.rst"
BASE = "http://controller:6666"
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MOMENT = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00$")
_BLOCK = re.compile(r"^\.\. code-block:: text\n\n((?:   .*\n|\n)+)", re.MULTILINE)
_CALL = re.compile(
    r"(GET|POST|PATCH|DELETE) (/\S*)\n(.*?)\n*^(\d{3})\n(.*)", re.DOTALL | re.MULTILINE
)


def examples() -> list[tuple[str, ...]]:
    """Return method, path, body, status and answer of each example, as text."""
    blocks = (re.sub(r"^   ", "", b, flags=re.MULTILINE) for b in _BLOCK.findall(PAGE.read_text()))
    return [found.groups() for block in blocks if (found := _CALL.match(block))]


class Likeness:
    """Which uuid of the documentation stands for which uuid of this run."""

    def __init__(self) -> None:
        self.real: dict[str, str] = {}

    def translate(self, text: str) -> str:
        """Put this run's uuids into text of the documentation."""
        return _UUID.sub(lambda m: self.real.get(m[0], m[0]), text)

    def compare(self, told: Any, found: Any, where: str) -> None:
        """Fail unless they are alike: uuids in the same places, any moments, all else equal."""
        if isinstance(told, dict) and isinstance(found, dict):
            assert sorted(told) == sorted(found), where
            for key, value in told.items():
                self.compare(value, found[key], f"{where}.{key}")
        elif isinstance(told, list) and isinstance(found, list):
            assert len(told) == len(found), where
            for number, pair in enumerate(zip(told, found, strict=True)):
                self.compare(*pair, f"{where}[{number}]")
        elif isinstance(told, str) and _UUID.fullmatch(told):
            assert _UUID.fullmatch(found), where
            assert self.real.setdefault(told, found) == found, where
        elif isinstance(told, str) and _MOMENT.match(told):
            # Whether something has been updated yet depends on when one looks.
            assert found is None or _MOMENT.match(found), where
        elif where.endswith(".attempts"):
            # A conductor looks at a job as often as it has to.
            assert isinstance(found, int), where
        elif told is None and where.endswith(".updated_at"):
            assert found is None or _MOMENT.match(found), where
        else:
            told = self.translate(told) if isinstance(told, str) else told
            assert found == told, where


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A stack of its own: the examples show all that it has."""
    with running(tmp_path_factory.mktemp("examples")) as stack:
        yield stack.endpoint


def test_what_the_page_shows_is_what_happens(endpoint: str) -> None:
    shown = examples()
    assert len(shown) > 15
    like = Likeness()
    for method, path, body, status, answer in shown:
        where = f"{method} {path}"

        def ask(method: str = method, path: str = path, body: str = body) -> requests.Response:
            return requests.request(
                method,
                endpoint + like.translate(path),
                json=json.loads(like.translate(body)) if body.strip() else None,
                headers={"OpenStack-API-Version": "accelerator 2.4"},
                timeout=30,
            )

        if "/jobs/" in path:
            got = until("the job ends", lambda ask=ask: _over(ask()), 15)
        elif "/services" in path:
            got = until("the host has cleaned up", lambda ask=ask: _free(ask()), 15)
        elif "/discoveries/" in path:
            got = until("the discovery ends", lambda ask=ask: _ended(ask()), 15)
        elif path.endswith("/deployables"):
            got = until("Placement is told", lambda ask=ask: _in_sync(ask()), 15)
        else:
            got = ask()
        assert got.status_code == int(status), f"{where}: {got.text}"
        if answer.strip():
            like.compare(json.loads(answer), json.loads(got.text.replace(endpoint, BASE)), where)
        else:
            assert not got.content, where


def _ended(answer: requests.Response) -> requests.Response | None:
    return answer if answer.json().get("state") != "IN-PROGRESS" else None


def _over(answer: requests.Response) -> requests.Response | None:
    return answer if answer.json().get("state") != "pending" else None


def _free(answer: requests.Response) -> requests.Response | None:
    backends = [b for s in answer.json().get("services", ()) for b in s["backends"]]
    used = [function["used"] for b in backends for function in b["functions"]]
    return None if any(used) else answer


def _in_sync(answer: requests.Response) -> requests.Response | None:
    told = answer.json().get("deployables", [{}])
    return answer if all(d["placement"]["status"] == "in_sync" for d in told) else None
