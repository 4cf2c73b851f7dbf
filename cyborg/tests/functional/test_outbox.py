# SPDX-License-Identifier: Apache-2.0
"""Messages of the outbox over REST and by the command line, as an operator meets them."""

import json
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
import requests
import sqlalchemy as sa

from cyborg.cli import app
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.stack import standalone_stack
from cyborg.standalone.stack import StandaloneStack

__all__ = ["standalone_stack"]

VERSION = {"OpenStack-API-Version": "accelerator 2.4"}


class Bed:
    """A kind of message that is this test's own, and that nobody delivers."""

    def __init__(self, stack: StandaloneStack) -> None:
        self.kind = f"test-{uuid4().hex[:12]}"
        self.url = f"{stack.endpoint}/v2/outbox"
        with stack.reader.connect() as connection:
            self.engine = sa.create_engine(connection.engine.url)

    def add(self, **values: Any) -> str:
        """Write a message and return its uuid."""
        uuid = str(uuid4())
        facts = {"subject": "s", "payload": {"a": {"b": [1, None]}}, "state": "dead"}
        rows.insert(self.engine, schema.outbox, uuid=uuid, kind=self.kind, **facts | values)
        return uuid

    def get(self, **query: str) -> Any:
        """Return the list of the messages."""
        return requests.get(
            self.url, {"kind": self.kind, **query}, headers=VERSION, timeout=20
        ).json()

    def do(self, method: str, path: str) -> requests.Response:
        """Call the service."""
        return requests.request(method, f"{self.url}/{path}", headers=VERSION, timeout=20)


@pytest.fixture
def bed(standalone_stack: StandaloneStack) -> Iterator[Bed]:
    it = Bed(standalone_stack)
    yield it
    with it.engine.begin() as tx:
        tx.execute(sa.delete(schema.outbox).where(schema.outbox.c.kind == it.kind))
    it.engine.dispose()


@pytest.fixture
def cyborg(standalone_stack: StandaloneStack, capsys: Any) -> Callable[..., str]:
    def run(*words: str, code: int = 0) -> str:
        way = ["--os-auth-type", "none", "--os-endpoint", standalone_stack.endpoint]
        assert app.main([*way, *words]) == code
        shown = capsys.readouterr()
        return str(shown.err if code else shown.out)

    return run


def test_a_message_is_shown_whole(bed: Bed) -> None:
    uuid = bed.add(attempts=3, error="Nova answered 500")
    (shown,) = bed.get()["outbox"]
    for name in ("created_at", "next_try_at"):
        assert shown.pop(name).endswith("+00:00")
    assert shown == {
        "uuid": uuid,
        "kind": bed.kind,
        "subject": "s",
        "state": "dead",
        "attempts": 3,
        "error": "Nova answered 500",
        "payload": {"a": {"b": [1, None]}},
        "updated_at": None,
    }


def test_filters_order_and_pages(bed: Bed) -> None:
    dead = [bed.add(attempts=n) for n in (3, 1, 2)]
    pending = bed.add(state="pending")
    assert [m["uuid"] for m in bed.get()["outbox"]] == [*dead, pending]
    assert [m["uuid"] for m in bed.get(state="pending")["outbox"]] == [pending]
    first = bed.get(state="dead", sort_key="attempts", sort_dir="desc", limit="2")
    assert [m["attempts"] for m in first["outbox"]] == [3, 2]
    rest = requests.get(first["outbox_links"][0]["href"], headers=VERSION, timeout=20).json()
    assert [m["attempts"] for m in rest["outbox"]] == [1]
    assert "outbox_links" not in rest


def test_a_dead_one_is_retried_or_deleted_and_no_other(bed: Bed) -> None:
    first, second = bed.add(attempts=9, error="x"), bed.add()
    assert bed.do("POST", f"{first}/retry").status_code == 204
    (message, _) = bed.get()["outbox"]
    assert (message["state"], message["attempts"]) == ("pending", 0)
    for refused in (bed.do("POST", f"{first}/retry"), bed.do("DELETE", first)):
        assert refused.status_code == 409
        assert "only a dead one" in refused.text
    assert bed.do("DELETE", second).status_code == 204
    assert bed.do("DELETE", second).status_code == 404
    assert [m["uuid"] for m in bed.get()["outbox"]] == [first]


def test_the_commands(bed: Bed, cyborg: Callable[..., str]) -> None:
    first, second, third = (bed.add() for _ in range(3))
    waits = bed.add(state="pending")

    def listed(*words: str) -> list[str]:
        found = json.loads(cyborg("outbox-list", "--kind", bed.kind, *words, "-f", "json"))
        return [row["UUID"] for row in found]

    assert listed() == [first, second, third, waits]
    assert listed("--state", "dead") == [first, second, third]
    long = json.loads(cyborg("outbox-list", "--kind", bed.kind, "--long", "-f", "json"))
    assert long[0]["Payload"] == {"a": {"b": [1, None]}}
    assert cyborg("outbox-retry", first) == ""
    assert listed("--state", "pending") == [first, waits]
    told = cyborg("outbox-delete", second, waits, third, code=1)
    assert waits in told
    assert "only a dead one can be deleted" in told
    assert listed() == [first, waits]
