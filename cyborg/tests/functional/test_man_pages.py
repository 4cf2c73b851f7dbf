# SPDX-License-Identifier: Apache-2.0
"""The man pages: built, read by man, and compared with the options of the programs."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import cyborg
from cyborg.tests.fixtures.machine.tiers import sample

ROOT = Path(cyborg.__file__).parents[1]
PROGRAMS = sorted(
    entry.name
    for entry in metadata.entry_points(group="console_scripts")
    if entry.value.startswith("cyborg.cmd.")
)
SUBCOMMANDS = {
    "cyborg-dbsync": ("upgrade", "version", "stamp", "import", "purge"),
    "cyborg-status": ("upgrade", "convert-config", "pending"),
}
# Of the authentication plug-ins and the cloud: the page names the most common ones.
OMITTED = re.compile(r"--(?:no|os-)[a-z]")

pytestmark = [pytest.mark.requires("man"), pytest.mark.matrix]


def run(*command: str, folder: Path = ROOT) -> str:
    """Run a program without a terminal, and return its standard output and error."""
    environ = {**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "80", "COLUMNS": "200"}
    process = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=environ
    )
    assert process.returncode == 0, process.stderr
    return process.stdout + process.stderr


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built pages."""
    folder = tmp_path_factory.mktemp("man")
    run(sys.executable, "-m", "sphinx", "-W", "-q", "-b", "man", "doc/source", str(folder))
    return folder


def test_each_program_has_a_page(pages: Path) -> None:
    assert sorted(page.stem for page in pages.glob("*.1")) == PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS)
def test_page_is_named_and_read_without_warnings(pages: Path, program: str) -> None:
    assert run("lexgrog", f"{program}.1", folder=pages).startswith(f'{program}.1: "{program} - ')
    process = subprocess.run(
        ["man", "--warnings", "--encoding=UTF-8", "--local-file", f"{program}.1"],
        cwd=pages,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "80"},
    )
    assert process.stderr == ""
    titles = re.findall(r"^[A-Z][A-Z ]+$", process.stdout, re.MULTILINE)
    assert titles[:4] == ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS"]
    # The sign of a link without a target.
    assert "<>" not in process.stdout


@pytest.mark.parametrize("program", sample(PROGRAMS, "cyborg-agent", mark=pytest.mark.long))
def test_page_has_the_options_of_the_program(program: str) -> None:
    text = (ROOT / "doc" / "source" / "cli" / f"{program}.rst").read_text()
    text += (ROOT / "doc" / "source" / "cli" / "common-options.inc").read_text()
    documented = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text))
    executable = str(Path(sys.executable).with_name(program))
    for words in ((), *((word,) for word in SUBCOMMANDS.get(program, ()))):
        output = run(executable, *words, "--help-auth" if program == "cyborg" else "--help")
        listed = "\n".join(re.findall(r"^  (-.*?)(?:  |$)", output, re.MULTILINE))
        options = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", listed))
        assert len(options) > 1, output
        assert {option for option in options if not OMITTED.match(option)} <= documented
