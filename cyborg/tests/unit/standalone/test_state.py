# SPDX-License-Identifier: Apache-2.0
"""The files of the stand-alone service are accessible by their owner only."""

import sqlite3
import stat
from pathlib import Path

import pytest

from cyborg.core.errors import Misconfigured
from cyborg.standalone.stack import DATABASE, LOCK, PLACEMENT_DATABASE, make_private


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_make_private_creates_private_files(tmp_path: Path) -> None:
    state = tmp_path / "a" / "state"
    make_private(state)
    assert mode(state) == 0o700
    assert [mode(state / name) for name in (DATABASE, PLACEMENT_DATABASE, LOCK)] == [0o600] * 3
    # SQLite creates its journal files with the permissions of the database.
    database = sqlite3.connect(state / DATABASE)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("CREATE TABLE t (x)")
    assert {path.name: mode(path) for path in state.glob(f"{DATABASE}-*")} == {
        f"{DATABASE}-wal": 0o600,
        f"{DATABASE}-shm": 0o600,
    }
    database.close()


def test_make_private_restricts_existing_files(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o755)
    names = [DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", PLACEMENT_DATABASE, LOCK]
    for name in names:
        (state / name).write_text(name)
        (state / name).chmod(0o644)
    (state / "notes").write_text("other")
    (state / "notes").chmod(0o644)
    make_private(state)
    assert mode(state) == 0o700
    assert [mode(state / name) for name in names] == [0o600] * len(names)
    assert [(state / name).read_text() for name in names] == names
    assert mode(state / "notes") == 0o644


def test_make_private_shared_directory_is_rejected(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(Misconfigured, match="set --state-dir to a separate directory"):
        make_private(tmp_path)
    assert mode(tmp_path) == 0o1777


def test_make_private_directory_with_other_files_is_rejected(tmp_path: Path) -> None:
    state = tmp_path / "lib"
    (state / "dpkg").mkdir(parents=True)
    (state / "lock").mkdir()
    state.chmod(0o755)
    with pytest.raises(Misconfigured, match="set --state-dir to a separate directory"):
        make_private(state)
    assert mode(state) == 0o755
    (state / "lock").rmdir()
    state.chmod(0o700)
    make_private(state)
    assert (state / DATABASE).exists()


def test_make_private_does_not_follow_links(tmp_path: Path) -> None:
    target, state = tmp_path / "target", tmp_path / "state"
    target.write_text("x")
    target.chmod(0o644)
    state.mkdir()
    (state / f"{DATABASE}-wal").symlink_to(target)
    make_private(state)
    assert mode(target) == 0o644


def test_make_private_file_as_directory_is_reported(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_text("")
    with pytest.raises(Misconfigured, match="state: File exists"):
        make_private(state)
