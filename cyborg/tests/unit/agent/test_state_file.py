# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.state_file import VERSION, StateFile


def load_jobs(data: Any) -> dict[str, int]:
    return {str(key): int(value) for key, value in data["jobs"].items()}


@pytest.fixture
def file(tmp_path: Path) -> StateFile[dict[str, int]]:
    path = tmp_path / "agent" / "jobs.json"
    return StateFile(path, load_jobs, description="The file", consequence="jobs run again")


def test_written_data_are_read(file: StateFile[dict[str, int]]) -> None:
    assert file.read() is None
    file.write({"jobs": {"b": 2, "a": 1}})
    assert file.read() == {"a": 1, "b": 2}
    assert json.loads(file.path.read_text())["version"] == VERSION


def test_data_without_a_version_are_read(file: StateFile[dict[str, int]]) -> None:
    """Agents wrote the data alone before there were versions."""
    file.path.parent.mkdir()
    file.path.write_text(json.dumps({"jobs": {"a": 1}}))
    assert file.read() == {"a": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data": {"jobs": {"a": 2}}}, "the checksum does not match"),
        ({"checksum": None}, "the checksum does not match"),
        ({"version": VERSION + 1}, f"version {VERSION + 1}, this agent reads version {VERSION}"),
        ({"version": None}, f"version None, this agent reads version {VERSION}"),
    ],
)
def test_file_that_cannot_be_trusted_is_moved_aside(
    file: StateFile[dict[str, int]],
    change: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file.write({"jobs": {"a": 1}})
    body = json.dumps(json.loads(file.path.read_text()) | change)
    file.path.write_text(body)
    assert file.read() is None
    assert reason in caplog.text
    assert "jobs run again" in caplog.text
    assert file.path.with_name("jobs.json.broken").read_text() == body
    assert not file.path.exists()


def test_failed_writes_are_logged_once(
    file: StateFile[dict[str, int]], caplog: pytest.LogCaptureFixture
) -> None:
    file.path.parent.write_text("a file in the place of the folder")
    assert not file.try_write({"jobs": {}})
    assert not file.try_write({"jobs": {}})
    assert not file.is_written
    assert caplog.text.count("a restart loses its changes") == 1
    file.path.parent.unlink()
    assert file.try_write({"jobs": {}})
    assert file.read() == {}
