# SPDX-License-Identifier: Apache-2.0
"""The outbox over REST and by the command line."""

import json
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
import requests
import sqlalchemy as sa

from cyborg.cli import app
from cyborg.db import schema
from cyborg.standalone.stack import StandaloneStack
from cyborg.tests.fixtures.databases import rows

VERSION = {"OpenStack-API-Version": "accelerator 2.4"}


class Env:
    """A kind of message for this test that no worker delivers."""

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
        return requests.request(method, f"{self.url}/{path}", headers=VERSION, timeout=60)


@pytest.fixture
def env(standalone_stack: StandaloneStack) -> Iterator[Env]:
    new_env = Env(standalone_stack)
    yield new_env
    with new_env.engine.begin() as tx:
        tx.execute(sa.delete(schema.outbox).where(schema.outbox.c.kind == new_env.kind))
    new_env.engine.dispose()


@pytest.fixture
def cyborg(standalone_stack: StandaloneStack, capsys: Any) -> Callable[..., str]:
    def run(*words: str, code: int = 0) -> str:
        connection = ["--os-auth-type", "none", "--os-endpoint", standalone_stack.endpoint]
        assert app.main([*connection, *words]) == code
        output = capsys.readouterr()
        return str(output.err if code else output.out)

    return run


def test_outbox_shows_the_whole_message(env: Env) -> None:
    uuid = env.add(attempts=3, error="Nova answered 500")
    (message,) = env.get()["outbox"]
    for name in ("created_at", "next_try_at"):
        assert message.pop(name).endswith("+00:00")
    assert message == {
        "uuid": uuid,
        "kind": env.kind,
        "subject": "s",
        "state": "dead",
        "attempts": 3,
        "error": "Nova answered 500",
        "payload": {"a": {"b": [1, None]}},
        "updated_at": None,
    }


def test_outbox_list_filters_sorts_and_pages(env: Env) -> None:
    dead_letters = [env.add(attempts=n) for n in (3, 1, 2)]
    pending = env.add(state="pending")
    assert [m["uuid"] for m in env.get()["outbox"]] == [*dead_letters, pending]
    assert [m["uuid"] for m in env.get(state="pending")["outbox"]] == [pending]
    first = env.get(state="dead", sort_key="attempts", sort_dir="desc", limit="2")
    assert [m["attempts"] for m in first["outbox"]] == [3, 2]
    second_page = requests.get(first["outbox_links"][0]["href"], headers=VERSION, timeout=60).json()
    assert [m["attempts"] for m in second_page["outbox"]] == [1]
    assert "outbox_links" not in second_page


def test_outbox_retries_and_deletes_only_dead_letters(env: Env) -> None:
    first, second = env.add(attempts=9, error="x"), env.add()
    assert env.do("POST", f"{first}/retry").status_code == 204
    (message, _) = env.get()["outbox"]
    assert (message["state"], message["attempts"]) == ("pending", 0)
    for rejection in (env.do("POST", f"{first}/retry"), env.do("DELETE", first)):
        assert rejection.status_code == 409
        assert "only a dead letter" in rejection.text
    assert env.do("DELETE", second).status_code == 204
    assert env.do("DELETE", second).status_code == 404
    assert [m["uuid"] for m in env.get()["outbox"]] == [first]


def test_outbox_commands_list_retry_and_delete(env: Env, cyborg: Callable[..., str]) -> None:
    first, second, third = (env.add() for _ in range(3))
    waits = env.add(state="pending")

    def listed(*words: str) -> list[str]:
        entries = json.loads(cyborg("outbox-list", "--kind", env.kind, *words, "-f", "json"))
        return [row["UUID"] for row in entries]

    assert listed() == [first, second, third, waits]
    assert listed("--state", "dead") == [first, second, third]
    long = json.loads(cyborg("outbox-list", "--kind", env.kind, "--long", "-f", "json"))
    assert long[0]["Payload"] == {"a": {"b": [1, None]}}
    assert cyborg("outbox-retry", first) == ""
    assert listed("--state", "pending") == [first, waits]
    output = cyborg("outbox-delete", second, waits, third, code=1)
    assert waits in output
    assert "only a dead letter can be deleted" in output
    assert listed() == [first, waits]
