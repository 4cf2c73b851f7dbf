# SPDX-License-Identifier: Apache-2.0
"""The command of ``tools/dev mutants``, in a small tree."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample

TOOL = Path(__file__).parents[3] / "tools" / "_mutants.py"
OPTION = "def pytest_addoption(parser):\n    parser.addoption('--tier')\n"
TESTS = """
import os, subprocess, sys, time
import pytest
from cyborg import module

@pytest.fixture
def value():
    return 10 // module.DIVISOR

def test_limit():
    program = "from cyborg import module; print(module.LIMIT)"
    assert subprocess.check_output([sys.executable, "-c", program], cwd="/") == b"3\\n"

def test_guard():
    module.check(3)

@pytest.mark.parametrize("value", [4, 5])
def test_bound(value):
    assert module.LIMIT < value

def test_fixture(value):
    assert value

def test_long():
    with open(os.environ["STARTED"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
"""
MODULE = "LIMIT = 3\nDIVISOR = 5\n\n\ndef check(value):\n    assert value <= LIMIT\n"
PATCH = "--- a/cyborg/module.py\n+++ b/cyborg/module.py\n@@ -1 +1 @@\n-{}\n+{}\n"
MUTANTS = {
    "found": ("test_limit", "LIMIT = 3", "LIMIT = 4"),
    "survivor": ("test_guard", "LIMIT = 3", "LIMIT = 4"),
    "outdated": ("test_guard", "LIMIT = 2", "LIMIT = 4"),
    "fixture": ("test_fixture", "DIVISOR = 5", "DIVISOR = 0"),
    "import": ("test_limit", "LIMIT = 3", "LIMIT ="),
    "long": ("test_long", "LIMIT = 3", "LIMIT = 4"),
    "one-case": ("test_bound", "LIMIT = 3", "LIMIT = 4"),
    "all-cases": ("test_bound[4] test_bound[5]", "LIMIT = 3", "LIMIT = 5"),
    "case": ("test_bound[4] test_bound[5]", "LIMIT = 3", "LIMIT = 4"),
}


class SmallTree:
    """A tree with one module, tests and mutants; temporary files are in ``temporary``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tree"
        self.temporary = folder / "temporary"
        self.started = folder / "started"
        self.temporary.mkdir()
        for name, text in {
            "conftest.py": OPTION,
            "cyborg/__init__.py": "",
            "cyborg/module.py": MODULE,
            "tests/test_module.py": TESTS,
        }.items():
            self.add(name, text)
        entries = []
        for name, (tests, old, new) in MUTANTS.items():
            self.add(f"tools/mutants/{name}.patch", PATCH.format(old, new))
            ids = [f"tests/test_module.py::{test}" for test in tests.split()]
            values = f'name = "{name}"\ndefect = "A."\ntests = {json.dumps(ids)}\n'
            entries.append(f"[[mutant]]\n{values}")
        self.add("tools/mutants/mutants.toml", "\n".join(entries))
        shutil.copy(TOOL, self.folder / "tools")

    def add(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the command."""
        environment = {
            "TMPDIR": str(self.temporary),
            "STARTED": str(self.started),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # most of the start of pytest
        }
        return subprocess.Popen(
            [sys.executable, self.folder / "tools" / "_mutants.py", *arguments],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run the command; return its status, standard output and standard error."""
        process = self.start(*arguments)
        output, errors = process.communicate(timeout=120)
        assert list(self.temporary.iterdir()) == []
        assert (self.folder / "cyborg" / "module.py").read_text() == MODULE
        return process.returncode, output, errors


@pytest.fixture
def tree(tmp_path: Path) -> SmallTree:
    return SmallTree(tmp_path)


def test_found_mutant_is_imported_by_subprocesses(tree: SmallTree) -> None:
    status, output, errors = tree.run("found")
    assert (status, errors) == (0, "")
    assert "found ... found by tests/test_module.py::test_limit (" in output
    assert output.splitlines()[-1].startswith("1 of 1 found, ")


def test_each_mutant_that_no_test_fails_for_is_not_found(tree: SmallTree) -> None:
    status, output, _ = tree.run("found", "survivor", "outdated", "fixture", "import")
    assert (status, output.splitlines()[-1].partition(",")[0]) == (1, "1 of 5 found")
    assert "survivor ... SURVIVED (" in output
    assert "outdated ... ERROR: cyborg/module.py has 0 times, instead of once" in output
    assert "fixture ... ERROR: pytest ended with 1" in output
    assert "import ... ERROR: pytest ended with " in output


def test_each_named_case_must_find_the_mutant(tree: SmallTree) -> None:
    status, output, _ = tree.run("one-case", "all-cases", "case")
    assert (status, output.splitlines()[-1].partition(",")[0]) == (1, "2 of 3 found")
    first, second = (f"tests/test_module.py::test_bound[{value}]" for value in (4, 5))
    assert f"one-case ... found by {first} (" in output
    assert f"all-cases ... found by {first}, {second} (" in output
    assert f"case ... SURVIVED {second} (" in output


@pytest.mark.matrix
def test_tests_that_fail_without_a_defect_end_the_run(tree: SmallTree) -> None:
    tree.add("cyborg/module.py", MODULE.replace("LIMIT = 3", "LIMIT = 2"))
    process = tree.start("found", "survivor")
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (1, "")
    assert "the tests fail without a defect: tests/test_module.py::test_" in errors


@pytest.mark.matrix
def test_unknown_name_is_rejected(tree: SmallTree) -> None:
    status, _, errors = tree.run("found", "other")
    assert (status, "unknown defects other" in errors) == (2, True)


@pytest.mark.parametrize(
    "number", sample([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], signal.SIGTERM)
)
def test_interrupted_run_leaves_no_process_and_no_file(
    tree: SmallTree, number: signal.Signals
) -> None:
    process = tree.start("long")
    started = tree.started
    wait_until("the test has started", lambda: started.exists() and started.read_text())
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted after 0 of 1\n")
    assert list(tree.temporary.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
