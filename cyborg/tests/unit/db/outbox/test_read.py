# SPDX-License-Identifier: Apache-2.0
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.db.engine import Reader
from cyborg.db.outbox import read as outbox
from cyborg.db.paging import Page
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements


def _add(engine: sa.Engine, kind: str, state: str, **values: int) -> int:
    facts = {"subject": "s", "payload": {"n": [1]}, "owner": "conductor"}
    return rows.insert(engine, schema.outbox, kind=kind, state=state, **facts | values)


def test_find_filters_by_state_and_kind(engine: sa.Engine) -> None:
    for kind, state in (("a", "dead"), ("a", "pending"), ("b", "dead")):
        _add(engine, kind, state)
    with Reader(engine).connect() as connection:
        messages = outbox.find(connection)
        assert [(m["kind"], m["state"]) for m in outbox.find(connection, state="dead")] == [
            ("a", "dead"),
            ("b", "dead"),
        ]
        assert len(outbox.find(connection, kind="a")) == 2
        assert len(outbox.find(connection, kind="a", state="dead")) == 1
        message = outbox.get(connection, messages[1]["uuid"])
        assert outbox.get(connection, "no-such-message") is None
    assert message == messages[1]
    assert message["payload"] == {"n": [1]}
    assert {"id", "owner", "lease_until"} & set(message) == set()


def test_page_needs_two_statements(engine: sa.Engine) -> None:
    for attempts in (2, 3, 1):
        _add(engine, "a", "dead", attempts=attempts)
    with Reader(engine).connect() as connection:
        first = outbox.find(connection, page=Page(limit=2, sort_key="attempts"))
        assert [m["attempts"] for m in first] == [1, 2]
        with count_statements(engine) as count:
            page = Page(limit=2, sort_key="attempts", marker=first[-1]["uuid"])
            next_page = outbox.find(connection, page=page)
    assert [m["attempts"] for m in next_page] == [3]
    assert len(count.statements) == 2
