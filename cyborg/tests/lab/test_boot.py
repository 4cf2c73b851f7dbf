# SPDX-License-Identifier: Apache-2.0
"""A guest whose kernel hangs while it starts is booted again; one that runs is left alone."""

from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine import guest

BOOT_SECONDS = 1.0


def command(folder: Path, script: str) -> list[str]:
    """Return a command in place of QEMU. Each run adds a line to the file ``runs``."""
    (folder / "io").mkdir()
    return ["sh", "-c", f"cd {folder}; echo run >>runs; {script}"]


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


def test_guest_boots_again_after_a_hang(tmp_path: Path) -> None:
    script = "[ $(wc -l <runs) = 2 ] || exec sleep 60; touch io/booted; echo done; exit 3"
    ending = guest.run_to_end(tmp_path, command(tmp_path, script), 30, BOOT_SECONDS)
    assert ending == (3, "done\n")
    assert runs(tmp_path) == 2


def test_hang_in_each_boot_is_an_error(tmp_path: Path) -> None:
    running = command(tmp_path, "echo stuck >console.log; exec sleep 60")
    with pytest.raises(AssertionError, match="hung in each of 3 boots: stuck"):
        guest.run_to_end(tmp_path, running, 30, BOOT_SECONDS)
    assert runs(tmp_path) == 3


def test_long_command_is_no_hang(tmp_path: Path) -> None:
    script = "touch io/booted; sleep 2; echo done"
    ending = guest.run_to_end(tmp_path, command(tmp_path, script), 30, BOOT_SECONDS)
    assert ending == (0, "done\n")
    assert runs(tmp_path) == 1
