# SPDX-License-Identifier: Apache-2.0
"""cyborg-status pending: its output and exit status."""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.cmd import dbsync, status
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db import schema
from cyborg.db.totals import write as self_heal
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.machine.processes import ini


class Env:
    """A configuration file, its database, and methods to run the command."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        url = f"sqlite:///{folder}/cyborg.db"
        self.file = folder / "cyborg.conf"
        self.file.write_text(ini({"database": {"connection": url}}))
        self.engine = sa.create_engine(url)
        self.capsys = capsys

    def create_schema(self) -> None:
        dbsync.main(["--config-file", str(self.file), "upgrade"])

    def run(self, *args: str) -> tuple[int, str]:
        """Run the command; return its exit status and output."""
        self.capsys.readouterr()
        code = status.main(["--config-file", str(self.file), "pending", *args])
        return code, "".join(self.capsys.readouterr())

    def pending(self) -> tuple[int, dict[str, dict[str, Any]]]:
        """Return the exit status and the pending items by name."""
        code, text = self.run("-f", "json")
        return code, {item["name"]: item for item in json.loads(text)["pending"]}


@pytest.fixture
def env(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Env]:
    test_env = Env(tmp_path, capsys)
    yield test_env
    test_env.engine.dispose()


def ago(seconds: float) -> datetime:
    now: datetime = timeutils.utcnow()
    return now - timedelta(seconds=seconds)


@pytest.mark.slow
def test_pending_without_pending_items_is_zero(env: Env) -> None:
    env.create_schema()
    code, lines = env.pending()
    assert code == 0
    assert {line["count"] for line in lines.values()} == {0}
    assert not any(line["needs_attention"] for line in lines.values())


@pytest.mark.slow
def test_pending_shows_actions_and_pending_items(env: Env) -> None:
    env.create_schema()
    message: dict[str, Any] = {"kind": "nova-event", "subject": "s", "payload": {}}
    rows.insert(env.engine, schema.outbox, **message, created_at=ago(100))
    with env.engine.begin() as tx:
        self_heal.increment(
            tx, CorrectiveAction.ORPHANS_RELEASED, 3, datetime(2026, 1, 2, 3, 4, 5, 6)
        )
    code, text = env.run()
    assert code == 0
    lines = [line.split() for line in text.splitlines()]
    assert ["Action", "Count", "Last"] in lines
    assert ["orphans_released", "3", "2026-01-02T03:04:05Z"] in lines
    (events,) = (line for line in lines if line[:1] == ["messages"])
    assert events[:4] == ["messages", "nova-event,", "pending", "1"]
    assert 100 <= int(events[4]) < 200
    _, text = env.run("--format", "json")
    assert json.loads(text)["actions"] == [
        {"kind": "orphans_released", "count": 3, "last_at": "2026-01-02T03:04:05.000006+00:00"}
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "values", "item"),
    [
        ("outbox", {"state": "dead"}, "messages nova-event, dead"),
        ("jobs", {"deadline": datetime(2026, 1, 1)}, "jobs prepare, past their deadline"),
        (
            "providers",
            {"error": "refused", "stale_since": datetime(2026, 1, 1)},
            "providers whose publishing failed",
        ),
        ("services", {"down_at": datetime(2026, 1, 1)}, "services cyborg-agent, down"),
        ("requests", {"orphan_since": datetime(2026, 1, 1), "state": "Bound"}, "orphans?"),
        (
            "requests",
            {"updated_at": datetime(2026, 1, 1), "state": "BindStarted"},
            "requests in BindStarted",
        ),
    ],
)
def test_pending_marks_items_that_need_attention(
    env: Env, table: str, values: dict[str, Any], item: str
) -> None:
    env.create_schema()
    match table:
        case "outbox":
            facts = {"kind": "nova-event", "subject": "s", "payload": {}}
            rows.insert(env.engine, schema.outbox, **facts | values)
        case "jobs":
            facts = {"kind": "prepare", "host": "h", "subject": "s", "arguments": {}}
            rows.insert(env.engine, schema.jobs, **facts | values)
        case "providers":
            rows.insert(env.engine, schema.providers, name="n", host="h", **values)
        case "services":
            rows.update(env.engine, schema.services, rows.insert_agent(env.engine), **values)
        case "requests":
            rows.insert_arq(env.engine, rows.insert_profile(env.engine), **values)
    code, lines = env.pending()
    assert code == 1
    (marked,) = (line for line in lines.values() if line["needs_attention"])
    assert item in marked["name"]
    assert marked["count"] == 1


@pytest.mark.slow
def test_pending_bind_within_timeout_needs_no_attention(env: Env) -> None:
    env.create_schema()
    profile = rows.insert_profile(env.engine)
    rows.insert_arq(env.engine, profile, state="BindStarted", updated_at=ago(200))
    code, lines = env.pending()
    assert (code, lines["requests in BindStarted"]["needs_attention"]) == (0, False)
    assert lines["requests in BindStarted"]["oldest_seconds"] >= 200


def test_pending_empty_database_is_error(env: Env) -> None:
    code, text = env.run()
    assert code == 2
    assert "cyborg-dbsync upgrade" in text


def test_help_has_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        status.main(["--help"])
    assert exit_info.value.code == 0
    assert "{upgrade,convert-config,pending}" in capsys.readouterr().out
