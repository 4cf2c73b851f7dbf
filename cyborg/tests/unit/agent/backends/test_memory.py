# SPDX-License-Identifier: Apache-2.0
"""Memories of drivers in a file."""

import json
from pathlib import Path

import pytest

from cyborg.agent.state_file import MAX_TEXT, MAX_TEXTS, MemoryFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent/memory-compute-1.json"


def test_memory_survives_a_restart_for_each_driver(path: Path) -> None:
    first = MemoryFile(path)
    first.of("one").put("key", "text")
    first.of("two").put("key", "other")
    again = MemoryFile(path)
    assert [again.of(name).get("key") for name in ("one", "two", "three")] == [
        "text",
        "other",
        None,
    ]
    assert path.stat().st_mode & 0o777 == 0o600


def test_get_reads_nothing_before_its_first_use(path: Path) -> None:
    memory = MemoryFile(path).of("one")
    path.parent.mkdir()
    path.write_text(json.dumps({"one": {"key": "text"}}))
    assert memory.get("key") == "text"


@pytest.mark.parametrize("body", ["", "[", "[]", '{"one": []}', "null", '{"one": "x"}'])
def test_malformed_file_is_quarantined(
    path: Path, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_text(body)
    memory = MemoryFile(path).of("one")
    assert memory.get("key") is None
    assert (path.parent / f"{path.name}.broken").read_text() == body
    assert "drivers do not know what they stored" in caplog.text
    memory.put("key", "text")
    assert MemoryFile(path).of("one").get("key") == "text"


def test_file_that_cannot_be_written_is_logged_once_and_written_later(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.write_text("a file, not a folder")
    memory = MemoryFile(path).of("one")
    memory.put("a", "1")
    memory.put("a", "1")
    memory.put("b", "2")
    assert not memory.put("b", "2")
    assert (memory.get("a"), memory.get("b")) == ("1", "2")
    assert caplog.text.count("a restart loses its changes") == 1
    path.parent.unlink()
    assert memory.put("a", "1")
    assert MemoryFile(path).of("one").get("b") == "2"


def test_text_that_is_removed_does_not_return_after_a_restart(path: Path) -> None:
    memory = MemoryFile(path).of("one")
    assert memory.put("key", None)
    assert not path.exists()
    assert memory.put("key", "text")
    assert memory.put("key", None)
    assert memory.get("key") is None
    assert MemoryFile(path).of("one").get("key") is None


def test_memory_is_bounded(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps({"one": {str(n): "x" for n in range(MAX_TEXTS)}}))
    memory = MemoryFile(path).of("one")
    memory.put("new", "x")
    assert memory.get("0") is None
    assert memory.get("1") == memory.get("new") == "x"
    with pytest.raises(ValueError, match="more than 65536 characters"):
        memory.put("new", "x" * (MAX_TEXT + 1))
