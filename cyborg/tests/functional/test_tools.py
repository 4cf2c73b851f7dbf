# SPDX-License-Identifier: Apache-2.0
"""The environment that ``tools/lib.sh`` keeps, and the scripts around the tests."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine.prerequisites import ROOT
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample

TOOLS = ROOT / "tools"
RUN_PLUGINS = [f"cyborg.tests.fixtures.runs.{name}" for name in ("record", "scheduler", "workers")]


@contextlib.contextmanager
def start_shell(text: str, *words: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run shell commands with the functions of ``lib.sh``, with this interpreter as PYTHON.

    The end of the block kills the shell.
    """
    base = getattr(sys, "_base_executable", sys.executable)
    with subprocess.Popen(
        [
            "bash",
            "-c",
            f'. "$0"\nfind_python || exit 9\n{text}',
            TOOLS / "lib.sh",
            *map(str, words),
        ],
        env=os.environ | {"PYTHON": base} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run_shell(text: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run such commands to their end."""
    with start_shell(text, *words, **environment) as process:
        output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def take_function(name: str) -> str:
    """Return the command that defines a function of ``tools/test``."""
    return f"""eval "$(sed -n '/^{name}() {{/,/^}}/p' "${{0%/*}}/test")"\n"""


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


@pytest.mark.parametrize("name", sample(["venv", "it's", "a folder"], "a folder"))
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


def test_interpreter_of_the_environment_is_the_default(tmp_path: Path) -> None:
    folder = make_environment(tmp_path / "venv")
    script = 'unset PYTHON; VENV=$1; find_python && printf "%s" "$PYTHON"'
    found = Path(run_shell(script, folder).stdout)
    assert found.is_file()
    assert folder not in found.parents, "the environment may have no pip"


def test_folder_without_an_environment_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("")
    done = run_shell('make_venv "$1"', tmp_path)
    assert done.returncode == 1
    assert "is not a virtual environment of this Python" in done.stdout + done.stderr
    assert (tmp_path / "thesis").exists()


@pytest.mark.requires("pip")
@pytest.mark.matrix
def test_environment_that_is_not_usable_is_created_again(tmp_path: Path) -> None:
    moved = make_environment(tmp_path / "venv").rename(tmp_path / "moved")
    (moved / ".made-by-tools").touch()
    # The interpreter is that of the environment, as where it is active.
    done = run_shell('make_venv "$1"', moved, PYTHON=str(moved / "bin" / "python"))
    assert done.returncode == 0, done.stderr
    assert is_usable(moved)
    assert not (moved / "bin" / "pytest").exists()


@pytest.mark.requires("pip")
@pytest.mark.matrix
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


class Checkout:
    """Links to this tree, with copies of the tools, and the environment of this run as it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self.environment = Path(sys.prefix)
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        (self.folder / "tools").mkdir(parents=True)
        for path in ROOT.iterdir():
            if path.name not in ("tools", ".git", ".dev"):
                (self.folder / path.name).symlink_to(path)
        for name in ("test", "_machine.py"):
            shutil.copy(TOOLS / name, self.folder / "tools")
        library = (TOOLS / "lib.sh").read_text()
        (self.folder / "tools" / "lib.sh").write_text(f"{library}\ntest_venv() {{ :; }}\n")

    def add_static_tests(self, text: str) -> None:
        """Replace all tests by one file of static tests."""
        for name, omitted in (
            ("cyborg", {"tests"}),
            ("cyborg/tests", {"conftest.py", "functional", "lab", "unit"}),
        ):
            folder = self.folder / name
            folder.unlink(missing_ok=True)
            folder.mkdir()
            for path in (ROOT / name).iterdir():
                if path.name not in omitted:
                    (folder / path.name).symlink_to(path)
        (folder / "unit").mkdir()
        (folder / "unit" / "__init__.py").touch()
        (folder / "conftest.py").write_text(f"pytest_plugins = {RUN_PLUGINS}\n")
        (folder / "unit" / "test_page.py").write_text(
            f"import pytest, threading\npytestmark = pytest.mark.static\n{text}"
        )

    def replace_linters(self, **programs: str) -> None:
        """Let the linters do nothing, or run these shell commands."""
        (self.folder / "tools" / "_file_rules.py").touch()
        self.environment = self.folder / "venv"
        programs_folder = self.environment / "bin"
        programs_folder.mkdir(parents=True)
        linters = dict.fromkeys(("ruff", "lint-imports", "mypy", "reno", "shellcheck"), "exit 0")
        for name, command in {**linters, **programs}.items():
            (programs_folder / name).write_text(f"#!/bin/sh\n{command}\n")
            (programs_folder / name).chmod(0o755)
        for path in (Path(sys.prefix) / "bin").glob("python*"):
            (programs_folder / path.name).symlink_to(path)
        for name in ("lib", "pyvenv.cfg"):
            (self.environment / name).symlink_to(Path(sys.prefix) / name)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start ``tools/test``."""
        environment = {
            "CYBORG_VENV": str(self.environment),
            "TMPDIR": str(self.temporary),
            "PATH": f"{self.environment / 'bin'}:{os.environ['PATH']}",
        }
        return subprocess.Popen(
            [self.folder / "tools" / "test", *words],
            cwd=self.folder,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_terminated_run_ends_its_tests_and_removes_its_files(
    checkout: Checkout, tmp_path: Path
) -> None:
    facts = tmp_path / "facts"
    (tmp_path / "conftest.py").write_text(f"pytest_plugins = {RUN_PLUGINS}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_long.py").write_text(
        "import os, pathlib, tempfile, time\n"
        "def test_long():\n"
        f"    path = pathlib.Path({str(facts)!r})\n"
        "    path.with_name('new').write_text(f'{os.getpid()} {tempfile.gettempdir()}')\n"
        "    path.with_name('new').rename(path)\n"
        "    time.sleep(600)\n"
    )
    process = checkout.start(str(tmp_path / "test_long.py"))
    wait_until("the test has started", lambda: facts.exists() or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.splitlines()[-1]) == (143, "interrupted after 0 of 1")
    pid, temporary = facts.read_text().split(" ")
    # The files are in memory if there is room, with all files of the tests.
    assert temporary == str(checkout.temporary) or not Path(temporary).exists()
    assert list(checkout.temporary.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


CONTRADICTION = "def test_contradicts(): assert 1 == 2\n"
WAITING = "def test_waits(): threading.Event().wait()\n"


@pytest.mark.parametrize(
    ("linter", "interrupt"),
    sample(
        [("mypy", "ctrl-c"), ("mypy", "term"), ("shellcheck", "ctrl-c")],
        ("mypy", "ctrl-c"),
    ),
)
def test_interrupted_linters_show_the_failed_static_tests(
    checkout: Checkout, tmp_path: Path, linter: str, interrupt: str
) -> None:
    """The linter of the case begins; mypy does not end, and after shellcheck the tests do not."""
    begun = tmp_path / "begun"
    failed = """grep -qs '^FAILED ' "$TMPDIR"/static.log "$TMPDIR"/cyborg-test.*/static.log"""
    end = "exec sleep 600" if linter == "mypy" else "exit 0"
    commands = {"lint-imports": f"until {failed}; do sleep 0.1; done"}
    checkout.replace_linters(**commands, **{linter: f"touch {shlex.quote(str(begun))}; {end}"})
    checkout.add_static_tests(CONTRADICTION + WAITING)
    process = checkout.start("--lint")
    try:
        wait_until("the linter has begun", lambda: begun.exists() or process.poll() is not None)
        if interrupt == "term":
            process.terminate()
        else:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    except BaseException:
        process.terminate()
        raise
    output, _ = process.communicate(timeout=60)
    lines = output.splitlines()
    assert process.returncode == 130, output
    failure = "FAILED cyborg/tests/unit/test_page.py::test_contradicts - assert 1 == 2"
    contracts = next(line for line in lines if line.startswith("import contracts ... done"))
    assert lines.index(failure) == lines.index(contracts) + 1, output
    # All output of the tests, after that of the linters.
    assert "== tests that only read files" in lines
    ended = "4" if linter == "mypy" else "[67]"
    assert re.fullmatch(f"interrupted after {ended} of 7 checks and 1 of 2 tests", lines[-1])
    # Without room in memory, the folder of pytest, which it keeps for three runs, is there too.
    left = [path.name for path in checkout.temporary.iterdir()]
    assert [name for name in left if not name.startswith("pytest-of-")] == []


def test_interrupted_installation_ends_the_script(tmp_path: Path) -> None:
    """The installation is a step in a function that continues after a failure."""
    temporary = tmp_path / "it's"
    temporary.mkdir()
    started = tmp_path / "started"
    installation = f"echo $$ >{shlex.quote(str(started))}; exec sleep 600"
    script = f"""
    VENV_PIP=(sh -c {shlex.quote(installation)})
    add_libvirt_python() {{ pip_install_project "Installing" . || say "not installed"; }}
    add_libvirt_python
    exit 3
    """
    with start_shell(script, TMPDIR=str(temporary)) as process:
        wait_until("pip has started", lambda: started.exists() and started.read_text())
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "Installing ... interrupted\n")
    wait_until("pip has ended", lambda: not Path("/proc", started.read_text().strip()).exists())


def test_changed_without_a_clone_is_a_failure(checkout: Checkout) -> None:
    process = checkout.start("--changed")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    reason = "there is no git, no clone, or git refuses to read it"
    assert output.splitlines()[-2:] == [
        f"changed tests ... FAILED: {reason}",
        "0 passed, 1 failed, 0 skipped",
    ]


def test_changed_with_a_path_is_refused(checkout: Checkout) -> None:
    process = checkout.start("--changed", "tools/test")
    output, _ = process.communicate(timeout=60)
    refused = "--changed selects tests itself: give it, or tools/test"
    assert (process.returncode, output) == (2, f"test: {refused}\n")


@pytest.mark.requires("clone")
def test_changed_package_selects_the_tests_of_its_folder(tmp_path: Path) -> None:
    files = ("__init__.py", "agent/__init__.py", "agent/cards.py", "agent/ports.py")
    tests = ("__init__.py", "agent/__init__.py", "agent/test_cards.py")
    for path in (*files, *(f"tests/unit/{name}" for name in tests)):
        (tmp_path / "cyborg" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cyborg" / path).touch()
    git = "git -c user.name=Tester -c user.email=tester@example.org"
    done = run_shell(
        f"""
        {take_function("changed_tests")}
        cd "$1" && ROOT=$1 && git init -q -b main && git add . && {git} commit -q -m one || exit 1
        for name in __init__ agent/__init__ agent/cards agent/ports; do
            echo "pass" >"cyborg/$name.py"
            changed_tests
            git checkout -q .
        done
        """,
        tmp_path,
    )
    folder = "cyborg/tests/unit/agent"
    assert done.stdout.splitlines() == [folder, f"{folder}/test_cards.py", folder]


@pytest.mark.matrix
def test_failed_linters_leave_no_output_of_flaky_tests_of_an_earlier_run(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CYBORG_DEV", str(tmp_path / "dev"))
    monkeypatch.setenv("CYBORG_TEST_REQUIRE_SERVICES", "0")
    flaky = tmp_path / "dev" / "flaky.txt"
    flaky.parent.mkdir()
    flaky.touch()
    checkout.replace_linters(mypy="exit 1")
    checkout.add_static_tests("def test_passes(): pass\n")
    # Also if they end before the tests.
    for part, is_left in (("--lint", True), ("--unit", False)):
        output, _ = checkout.start("--all", "--lint", part).communicate(timeout=100)
        assert "mypy ... FAILED" in output
        assert flaky.exists() is is_left, output


def test_processes_that_could_not_be_listed_are_a_failure() -> None:
    script = f"""{take_function("check_leftovers")}
    ask_machine() {{ return 1; }}
    kill_leftovers() {{ :; }}
    PASSED=0 FAILED=0
    check_leftovers
    say "$PASSED passed, $FAILED failed"
    """
    done = run_shell(script)
    first, *_, last = done.stdout.splitlines()
    assert (first, last) == (
        "processes left running ... FAILED  unknown: tools/_machine.py has failed",
        "0 passed, 1 failed",
    )


def test_interrupted_documentation_says_what_has_ended(tmp_path: Path) -> None:
    names = ("wait_for", "wait_alone", "clean_up", "finish_docs")
    script = f"""{"".join(map(take_function, names))}
    kill_leftovers() {{ :; }}
    sleep() {{ say waiting; command sleep "$1"; }}
    CHECKS=0 ALONE=0 PASSED=2 FAILED=0 SKIPPED=1 PYTEST='' COMPILER='' WORK=$1
    trap clean_up EXIT
    trap 'exit 130' INT
    command sleep 600 &
    DOCS=$!
    finish_docs
    """
    with start_shell(script, tmp_path / "work") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output.removeprefix("waiting\n") == "interrupted after 3 checks and tests\n"


@pytest.mark.matrix
@pytest.mark.requires("clone")
def test_changed_tests_are_not_run_after_failed_linters(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CYBORG_TEST_REQUIRE_SERVICES", "0")
    checkout.replace_linters(mypy="exit 1")
    checkout.add_static_tests("def test_passes(): pass\n")
    git = "git -c user.name=Tester -c user.email=tester@example.org"
    made = run_shell(
        f'cd "$1" && git init -q -b main && {git} commit -q --allow-empty -m one', checkout.folder
    )
    assert made.returncode == 0, made.stderr
    output, _ = checkout.start("--changed").communicate(timeout=100)
    assert "mypy ... FAILED" in output
    assert "The other tests are not run: correct these errors first." in output
    assert "== selected tests" not in output


@pytest.mark.parametrize("size", ["inf", "700.5", "0"])
def test_memory_of_a_worker_that_is_no_number_is_refused(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setenv("CYBORG_TEST_WORKER_MB", size)
    process = checkout.start("--fast")
    output, _ = process.communicate(timeout=60)
    refused = f"CYBORG_TEST_WORKER_MB is a number of MiB, such as 700, not {size}"
    assert (process.returncode, output) == (2, f"test: {refused}\n")


@pytest.mark.requires("clone")
def test_git_hook_is_installed_or_the_reason_is_said(tmp_path: Path) -> None:
    script = """
    for name in fresh hooks locked none; do
        mkdir "$1/$name" && cd "$1/$name" || exit 1
        [ "$name" = none ] || git init -q . || exit 1
    done
    touch "$1/hooks/.git/hooks/pre-commit" "$1/locked/.git/config.lock"
    install() { cd "$1" && ROOT=$1 && install_hook; }
    for name in fresh fresh hooks locked none; do install "$1/$name"; done
    git -C "$1/fresh" config core.hooksPath
    git -C "$1/hooks" config core.hooksPath
    export GIT_TEST_ASSUME_DIFFERENT_OWNER=1 GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
    install "$1/locked"
    PATH=/dev/null
    install "$1/locked"
    """
    done = run_shell(script, tmp_path, LC_ALL="C", GIT_CEILING_DIRECTORIES=str(tmp_path))
    failed = "git hook ... not installed: "
    # With the lines of each case; nothing for the second time in the same clone.
    for line, begin in zip(
        done.stdout.splitlines(),
        [
            "git hook ... installed: core.hooksPath = tools/hooks",
            f"{failed}this clone has hooks; remove those of pre-commit by ",
            f"{failed}error: could not lock config file ",
            f"{failed}fatal: not a git repository",
            "tools/hooks",
            f"{failed}fatal: detected dubious ownership ",
            failed,
        ],
        strict=True,
    ):
        assert line.startswith(begin), done.stdout
    assert (
        done.stdout.endswith("git: No such file or directory\n")
        or "git: command not found" in done.stdout
    )
