# SPDX-License-Identifier: Apache-2.0
"""Test the tests: plant defects in copies of this tree, and run the tests that must find them.

``tools/dev mutants`` runs it. ``tools/mutants/mutants.toml`` lists the defects, and for each the
tests that must find it. ``tools/mutants/NAME.patch`` plants the defect NAME. The tree of the
checkout is never changed.
"""

import argparse
import contextlib
import importlib.util
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = Path("tools/mutants/mutants.toml")
JOBS = 2
RUN_TIMEOUT = 300.0  # seconds for the tests of one defect
STOP_TIMEOUT = 30.0  # seconds in which pytest drops the databases of an interrupted test
OMITTED = (
    *(".git", ".venv", ".dev", ".eggs", ".tox", ".quickstart", ".uwsgi", ".hypothesis", ".*_cache"),
    *("__pycache__", "*.egg-info", "build", "dist", "node_modules"),
)
# Numbers of lines before and after, one if not given.
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
# Tiers of the tests: of those that are named as a whole, and of named cases.
TIERS = DEFAULT, NAMED_CASES = ("default", "all")
# Exit statuses of pytest:
PASSED, FAILED, NO_TESTS = 0, 1, 5


class PatchError(Exception):
    """A patch does not apply to the tree."""


class Interrupted(Exception):
    """The run of the tests was stopped."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted defect; ``tests`` are the node ids of the tests that must find it.

    Each must fail; of a test that is named without its parameters, one case.
    """

    name: str
    defect: str
    tests: tuple[str, ...]
    patch: Path


@dataclass(frozen=True, slots=True)
class Hunk:
    """A piece of a file before and after the patch."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run of tests: the failed tests, or an error; neither if all tests passed.

    ``missed`` are the tests of a mutant that must fail, and have not.
    """

    seconds: float
    failed: tuple[str, ...] = ()
    error: str | None = None
    missed: tuple[str, ...] = ()

    @property
    def is_found(self) -> bool:
        """Return whether all tests that must find the defect have failed."""
        return bool(self.failed) and not self.missed


def load_mutants(root: Path = ROOT) -> list[Mutant]:
    """Return the planted defects in the order of the list."""
    entries = tomllib.loads((root / LIST).read_text(encoding="utf-8"))["mutant"]
    folder = root / LIST.parent
    return [
        Mutant(
            name=entry["name"],
            defect=entry["defect"],
            tests=tuple(entry["tests"]),
            patch=folder / f"{entry['name']}.patch",
        )
        for entry in entries
    ]


def parse_patch(text: str) -> list[Hunk]:
    """Return the hunks of a unified diff. Raise PatchError."""
    hunks: list[Hunk] = []
    path, old, new = "", "", ""
    left_old = left_new = 0  # lines of the hunk that follow: a removed line may look like a header
    for line in text.splitlines(keepends=True):
        # Editors and git remove the blank of an empty line of context.
        kind, content = (" ", line) if line == "\n" else (line[0], line[1:])
        if left_old > 0 or left_new > 0:
            if kind in " -":
                old += content
                left_old -= 1
            if kind in " +":
                new += content
                left_new -= 1
            if left_old <= 0 and left_new <= 0:
                hunks.append(Hunk(path, old, new))
        elif line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/").strip()
        elif header := _HUNK.match(line):
            left_old, left_new = (int(count or 1) for count in header.groups())
            old = new = ""
        elif hunks and line.startswith((" ", "+", "-")) and not line.startswith(("--- ", "+++ ")):
            raise PatchError(f"a hunk of {path} has more lines than its header says")
    if left_old > 0 or left_new > 0:
        raise PatchError(f"a hunk of {path} has fewer lines than its header says")
    return hunks


def mutate(root: Path, patch: str) -> dict[str, str]:
    """Return the new texts of the files that a patch changes, by path. Raise PatchError.

    Line numbers are ignored: the old lines of a hunk must be in the file exactly once. So a patch
    still applies after a change of other lines, and not in a wrong place.
    """
    texts: dict[str, str] = {}
    hunks = parse_patch(patch)
    if not hunks:
        raise PatchError("the patch is empty")
    for hunk in hunks:
        path = root / hunk.path
        if hunk.path not in texts and not path.is_file():
            raise PatchError(f"{hunk.path} does not exist")
        text = texts.get(hunk.path) or path.read_text(encoding="utf-8")
        if (count := text.count(hunk.old)) != 1:
            raise PatchError(f"{hunk.path} has {count} times, instead of once:\n{hunk.old}")
        texts[hunk.path] = text.replace(hunk.old, hunk.new)
    return texts


def judge_run(status: int, output: str, seconds: float) -> Outcome:
    """Return the outcome of a run of pytest.

    A test that was not run shows nothing: an error of a fixture, of an import or of the collection
    is an error, and so is a run without a result.
    """
    lines = output.splitlines()
    # Not the log of a test, which has lines with ERROR too.
    summary = output.rpartition(" short test summary info ")[2].splitlines()
    failed = [line.removeprefix("FAILED ") for line in summary if line.startswith("FAILED ")]
    errors = [line for line in summary if line.startswith("ERROR ")]
    if status == FAILED and failed and not errors:
        return Outcome(seconds, failed=tuple(line.split(" - ")[0] for line in failed))
    if status == PASSED and re.search(r"\b[1-9]\d* passed\b", lines[-1] if lines else ""):
        return Outcome(seconds)
    reason = "no test of the tier was run" if status in (PASSED, NO_TESTS) else ""
    tail = "\n".join(lines[-15:])
    return Outcome(seconds, error=f"{reason or f'pytest ended with {status}'}\n{tail}".strip())


def find_missed(tests: Iterable[str], failed: Sequence[str]) -> tuple[str, ...]:
    """Return the tests of which no case has failed; a test with parameters is that case."""
    return tuple(
        test
        for test in tests
        if not any(name == test or name.startswith(f"{test}[") for name in failed)
    )


class Tree:
    """A copy of the tree, in which tests run with the environment of this interpreter."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "tree"
        self._temporary = folder / "tmp"
        self._temporary.mkdir(parents=True)
        shutil.copytree(root, self.root, symlinks=True, ignore=_omit)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of the process, which another thread stops
        self._stopped = False

    def stop(self) -> None:
        """Interrupt the tests: pytest then drops its databases."""
        with self._lock:
            self._stopped = True
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)

    def run_mutant(self, mutant: Mutant) -> Outcome:
        """Plant a defect, run its tests, and restore the tree."""
        try:
            changed = mutate(self.root, mutant.patch.read_text(encoding="utf-8"))
        except (OSError, PatchError) as exc:
            return Outcome(0.0, error=str(exc))
        original = {path: (self.root / path).read_text(encoding="utf-8") for path in changed}
        self._write(changed)
        try:
            # Each of several tests must fail: the first failure is not enough.
            outcome = self.run_tests(mutant.tests, all_failures=len(mutant.tests) > 1)
        finally:
            self._write(original)
        if not outcome.failed:
            return outcome
        return replace(outcome, missed=find_missed(mutant.tests, outcome.failed))

    def run_tests(self, tests: Sequence[str], *, all_failures: bool = False) -> Outcome:
        """Run tests of one tier, until the first failure or to the end. Raise Interrupted."""
        (tier,) = {_tier_of(test) for test in tests}
        options = ("--tier", tier, "-q", "-rfE", "--tb=short", "--color=no")
        stop = () if all_failures else ("-x",)
        command = [sys.executable, "-m", "pytest", *options, *stop]
        command += ["-p", "no:cacheprovider", *tests]
        begin = time.monotonic()
        with tempfile.TemporaryFile("w+", encoding="utf-8", dir=self._temporary) as output:
            with self._lock:
                if self._stopped:
                    raise Interrupted
                self._process = process = subprocess.Popen(
                    command,
                    cwd=self.root,
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is not for it: ``stop`` interrupts it once
                )
            is_late = not _wait(process, RUN_TIMEOUT)
            if self._stopped:
                raise Interrupted
            if is_late:
                return Outcome(RUN_TIMEOUT, error=f"no result in {RUN_TIMEOUT:.0f} s")
            output.seek(0)
            return judge_run(process.returncode, output.read(), time.monotonic() - begin)

    def check_import(self) -> str | None:
        """Return an error unless programs with the environment of the tests import this copy."""
        command = [sys.executable, "-c", "import cyborg; print(cyborg.__file__)"]
        done = subprocess.run(
            command, env=self._environment(), cwd="/", capture_output=True, text=True, check=False
        )
        if done.stdout.strip() == str(self.root / "cyborg" / "__init__.py"):
            return None
        return f"the copy is not imported, but {done.stdout.strip() or done.stderr.strip()}"

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(self.root), os.environ.get("PYTHONPATH"))))
        # A case that is skipped would be shown as one that does not find the defect.
        required = {"CYBORG_TEST_REQUIRE_SERVICES": "1"}
        return os.environ | required | {"PYTHONPATH": path, "TMPDIR": str(self._temporary)}

    def _write(self, texts: dict[str, str]) -> None:
        for name, text in texts.items():
            path = self.root / name
            path.write_text(text, encoding="utf-8")
            # Bytecode is valid for a source of the same size and second.
            Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def _omit(folder: str, names: list[str]) -> set[str]:
    """Return the names of a folder that are not copied: caches, and the environment."""
    environment = {name for name in names if Path(folder, name) == Path(sys.prefix)}
    return environment | shutil.ignore_patterns(*OMITTED)(folder, names)


def _wait(process: subprocess.Popen[bytes], timeout: float) -> bool:
    """Wait for pytest, interrupt it after ``timeout`` seconds; return whether it ended by itself.

    Kill what it has left in its process group.
    """
    ended = True
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        ended = False
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return ended


class Runner:
    """Runs the tests of mutants, in several copies of the tree at the same time."""

    def __init__(self, root: Path, folder: Path, workers: int) -> None:
        self._trees = [Tree(root, folder / str(number)) for number in range(workers)]
        self._free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for tree in self._trees:
            self._free.put(tree)
        self._executor = ThreadPoolExecutor(workers)
        self.count = 0
        """Number of mutants with an outcome."""

    def check_unpatched(self, mutants: Sequence[Mutant]) -> str | None:
        """Return an error unless all tests pass without a defect. Raise Interrupted."""
        if error := self._trees[0].check_import():
            return error
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        groups = [
            group
            for tier in TIERS
            for group in self._group([test for test in tests if _tier_of(test) == tier])
        ]
        runs = [self._submit(partial(Tree.run_tests, tests=group)) for group in groups]
        for run in as_completed(runs):
            outcome = run.result()
            if error := ", ".join(outcome.failed) or outcome.error:
                return f"the tests fail without a defect: {error}"
        return None

    def _group(self, tests: Sequence[str]) -> list[list[str]]:
        """Return the tests in one group for each tree: those of a file share fixtures."""
        files = sorted({_file_of(test) for test in tests})
        count = min(len(self._trees), len(files))
        return [
            [test for test in tests if _file_of(test) in files[number::count]]
            for number in range(count)
        ]

    def run(self, mutants: Sequence[Mutant]) -> dict[str, Outcome]:
        """Run the tests of each mutant, print its outcome; return the outcomes by name.

        Raise Interrupted.
        """
        runs = {self._submit(partial(Tree.run_mutant, mutant=mutant)): mutant for mutant in mutants}
        outcomes: dict[str, Outcome] = {}
        for run in as_completed(runs):
            outcome = outcomes[runs[run].name] = run.result()
            self.count += 1
            print(f"{runs[run].name} ... {describe(outcome)}", flush=True)
        return outcomes

    def stop(self) -> None:
        """Interrupt all runs, and wait for their end."""
        for tree in self._trees:
            tree.stop()
        self._executor.shutdown(cancel_futures=True)

    def _submit(self, work: Callable[[Tree], Outcome]) -> Future[Outcome]:
        return self._executor.submit(self._run_in_tree, work)

    def _run_in_tree(self, work: Callable[[Tree], Outcome]) -> Outcome:
        tree = self._free.get()
        try:
            return work(tree)
        finally:
            self._free.put(tree)


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _tier_of(test: str) -> str:
    # The default tier would deselect a named case, such as that of PostgreSQL. Of the other tests,
    # the cases of the default tier are enough.
    return NAMED_CASES if "[" in test else DEFAULT


def describe(outcome: Outcome) -> str:
    """Return the text of an outcome of a mutant."""
    if outcome.error is not None:
        return f"ERROR: {outcome.error}"
    if not outcome.is_found:
        survived = f"SURVIVED {', '.join(outcome.missed)}".rstrip()
        return f"{survived} ({outcome.seconds:.0f} s)"
    return f"found by {', '.join(outcome.failed)} ({outcome.seconds:.0f} s)"


def run_mutants(mutants: Sequence[Mutant], workers: int) -> int:
    """Run the tests of the mutants, print the results, and return the exit status."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        runner = Runner(ROOT, Path(folder), workers)
        try:
            if error := runner.check_unpatched(mutants):
                print(error, file=sys.stderr)
                return 1
            print(f"unpatched ... passed ({time.monotonic() - begin:.0f} s)", flush=True)
            outcomes = runner.run(mutants)
        except (KeyboardInterrupt, Interrupted):
            print(f"interrupted after {runner.count} of {len(mutants)}", file=sys.stderr)
            return 130
        finally:
            runner.stop()
    found = sum(outcome.is_found for outcome in outcomes.values())
    print(f"{found} of {len(mutants)} found, {time.monotonic() - begin:.0f} s")
    return int(found != len(mutants))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="tools/dev mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a defect; by default all")
    parser.add_argument("--list", action="store_true", help="list the defects and run no test")
    parser.add_argument(
        "--jobs", type=int, default=JOBS, help="runs at the same time (%(default)s)"
    )
    options = parser.parse_args(arguments)
    mutants = load_mutants()
    if unknown := set(options.names) - {mutant.name for mutant in mutants}:
        parser.error(f"unknown defects {', '.join(sorted(unknown))}; see --list")
    if options.names:
        mutants = [mutant for mutant in mutants if mutant.name in options.names]
    if options.list:
        print(*(f"{mutant.name}: {mutant.defect}" for mutant in mutants), sep="\n")
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    return run_mutants(mutants, max(1, min(options.jobs, len(mutants))))


if __name__ == "__main__":
    sys.exit(main())
