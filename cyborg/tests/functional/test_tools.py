# SPDX-License-Identifier: Apache-2.0
"""The environment that ``tools/lib.sh`` keeps, and the scripts around the tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine.prerequisites import ROOT

TOOLS = ROOT / "tools"


def run_shell(text: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run shell commands with the functions of ``lib.sh``, with this interpreter as PYTHON."""
    base = getattr(sys, "_base_executable", sys.executable)
    return subprocess.run(
        ["bash", "-c", f'. "$0"\nfind_python || exit 9\n{text}', TOOLS / "lib.sh", *words],
        env=os.environ | {"PYTHON": base} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def make_environment(folder: Path) -> Path:
    """Create an environment with one program, as pip writes it."""
    made = run_shell('"$PYTHON" -m venv --without-pip "$1"', folder)
    assert made.returncode == 0, made.stderr
    interpreter = folder / "bin" / "python"
    line = f"#!{interpreter}"
    if " " in str(folder):
        line = f"#!/bin/sh\n'''exec' \"{interpreter}\" \"$0\" \"$@\"\n' '''"
    (folder / "bin" / "pytest").write_text(f"{line}\nimport sys\n")
    return folder


def is_usable(folder: Path) -> bool:
    return run_shell('is_usable "$1"', folder).returncode == 0


@pytest.mark.parametrize("name", ["venv", "it's", "a folder"])
def test_environment_is_usable_where_it_was_created(tmp_path: Path, name: str) -> None:
    folder = make_environment(tmp_path / name)
    (tmp_path / "link").symlink_to(folder)
    assert is_usable(folder)
    assert is_usable(tmp_path / "link")
    moved = folder.rename(tmp_path / f"{name}-moved")
    assert not is_usable(moved)
    # As in a copy whose programs were corrected.
    program = moved / "bin" / "pytest"
    program.write_text(program.read_text().replace(str(folder), str(moved)))
    assert is_usable(moved)


def test_environment_of_another_version_is_not_usable(tmp_path: Path) -> None:
    folder = make_environment(tmp_path / "venv")
    (packages,) = (folder / "lib").glob("python3.*")
    packages.rename(packages.with_name("python3.1"))
    assert not is_usable(folder)


@pytest.mark.requires("pip")
def test_environment_that_is_not_usable_is_created_again(tmp_path: Path) -> None:
    moved = make_environment(tmp_path / "venv").rename(tmp_path / "moved")
    # The interpreter is that of the environment, as where it is active.
    done = run_shell('make_venv "$1"', moved, PYTHON=str(moved / "bin" / "python"))
    assert done.returncode == 0, done.stderr
    assert is_usable(moved)
    assert not (moved / "bin" / "pytest").exists()


@pytest.mark.requires("pip")
def test_libvirt_python_that_cannot_be_installed_is_said(tmp_path: Path) -> None:
    folder = make_environment(tmp_path / "venv")
    program = tmp_path / "bin" / "pkg-config"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 0\n")  # as with the headers of libvirt
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    done = run_shell('add_libvirt_python "$1"', folder, PATH=path, PIP_NO_INDEX="1")
    assert done.returncode == 0
    skipped = "Without libvirt-python the tests of running guests are skipped"
    assert done.stdout.splitlines()[-1] == skipped
