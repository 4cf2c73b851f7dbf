# SPDX-License-Identifier: Apache-2.0
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.read import audits
from cyborg.db.read.paging import Page
from cyborg.db.reader import Reader
from cyborg.fixtures import rows


def test_audits_with_their_findings_and_without(engine: sa.Engine) -> None:
    facts = {"sides": ["hardware"], "findings": [{"kind": "agent_silent"}], "found": 1}
    for host, state in ((None, "DONE"), ("a", "DONE"), ("a", "FAILED")):
        rows.insert(engine, schema.audits, host=host, state=state, owner="conductor", **facts)
    with Reader(engine).connect() as connection:
        with counting(engine) as count:
            every = audits.find(connection)
        assert len(count) == 1
        assert [(a["host"], a["state"]) for a in audits.find(connection, host="a")] == [
            ("a", "DONE"),
            ("a", "FAILED"),
        ]
        assert len(audits.find(connection, state="DONE")) == 2
        rest = audits.find(connection, page=Page(limit=9, marker=every[0]["uuid"]))
        assert [a["uuid"] for a in rest] == [a["uuid"] for a in every[1:]]
        one = audits.get(connection, every[1]["uuid"])
        assert audits.get(connection, "nobody") is None
    assert one == {**every[1], "findings": [{"kind": "agent_silent"}]}
    assert (one["repair"], one["sides"], one["found"]) == (False, ["hardware"], 1)
    assert {"id", "owner", "lease_until", "last_host"} & set(one) == set()
