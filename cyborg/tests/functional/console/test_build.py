# SPDX-License-Identifier: Apache-2.0
"""The committed files of the console are built from its source."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from cyborg.api.console import site as files
from cyborg.tests.fixtures.machine.prerequisites import ROOT

CONSOLE = ROOT / "console"
SOURCES = ("build.mjs", "package.json", "package-lock.json", "tsconfig.json")


@pytest.mark.static
def test_committed_files_are_built_from_this_source() -> None:
    found = {name: hash_file(CONSOLE / name) for name in SOURCES}
    found |= {
        str(path.relative_to(CONSOLE)): hash_file(path)
        for path in (CONSOLE / "src").rglob("*")
        if path.is_file()
    }
    lines = (CONSOLE / "built.sha256").read_text().splitlines()
    built = {name: digest for digest, _, name in (line.split(" ", 2) for line in lines)}
    assert built == found, "the console has changed: run tools/console and commit the files"


@pytest.mark.slow
@pytest.mark.requires("node")
def test_build_gives_the_committed_files(tmp_path: Path) -> None:
    process = subprocess.run(
        [ROOT / "tools" / "console", tmp_path], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files.TYPES)
    for name in files.TYPES:
        assert (tmp_path / name).read_bytes() == (files.FOLDER / name).read_bytes(), name


@pytest.mark.static
def test_source_files_have_the_licence_line_and_are_short() -> None:
    for path in (CONSOLE / "src").rglob("*.*"):
        text = path.read_text(encoding="utf-8")
        assert "SPDX-License-Identifier: Apache-2.0" in text[:120], path
        assert text.count("\n") <= 500, path


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
