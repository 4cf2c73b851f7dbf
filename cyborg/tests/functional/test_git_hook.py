# SPDX-License-Identifier: Apache-2.0
"""The git hook refuses a commit that breaks the rules about files, or fails a static test."""

import copy
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine.prerequisites import ROOT
from cyborg.tests.fixtures.runs.small_runs import ENVIRONMENT, PLUGINS

LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"
IDENTITY = {
    f"GIT_{role}_{key}": value
    for role in ("AUTHOR", "COMMITTER")
    for key, value in {"NAME": "Tester", "EMAIL": "tester@example.org"}.items()
}

# A static test, with what runs it.
FIXTURES = "cyborg/tests/fixtures"
# What the hook needs to run tests: the runner, and what its modules import.
RUNNER = ("runs/*.py", *(f"machine/{name}.py" for name in ("fork_server", "processes", "slowdown")))
TEST = "cyborg/tests/unit/test_page.py"
PAGE, CODE = "doc/page.rst", "cyborg/limits.py"
STATIC_TEST = {
    "pyproject.toml": """[tool.pytest.ini_options]
addopts = "-p timeout"
markers = ["static: only reads files"]
[tool.ruff]
line-length = 100
[tool.ruff.lint]
select = ["F"]
""",
    "cyborg/tests/conftest.py": f"{LICENCE}{PLUGINS}",
    CODE: f"{LICENCE}LIMIT = 5\n",
    PAGE: "The limit is 5.\n",
    TEST: f"""{LICENCE}
from pathlib import Path

import pytest

from cyborg.limits import LIMIT


@pytest.mark.static
def test_page_has_the_limit():
    assert f"is {{LIMIT}}." in Path("{PAGE}").read_text()
""",
}
RUNNING = "running the tests that only read files\n"
FAILURE = f"FAILED {TEST}::test_page_has_the_limit"

pytestmark = pytest.mark.requires("clone")


class Clone:
    """A git repository with the hook and the rules of this project."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # What the hook keeps: the tree of the last commit, and its index.
        self.staged = folder / ".git" / "dev" / "staged"
        hooks = ("tools/hooks/pre-commit", "tools/hooks/pre-merge-commit")
        for name in ("tools/_file_rules.py", "tools/_machine.py", *hooks):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.git("init", "-q")
        self.git("config", "core.hooksPath", "tools/hooks")

    def git(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run git to its end."""
        with self.start(*words) as process:
            output, errors = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start git; the caller's repository and configuration have no effect."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        return subprocess.Popen(
            ["git", *words],
            cwd=self.folder,
            env={
                **environment,
                **IDENTITY,
                "GIT_CONFIG_GLOBAL": os.devnull,
                # Not below the tree, of which the tests add all files.
                "CYBORG_DEV": str(self.staged.parent),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def commit(self, path: str, text: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Write a file and commit it."""
        self.write(path, text)
        self.git("add", "--all")
        return self.git("commit", "-q", "-m", "tests: add a file", *options)

    def write(self, path: str, text: str) -> None:
        """Write a file, and do not add it to the next commit."""
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    """Return a clone whose first commit has the hook."""
    clone = Clone(tmp_path)
    assert clone.commit("cyborg/__init__.py", LICENCE).returncode == 0
    return clone


def test_hook_file_over_line_limit_is_refused_with_remedy(clone: Clone) -> None:
    assert clone.commit("cyborg/arqs.py", LICENCE + "\n" * 499).returncode == 0
    refused = clone.commit("cyborg/arqs.py", LICENCE + "\n" * 500)
    assert refused.returncode == 1
    remedy = "move one concept into a module of its own"
    # git shows the output of a hook as its errors.
    line = f"cyborg/arqs.py: 501 lines, at most 500 are allowed: {remedy}"
    assert refused.stderr.splitlines()[0] == line
    assert "git commit --no-verify" in refused.stderr
    assert clone.git("log", "--oneline").stdout.count("\n") == 2
    assert clone.git("commit", "-q", "-m", "tests: add it", "--no-verify").returncode == 0


def test_hook_line_limit_holds_for_scripts_and_the_console(clone: Clone) -> None:
    paths = [
        *("console/build.mjs", "console/src/ui/table.tsx", "debian/rules", "devstack/plugin.sh"),
        *("doc/source/_ext/pages.py", "doc/source/conf.py", "etc/containers/cloud/setup.sh"),
        *("releasenotes/source/conf.py", "setup.py", "tools/test"),
    ]
    for path in paths:
        # Without the end of the last line.
        clone.write(path, LICENCE + "\n" * 499 + "#")
    refused = clone.commit("cyborg/__init__.py", f"{LICENCE}# More.\n")
    assert refused.returncode == 1
    limit = "501 lines, at most 500 are allowed"
    lines = refused.stderr.splitlines()[:-1]
    assert [line.rpartition(": ")[0] for line in lines] == [f"{path}: {limit}" for path in paths]


def test_hook_data_may_be_long(clone: Clone) -> None:
    assert clone.commit("cyborg/data.json", "\n" * 501).returncode == 0


def test_hook_staged_text_is_checked_not_the_work_tree(clone: Clone) -> None:
    path = clone.folder / "cyborg" / "arqs.py"
    path.write_text(LICENCE + "\n" * 500)
    clone.git("add", "--all")
    path.write_text(LICENCE)
    assert clone.git("commit", "-q", "-m", "tests: add it").returncode == 1


def test_hook_file_without_licence_line_is_refused(clone: Clone) -> None:
    refused = clone.commit("tools/release", "#!/bin/sh\n")
    assert refused.returncode == 1
    assert refused.stderr.startswith("tools/release: no licence line: add ")


def test_hook_folder_over_module_limit_is_refused(clone: Clone) -> None:
    for number in range(20):
        (clone.folder / "cyborg" / f"module_{number}.py").write_text(LICENCE)
    assert clone.commit("cyborg/test_module.py", LICENCE).returncode == 0
    refused = clone.commit("cyborg/module_20.py", LICENCE)
    assert refused.returncode == 1
    assert refused.stderr.startswith("cyborg: 21 modules, at most 20 are allowed: ")


def test_hook_symbolic_link_is_refused(clone: Clone) -> None:
    (clone.folder / ".venv").symlink_to("/usr/lib/venv")
    refused = clone.commit("cyborg/arqs.py", LICENCE)
    assert refused.returncode == 1
    assert refused.stderr.startswith(".venv: a symbolic link: run git rm --cached, and ")


def test_hook_changed_migration_of_a_release_is_refused(clone: Clone) -> None:
    path = "cyborg/db/migrations/versions/v001.py"
    assert clone.commit(path, LICENCE).returncode == 0
    digest = hashlib.sha256(LICENCE.encode()).hexdigest()
    released = clone.folder / "cyborg" / "db" / "migrations" / "released.txt"
    released.write_text(f"{digest}  v001.py\n")
    assert clone.commit("cyborg/db/migrations/versions/v002.py", LICENCE).returncode == 0
    refused = clone.commit(path, LICENCE + "# A column more.\n")
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"{path}: a release has this migration: leave it as it is, ")
    clone.git("rm", "-q", "--force", path)
    assert clone.commit("cyborg/db/migrations/versions/v003.py", LICENCE).returncode == 1


def test_rules_hold_in_a_clone_of_another_user(clone: Clone) -> None:
    git_refuses = {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1", "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        [sys.executable, clone.folder / "tools" / "_file_rules.py"],
        env=os.environ | git_refuses | {"GIT_CONFIG_GLOBAL": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "dubious ownership" in done.stderr


def test_hook_merge_that_breaks_a_rule_is_refused(clone: Clone) -> None:
    clone.git("checkout", "-q", "-b", "topic")
    assert clone.commit("cyborg/arqs.py", "\n", "--no-verify").returncode == 0
    clone.git("checkout", "-q", "-")
    assert clone.commit("cyborg/ports.py", LICENCE).returncode == 0
    refused = clone.git("merge", "--no-edit", "topic")
    assert refused.returncode == 1
    assert "cyborg/arqs.py: no licence line: add " in refused.stderr


def test_hook_runs_ruff_in_a_folder_of_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CYBORG_VENV", sys.prefix)
    clone = Clone(tmp_path / 'it\'s a \\ "clone"')
    shutil.copy(ROOT / "pyproject.toml", clone.folder)
    done = clone.commit("cyborg/__init__.py", LICENCE)
    assert (done.returncode, done.stderr) == (0, "")
    refused = clone.commit("cyborg/arqs.py", f"{LICENCE}import os\n")
    assert refused.returncode == 1
    assert "`os` imported but unused" in refused.stdout + refused.stderr


@pytest.fixture
def static_clone(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> Clone:
    """Return a clone with a document and a static test that compares it with the code."""
    for name, value in {"CYBORG_VENV": sys.prefix, **ENVIRONMENT}.items():
        monkeypatch.setenv(name, value)
    for path in sorted(path for names in RUNNER for path in (ROOT / FIXTURES).glob(names)):
        clone.write(str(path.relative_to(ROOT)), path.read_text())
    for folder in ("tests", "tests/fixtures", "tests/fixtures/machine", "tests/unit"):
        clone.write(f"cyborg/{folder}/__init__.py", LICENCE)
    for name, text in STATIC_TEST.items():
        clone.write(name, text)
    clone.git("add", "--all")
    done = clone.git("commit", "-q", "-m", "tests: add a static test")
    assert (done.returncode, done.stderr) == (0, RUNNING), done.stderr
    return clone


def test_hook_document_that_contradicts_the_code_is_refused(static_clone: Clone) -> None:
    refused = static_clone.commit(PAGE, "The limit is 6.\n")
    assert refused.returncode == 1
    assert FAILURE in refused.stderr
    assert refused.stderr.splitlines()[-1].startswith("commit refused: correct this, or use ")
    assert static_clone.commit(CODE, f"{LICENCE}LIMIT = 6\n").returncode == 0


def test_hook_half_staged_change_is_judged_as_staged(static_clone: Clone) -> None:
    static_clone.write(PAGE, "The limit is 7.\n")
    static_clone.git("add", PAGE)
    static_clone.write(CODE, f"{LICENCE}LIMIT = 7\n")
    refused = static_clone.git("commit", "-q", "-m", "tests: change the page")
    assert refused.returncode == 1
    assert FAILURE in refused.stderr
    # Both files: git has the tree of this commit in an index of its own.
    done = static_clone.git("commit", "-q", "--all", "-m", "tests: change the limit")
    assert (done.returncode, done.stderr) == (0, RUNNING), done.stderr
    # Of another size: Python takes the bytecode of a module of the same second and size, and the
    # last commit may be less than a second ago.
    static_clone.write(CODE, f"{LICENCE}LIMIT = 80\n")
    assert static_clone.git("commit", "-q", "-m", "tests: limit", CODE).returncode == 1


def test_hook_deleted_file_is_not_in_the_judged_tree(static_clone: Clone) -> None:
    static_clone.git("rm", "-q", PAGE)
    assert static_clone.git("commit", "-q", "-m", "tests: delete the page").returncode == 1
    static_clone.git("rm", "-q", TEST)
    done = static_clone.git("commit", "-q", "-m", "tests: delete both")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.matrix
def test_hook_waits_for_another_commit(static_clone: Clone) -> None:
    other = os.open(static_clone.staged, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        static_clone.git("rm", "-q", TEST)
        process = static_clone.start("commit", "-q", "-m", "tests: delete the test")
        assert process.stderr is not None
        assert process.stderr.readline() == "waiting for another commit\n"
        assert process.poll() is None
    finally:
        os.close(other)
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.matrix
@pytest.mark.parametrize("left", ["index.lock", "index"])
def test_hook_runs_after_one_that_was_killed(static_clone: Clone, left: str) -> None:
    (static_clone.staged / left).write_text("damaged")
    refused = static_clone.commit(PAGE, "The limit is 6.\n")
    assert refused.returncode == 1
    assert FAILURE in refused.stderr


@pytest.mark.matrix
def test_hook_judges_all_files_of_the_commit_whatever_the_configuration(
    static_clone: Clone, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(static_clone.staged)
    static_clone.git("sparse-checkout", "set", "--no-cone", "/*", f"!{PAGE}")
    # The tests import the tree of the commit, and write no index that another git has locked.
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    static_clone.write(CODE, f"{LICENCE}LIMIT = 6\n")
    static_clone.git("add", CODE)
    static_clone.write(CODE, f"{LICENCE}LIMIT = 5\n")
    refused = static_clone.git("commit", "-q", "-m", "tests: change the limit")
    assert refused.returncode == 1
    assert FAILURE in refused.stderr
    assert "assert 'is 6.' in 'The limit is 5." in refused.stderr


def test_hook_that_cannot_run_does_not_blame_the_commit(static_clone: Clone) -> None:
    shutil.rmtree(static_clone.staged)
    static_clone.staged.write_text("a file")
    refused = static_clone.commit(PAGE, "The limit is 6.\n")
    assert refused.returncode == 1
    last = refused.stderr.splitlines()[-1]
    assert last.startswith(f"the hook could not run: {static_clone.staged} cannot be written; ")
    assert "tools/test --prepare" in last


@pytest.mark.matrix
def test_hook_says_that_the_environment_is_out_of_date(
    static_clone: Clone, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path_factory.mktemp("environment")
    for name in ("bin", "lib", "pyvenv.cfg"):
        (environment / name).symlink_to(Path(sys.prefix) / name)
    monkeypatch.setenv("CYBORG_VENV", str(environment))
    shutil.copy(ROOT / "tools" / "lib.sh", static_clone.folder / "tools")
    refused = static_clone.commit(PAGE, "The limit is 6.\n")
    assert refused.returncode == 1
    assert FAILURE in refused.stderr
    last = refused.stderr.splitlines()[-1]
    reason = f"(the environment {environment} is out of date: run tools/test --prepare)"
    assert last.startswith(f"commit refused: correct this {reason}, or ")


@pytest.mark.matrix
def test_hook_of_a_linked_worktree_uses_the_environment_of_the_clone(
    static_clone: Clone, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CYBORG_VENV")
    linked = copy.copy(static_clone)
    linked.folder = tmp_path_factory.mktemp("linked") / "tree"
    assert static_clone.git("worktree", "add", "-q", str(linked.folder)).returncode == 0
    done = linked.commit(PAGE, "The limit is 6.\n")
    missing = "ruff and tests are not run: no environment; run tools/test --prepare\n"
    assert (done.returncode, done.stderr) == (0, missing)
    (static_clone.folder / ".venv").symlink_to(sys.prefix)
    refused = linked.commit(PAGE, "The limit is 7.\n")
    assert refused.returncode == 1
    assert FAILURE in refused.stderr


@pytest.mark.matrix
def test_hook_release_note_with_an_unknown_section_is_refused(static_clone: Clone) -> None:
    refused = static_clone.commit("releasenotes/notes/limit-0123456789abcdef.yaml", "limits: [5]\n")
    assert refused.returncode == 1
    assert "unrecognized section name limits" in refused.stderr
    assert refused.stderr.splitlines()[-1].startswith("commit refused: ")


@pytest.mark.matrix
def test_hook_merge_that_fails_a_static_test_is_refused(static_clone: Clone) -> None:
    static_clone.git("checkout", "-q", "-b", "topic")
    assert static_clone.commit(PAGE, "The limit is 6.\n", "--no-verify").returncode == 0
    static_clone.git("checkout", "-q", "-")
    assert static_clone.commit("cyborg/ports.py", LICENCE).returncode == 0
    refused = static_clone.git("merge", "--no-edit", "topic")
    assert refused.returncode == 1
    assert FAILURE in refused.stderr


def test_hook_ends_at_the_first_failure(static_clone: Clone) -> None:
    static_clone.write("cyborg/arqs.py", LICENCE + "\n" * 500)
    refused = static_clone.commit(PAGE, "The limit is 6.\n")
    assert refused.returncode == 1
    first, last = refused.stderr.splitlines()
    assert first.startswith("cyborg/arqs.py: 501 lines, ")
    assert last.startswith("commit refused: ")


@pytest.mark.matrix
def test_hook_static_tests_of_this_tree_find_a_changed_page_alone(
    clone: Clone, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (clone.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone.folder / name)
    monkeypatch.setenv("CYBORG_VENV", sys.prefix)
    page = "doc/source/admin/audit.rst"
    text = (ROOT / page).read_text(encoding="utf-8")
    refused = clone.commit(page, text.replace("   * - ``too_many``\n", "   * - ``too_few``\n"))
    assert refused.returncode == 1
    assert "::test_docs_list_every_kind[too_many]" in refused.stderr
    # All others pass in a tree that is no clone.
    assert re.search(r"^1 failed, \d{3} passed", refused.stderr, re.MULTILINE), refused.stderr
