# SPDX-License-Identifier: Apache-2.0
"""cyborg-status upgrade check, with and without a database and Placement."""

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.cmd import dbsync, status
from cyborg.db.schema import outbox
from cyborg.tests.fixtures.machine.processes import free_port, ini


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a configuration with an empty database and an unreachable Placement."""
    path = tmp_path / "cyborg.conf"
    endpoint = f"http://127.0.0.1:{free_port()}/"
    path.write_text(
        ini(
            {
                "database": {"connection": f"sqlite:///{tmp_path}/cyborg.db"},
                "placement": {"auth_type": "none", "endpoint_override": endpoint},
            }
        )
    )
    return path


def check(config: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Run the command; return its exit status and the checks by name."""
    capsys.readouterr()
    code = status.main(["--config-file", str(config), "upgrade", "check", "--json"])
    answer = json.loads(capsys.readouterr().out)
    return code, {row["check"]: row for row in answer["checks"]}


def test_check_empty_database_is_failure(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = check(config, capsys)
    assert code == 2
    assert rows["Database schema"]["result"] == 2
    assert "cyborg-dbsync upgrade" in rows["Database schema"]["details"]
    assert rows["Unfinished work"]["result"] == 1


def test_check_unreachable_placement_is_warning(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dbsync.main(["--config-file", str(config), "upgrade"])
    code, rows = check(config, capsys)
    assert code == 1
    assert {name for name, row in rows.items() if row["result"]} == {"Placement"}


def test_check_dead_letters_are_warning(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dbsync.main(["--config-file", str(config), "upgrade"])
    engine = sa.create_engine(f"sqlite:///{config.parent}/cyborg.db")
    with engine.begin() as tx:
        tx.execute(
            sa.insert(outbox).values(uuid="u", kind="nova", subject="s", payload={}, state="dead")
        )
    engine.dispose()
    _, rows = check(config, capsys)
    assert rows["Unfinished work"]["result"] == 1
    assert rows["Unfinished work"]["details"].startswith("1 message(s)")


def test_check_missing_options_are_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "empty.conf"
    path.write_text("[DEFAULT]\nauth_strategy = noauth\n")
    code, rows = check(path, capsys)
    assert code == 2
    assert "connection is not set" in rows["Database schema"]["details"]
    assert "auth_type is not set" in rows["Placement"]["details"]
    assert rows["Authentication"]["result"] == 1
