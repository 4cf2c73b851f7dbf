# SPDX-License-Identifier: Apache-2.0
"""Tests of the ports for daemons: all runs of a user take them in turn."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine import processes


def test_runs_with_temporary_folders_of_their_own_share_the_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = processes.turns_file()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert path.parent == Path("/tmp")
    assert processes.turns_file() == path


def test_ports_are_taken_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "turns"
    monkeypatch.setattr(processes, "turns_file", lambda: path)
    first, second = processes.free_port(), processes.free_port()
    assert first != second
    assert {first, second} <= set(processes.PORTS)
    assert path.read_text() == str(second)
    assert path.stat().st_mode & 0o777 == 0o600


def test_turns_of_another_user_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "turns"
    monkeypatch.setattr(processes, "turns_file", lambda: path)
    processes.free_port()
    user = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: user + 1)
        with pytest.raises(PermissionError, match="is not of this user"):
            processes.free_port()
    link = path.rename(tmp_path / "other")
    path.symlink_to(link)
    with pytest.raises(OSError, match=f"Errno {errno.ELOOP}"):
        processes.free_port()
