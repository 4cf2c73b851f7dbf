# SPDX-License-Identifier: Apache-2.0
"""The scripts in real shells."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from cyborg.cli import app
from cyborg.cli.commands import ALIASES
from cyborg.cli.completion.command import WRITERS, CompletionTable, build_table, read_parsers
from cyborg.tests.fixtures.cli.terminal import Terminal, run_in_terminal
from cyborg.tests.fixtures.machine.tiers import sample

# The typed words, of which the last one is completed, and some of the offered words.
# An option takes the next word as its value, also if it looks like a command.
CASES: Mapping[str, set[str]] = {
    "dev": {"device", "device-list", "device-context-list"},
    "device ": {"list", "show", "context", "profile"},
    "device context l": {"list"},
    "driver ": {"install", "update", "uninstall", "list", "show"},
    "device-list --": {"--host", "--status", "--format", "--long"},
    "device list --stat": {"--status"},
    "device-list --status ": {"enabled", "maintaining"},
    "device-list --status=m": {"maintaining"},
    "device-list -f j": {"json"},
    "--os-clou": {"--os-cloud"},
    "--os-cloud device-list job-l": {"job-list"},
    "job list --state pending --": {"--kind", "--host"},
    "job-list --host job-show --": {"--kind", "--host"},
    "topology --svg pict": {"picture.svg"},
    "topology --svg=pict": {"picture.svg"},
}
ABSENT: Mapping[str, set[str]] = {
    "device-list --": {"--os-cloud", "--svg", "list"},
    "device ": {"device-list", "--host"},
    "topology --svg pict": {"other.txt"},
}


@pytest.fixture(scope="module")
def table() -> CompletionTable:
    application = app.CyborgApp(["--os-auth-type", "none"])
    return build_table(read_parsers(application), ALIASES)


@pytest.fixture
def folder(table: CompletionTable, tmp_path: Path) -> Path:
    """Return a folder with the scripts and with two files."""
    for shell, write in WRITERS.items():
        (tmp_path / f"cyborg.{shell}").write_text(write(table), "utf-8")
    (tmp_path / "picture.svg").touch()
    (tmp_path / "other.txt").touch()
    return tmp_path


def check(line: str, offered: set[str]) -> None:
    """Check the offered words of a case; fish and zsh offer ``--status=value`` as one word."""
    prefix = line.rpartition("=")[0]
    words = {word.removeprefix(f"{prefix.split()[-1]}=") if prefix else word for word in offered}
    assert CASES[line] <= words, line
    assert not ABSENT.get(line, set()) & words, line


def run_shell(folder: Path, *command: str, text: str = "") -> list[str]:
    process = subprocess.run(
        command,
        cwd=folder,
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8"},
    )
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout.splitlines()


BASH = """
source ./cyborg.bash
complete -p cyborg >/dev/null || exit 3
while IFS= read -r line; do
    COMP_WORDS=(cyborg)
    for word in ${line//=/ = }; do COMP_WORDS+=("$word"); done
    [[ $line == *[\\ =] ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _cyborg
    printf '%s\\n' "${COMPREPLY[*]}"
done
"""


@pytest.mark.slow
def test_bash_completes_each_case(folder: Path) -> None:
    answers = run_shell(folder, "bash", "--norc", "-c", BASH, text="".join(f"{c}\n" for c in CASES))
    for line, answer in zip(CASES, answers, strict=True):
        check(line, set(answer.split()))


@pytest.mark.slow
def test_bash_completes_all_options_of_all_commands(folder: Path, table: CompletionTable) -> None:
    lines = "".join(f"{path} -\n" for path in table.commands)
    answers = run_shell(folder, "bash", "--norc", "-c", BASH, text=lines)
    for (path, name), answer in zip(table.commands.items(), answers, strict=True):
        assert answer.split() == list(table.options[name]), path


@pytest.mark.slow
@pytest.mark.requires("fish")
def test_fish_completes_each_case(folder: Path) -> None:
    commands = [f"echo '= {line}'; complete --do-complete 'cyborg {line}'" for line in CASES]
    script = "; ".join(["source ./cyborg.fish", *commands])
    offered: dict[str, set[str]] = {}
    line = ""
    for output in run_shell(folder, "fish", "--no-config", "-c", script):
        if output.startswith("= "):
            line = output.removeprefix("= ")
            offered[line] = set()
        else:
            offered[line].add(output.partition("\t")[0])
    assert set(offered) == set(CASES)
    for each, words in offered.items():
        check(each, words)


@pytest.mark.slow
@pytest.mark.requires("fish")
def test_fish_shows_descriptions(folder: Path) -> None:
    script = "source ./cyborg.fish; complete --do-complete 'cyborg device-list --ho'"
    lines = run_shell(folder, "fish", "--no-config", "-c", script)
    assert lines == ["--host\tonly the devices of this host"]


def complete_in(terminal: Terminal, typed: str, expected: str) -> str:
    """Type a text, press the tab key twice, and return what the shell shows."""
    terminal.type(f"cyborg {typed}\t\t".encode())
    terminal.wait_for(expected)
    shown = terminal.text
    terminal.type(b"\x15")  # clears the line
    return shown


# Typed words, and what the shell writes: the rest of a word, or a list.
TYPED = {
    "device context lis": "list",
    "device-list --status=ena": "enabled",
    "driver ": "uninstall",
}


@pytest.mark.slow
def test_bash_completes_typed_words(folder: Path) -> None:
    env = {"HOME": str(folder), "TERM": "dumb", "PS1": "> ", "INPUTRC": "/dev/null"}
    with run_in_terminal(["/bin/bash", "--norc", "--noprofile", "-i"], env, 200) as terminal:
        terminal.type(f"cd {folder}; source ./cyborg.bash; echo rea''dy\n".encode())
        terminal.wait_for("ready")
        for typed, expected in TYPED.items():
            complete_in(terminal, typed, expected)


@pytest.mark.slow
@pytest.mark.requires("zsh")
@pytest.mark.parametrize("installed", sample([False, True], True), ids=["sourced", "installed"])
def test_zsh_completes_typed_words(folder: Path, installed: bool) -> None:
    start = "autoload -Uz compinit; compinit -u -D; source ./cyborg.zsh"
    if installed:
        (folder / "cyborg.zsh").rename(folder / "_cyborg")
        start = f"fpath=({folder} $fpath); autoload -Uz compinit; compinit -u -D"
    env = {"HOME": str(folder), "TERM": "dumb", "PS1": "> ", "ZDOTDIR": str(folder)}
    with run_in_terminal(["/usr/bin/zsh", "-f", "-i"], env, 200, 50) as terminal:
        terminal.type(
            f"cd {folder}; unsetopt zle_bracketed_paste; {start}; echo rea''dy\n".encode()
        )
        terminal.wait_for("ready")
        for typed, expected in TYPED.items():
            complete_in(terminal, typed, expected)
        shown = complete_in(terminal, "device-list --", "only devices with this status")
        assert "only the devices of this host" in shown
        complete_in(terminal, "topology --svg pict", "picture.svg")
