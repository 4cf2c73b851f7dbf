# SPDX-License-Identifier: Apache-2.0
"""cyborg-status work: what it says of a database, and its exit status."""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.cmd import dbsync, status
from cyborg.core.deed import Deed
from cyborg.db import schema
from cyborg.db.store import deeds
from cyborg.fixtures import rows
from cyborg.fixtures.processes import ini


class Bed:
    """A configuration file and the database that it names."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        url = f"sqlite:///{folder}/cyborg.db"
        self.file = folder / "cyborg.conf"
        self.file.write_text(ini({"database": {"connection": url}}))
        self.engine = sa.create_engine(url)
        self.capsys = capsys

    def make(self) -> None:
        dbsync.main(["--config-file", str(self.file), "upgrade"])

    def run(self, *words: str) -> tuple[int, str]:
        """Run the command; return its exit status and what it printed."""
        self.capsys.readouterr()
        code = status.main(["--config-file", str(self.file), "work", *words])
        return code, "".join(self.capsys.readouterr())

    def waiting(self) -> tuple[int, dict[str, dict[str, Any]]]:
        code, text = self.run("-f", "json")
        return code, {line["what"]: line for line in json.loads(text)["waiting"]}


@pytest.fixture
def bed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Bed]:
    made = Bed(tmp_path, capsys)
    yield made
    made.engine.dispose()


def ago(seconds: float) -> datetime:
    now: datetime = timeutils.utcnow()
    return now - timedelta(seconds=seconds)


def test_when_nothing_waits(bed: Bed) -> None:
    bed.make()
    code, lines = bed.waiting()
    assert code == 0
    assert {line["count"] for line in lines.values()} == {0}
    assert not any(line["look"] for line in lines.values())


def test_what_was_done_and_what_waits(bed: Bed) -> None:
    bed.make()
    message: dict[str, Any] = {"kind": "nova-event", "subject": "s", "payload": {}}
    rows.insert(bed.engine, schema.outbox, **message, created_at=ago(100))
    with bed.engine.begin() as tx:
        deeds.add(tx, Deed.ORPHANS_FREED, 3, datetime(2026, 1, 2, 3, 4, 5, 6))
    code, text = bed.run()
    assert code == 0
    lines = [line.split() for line in text.splitlines()]
    assert ["Done", "Count", "Last"] in lines
    assert ["orphans_freed", "3", "2026-01-02T03:04:05+00:00"] in lines
    (events,) = (line for line in lines if line[:1] == ["messages"])
    assert events[:4] == ["messages", "nova-event,", "pending", "1"]
    assert 100 <= int(events[4]) < 200
    _, text = bed.run("--format", "json")
    assert json.loads(text)["done"] == [
        {"kind": "orphans_freed", "count": 3, "last_at": "2026-01-02T03:04:05+00:00"}
    ]


@pytest.mark.parametrize(
    ("table", "values", "what"),
    [
        ("outbox", {"state": "dead"}, "messages nova-event, dead"),
        ("jobs", {"deadline": datetime(2026, 1, 1)}, "jobs prepare, past their deadline"),
        ("providers", {"error": "refused"}, "providers that are refused"),
        ("services", {"last_seen_at": datetime(2026, 1, 1)}, "services cyborg-agent, down"),
        ("requests", {"orphan_since": datetime(2026, 1, 1), "state": "Bound"}, "orphans?"),
        (
            "requests",
            {"updated_at": datetime(2026, 1, 1), "state": "BindStarted"},
            "requests in BindStarted",
        ),
    ],
)
def test_what_wants_a_look(bed: Bed, table: str, values: dict[str, Any], what: str) -> None:
    bed.make()
    match table:
        case "outbox":
            facts = {"kind": "nova-event", "subject": "s", "payload": {}}
            rows.insert(bed.engine, schema.outbox, **facts | values)
        case "jobs":
            facts = {"kind": "prepare", "host": "h", "subject": "s", "arguments": {}}
            rows.insert(bed.engine, schema.jobs, **facts | values)
        case "providers":
            rows.insert(bed.engine, schema.providers, name="n", host="h", **values)
        case "services":
            rows.change(bed.engine, schema.services, rows.agent(bed.engine), **values)
        case "requests":
            rows.request(bed.engine, rows.profile(bed.engine), **values)
    code, lines = bed.waiting()
    assert code == 1
    (marked,) = (line for line in lines.values() if line["look"])
    assert what in marked["what"]
    assert marked["count"] == 1


def test_a_bind_in_its_time_needs_nobody(bed: Bed) -> None:
    bed.make()
    profile = rows.profile(bed.engine)
    rows.request(bed.engine, profile, state="BindStarted", updated_at=ago(200))
    code, lines = bed.waiting()
    assert (code, lines["requests in BindStarted"]["look"]) == (0, False)
    assert lines["requests in BindStarted"]["oldest_seconds"] >= 200


def test_a_database_that_cannot_be_read(bed: Bed) -> None:
    code, text = bed.run()
    assert code == 2
    assert "cyborg-dbsync upgrade" in text


def test_help_names_both_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        status.main(["--help"])
    assert ended.value.code == 0
    assert "{upgrade,work}" in capsys.readouterr().out
