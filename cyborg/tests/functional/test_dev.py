# SPDX-License-Identifier: Apache-2.0
"""The verbs of ``tools/dev``, in a small checkout with the environment of this run."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine.processes import Daemon, wait_until

TOOLS = Path(__file__).parents[3] / "tools"
VERBS = ("fix", "lint", "test", "mutants", "run", "db", "profile", "note", "reference")


class Checkout:
    """A checkout with the tools, and without the stamp that lets them update the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"CYBORG_VENV": str(folder / "venv"), "CYBORG_DEV": str(folder / "dev")}
        (folder / "venv").mkdir()
        for name in ("bin", "lib", "pyvenv.cfg"):
            (folder / "venv" / name).symlink_to(Path(sys.prefix) / name)
        (folder / "cyborg").mkdir()
        self.source = self.add("cyborg/module.py", "import os\n")
        self.dev = self.add("tools/dev", (TOOLS / "dev").read_text())
        for name in ("lib.sh", "_database_shell.py"):
            self.add(f"tools/{name}", (TOOLS / name).read_text())

    def add(self, name: str, text: str) -> Path:
        """Write a file, executable if it is a script, and return its path."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        if text.startswith("#!"):
            path.chmod(0o755)
        return path

    def run(self, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run ``tools/dev`` with this standard input; programs of ``programs`` come first."""
        path = f"{self.folder / 'programs'}:{os.environ['PATH']}"
        return subprocess.run(
            [self.dev, *words],
            env=os.environ | self.environment | {"PATH": path},
            input=text,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def service(checkout: Checkout) -> Iterator[Daemon]:
    """Run ``tools/dev run`` until the service is ready."""
    command = [str(checkout.dev), "run", "--port", "0", "--placement-port", "0"]
    daemon = Daemon("run", command, checkout.folder, checkout.environment)
    daemon.start()
    try:
        wait_until("the service is ready", lambda: count_starts(daemon))
        yield daemon
    finally:
        daemon.stop()


def count_starts(daemon: Daemon) -> int:
    return daemon.log.read_text().count("cyborg-standalone: ready")


def test_help_lists_all_verbs(checkout: Checkout) -> None:
    process = checkout.run("--help")
    assert process.returncode == 0
    assert re.findall(r"^  ([a-z]+) ", process.stdout, re.MULTILINE) == list(VERBS)


def test_unknown_verb_is_rejected(checkout: Checkout) -> None:
    process = checkout.run("deploy")
    assert (process.returncode, "unknown verb deploy" in process.stderr) == (2, True)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is missing")
@pytest.mark.parametrize("name", ["dev", "bench"])
def test_script_passes_shellcheck(name: str) -> None:
    command = ["shellcheck", "-x", "-P", "SCRIPTDIR", str(TOOLS / name)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout


def test_fix_removes_unused_import_and_formats(checkout: Checkout) -> None:
    checkout.source.write_text("import os\nnames = [ 'a','b' ]\n")
    process = checkout.run("fix")
    assert process.returncode == 0, process.stdout
    assert checkout.source.read_text() == 'names = ["a", "b"]\n'


def test_lint_runs_the_linters_of_tools_test(checkout: Checkout) -> None:
    checkout.add("tools/test", '#!/bin/sh\necho "test $*"\n')
    assert checkout.run("lint").stdout == "test --lint\n"


@pytest.mark.matrix
def test_test_runs_pytest_with_arguments(checkout: Checkout) -> None:
    checkout.add("test_one.py", "def test_one() -> None: pass\ndef test_two() -> None: pass\n")
    process = checkout.run("test", "-q", "-p", "no:cacheprovider", "test_one.py", "-k", "two")
    assert "1 passed, 1 deselected" in process.stdout, process.stderr


def test_note_creates_release_note(checkout: Checkout) -> None:
    process = checkout.run("note", "fix-release-of-vfs")
    assert process.returncode == 0, process.stderr
    (note,) = (checkout.folder / "releasenotes" / "notes").glob("fix-release-of-vfs-*.yaml")
    assert "features:" in note.read_text()


@pytest.mark.matrix
def test_run_restarts_the_service_when_a_source_file_changes(
    checkout: Checkout, service: Daemon
) -> None:
    starts = count_starts(service)
    checkout.source.write_text("import sys\n")
    wait_until("the service is restarted", lambda: count_starts(service) > starts)
    # The shell reads the database of the service.
    query = "SELECT count(*) AS cards FROM\n devices;\nSELECT x FROM devices;\n"
    process = checkout.run("db", text=query)
    assert process.stdout == "cards\n2\n"
    assert (process.returncode, process.stderr.startswith("error: no such column")) == (1, True)


def test_db_without_database_names_the_verb_that_creates_it(checkout: Checkout) -> None:
    process = checkout.run("db")
    assert process.returncode == 1
    assert "start the service with tools/dev run" in process.stderr


@pytest.mark.parametrize(
    ("url", "client", "line"),
    [
        (
            "mysql+pymysql://me:secret@db:3307/cyborg",
            "mariadb",
            "secret --host=db --port=3307 --user=me cyborg",
        ),
        (
            "postgresql+psycopg2://me:secret@db/cyborg",
            "psql",
            "secret --host=db --username=me cyborg",
        ),
    ],
)
def test_db_runs_client_of_server_with_password_in_environment(
    checkout: Checkout, url: str, client: str, line: str
) -> None:
    checkout.add(f"programs/{client}", '#!/bin/sh\necho "$MYSQL_PWD$PGPASSWORD" "$@"\n')
    assert checkout.run("db", url).stdout == f"{line}\n"


@pytest.mark.matrix
def test_profile_writes_flame_graph_of_all_processes(checkout: Checkout) -> None:
    program = (
        "import subprocess, sys, time\n"
        "def work():\n    end = time.monotonic() + 2\n    while time.monotonic() < end: pass\n"
        "if 'child' not in sys.argv: subprocess.run([sys.executable, __file__, 'child'])\n"
        "work()\n"
    )
    checkout.add("tools/benchmarks/__main__.py", program)
    process = checkout.run("profile", "--output", str(checkout.folder / "graph.svg"))
    if "Permission" in process.stderr:
        pytest.skip("this user may not trace processes")
    assert process.returncode == 0, process.stderr
    assert "work (" in (checkout.folder / "graph.svg").read_text()
