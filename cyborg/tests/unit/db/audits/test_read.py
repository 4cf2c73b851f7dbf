# SPDX-License-Identifier: Apache-2.0
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.db.audits import read as audits
from cyborg.db.engine import Reader
from cyborg.db.paging import Page
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements


def test_find_omits_findings_and_get_adds_them(engine: sa.Engine) -> None:
    facts = {
        "sources": ["hardware"],
        "findings": [{"kind": "agent_unreachable"}],
        "num_findings": 1,
    }
    for host, state in ((None, "DONE"), ("a", "DONE"), ("a", "FAILED")):
        rows.insert(engine, schema.audits, host=host, state=state, owner="conductor", **facts)
    with Reader(engine).connect() as connection:
        with count_statements(engine) as count:
            listed = audits.find(connection)
        assert len(count) == 1
        assert [(a["host"], a["state"]) for a in audits.find(connection, host="a")] == [
            ("a", "DONE"),
            ("a", "FAILED"),
        ]
        assert len(audits.find(connection, state="DONE")) == 2
        next_page = audits.find(connection, page=Page(limit=9, marker=listed[0]["uuid"]))
        assert [a["uuid"] for a in next_page] == [a["uuid"] for a in listed[1:]]
        audit = audits.get(connection, listed[1]["uuid"])
        assert audits.get(connection, "no-such-audit") is None
    assert audit == {**listed[1], "findings": [{"kind": "agent_unreachable"}]}
    assert (audit["repair"], audit["sources"], audit["num_findings"]) == (False, ["hardware"], 1)
    assert {"id", "owner", "lease_until", "last_host"} & set(audit) == set()
