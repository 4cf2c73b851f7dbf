# SPDX-License-Identifier: Apache-2.0
"""A run of the tests ends and loses no result, whatever happens to its processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine.processes import Daemon, wait_until

PLUGINS = """
modules = ("record", "scheduler", "workers")
pytest_plugins = [f"cyborg.tests.fixtures.runs.{module}" for module in modules]
"""
PASSING = "def test_passes(): pass\n"
KILLING = "import os\ndef test_kills(): os.kill(os.getpid(), 9)\n" + PASSING
ENDLESS = """
import pytest, sqlite3

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT count(*) FROM c"

@pytest.mark.timeout(1)
def test_does_not_end():
    sqlite3.connect(":memory:").execute(ENDLESS)
"""
WAITING = "import threading\ndef test_waits(): threading.Event().wait()\n"
FIRST_FAILS = """
from pathlib import Path

def test_fails_once():
    marker = Path(__file__).with_name("marker")
    if not marker.exists():
        marker.touch()
        assert 1 == 2
"""

# The child has the same connection; the first process has begun to receive when the worker dies.
KILLED_IN_MESSAGE = """
import os, signal, struct, threading

def test_is_killed(pytestconfig):
    if os.fork() == 0:
        threading.Event().wait()
    sender = pytestconfig.pluginmanager.getplugin("cyborg-report-sender")
    os.write(sender._connection.fileno(), struct.pack("!i", 1_000_000) + b"begin")
    threading.Event().wait(1)
    os.kill(os.getpid(), signal.SIGKILL)
"""
RETURNING_CHILD = """
import os
import pytest

@pytest.fixture
def service(pytestconfig):
    yield
    with pytestconfig.rootpath.joinpath("ends").open("a") as file:
        file.write("ended\\n")

def test_forks(service):
    os.fork()

def test_waits_for_child():
    os.wait()
"""
# Also waits, so that only the runner can end it.
UNREADABLE = """
import os, threading

def test_waits(pytestconfig):
    path = pytestconfig.getoption("--record")
    os.unlink(path)
    os.mkdir(path)
    threading.Event().wait()
"""
KILLED_ONCE = """
import os
from pathlib import Path

def test_is_killed_once():
    marker = Path(__file__).with_name("marker")
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), 9)
"""
UNCLOSED = """
import sqlite3

def test_leaves_connection():
    cycle = [sqlite3.connect(":memory:")]
    cycle.append(cycle)
"""
LEAK_AND_FAILURE = """
from pathlib import Path

def test_fails_once(service):
    marker = Path(__file__).with_name("marker")
    if not marker.exists():
        marker.touch()
        assert 1 == 2
"""

# Other plug-ins take a second in each process.
ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CYBORG_TEST_WORKER_MB": "1000"}

# Ends a worker after its last test, as the kernel does without memory.
DYING = """
import multiprocessing, os

def pytest_sessionfinish(session):
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), 9)
"""
# Ends each worker before its first test.
DYING_AT_START = "import os\nos.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), 9))\n"
SERVICE = """
import pytest

@pytest.fixture(scope="session")
def service(pytestconfig):
    with pytestconfig.rootpath.joinpath("starts").open("a") as file:
        file.write("started\\n")
"""
SLOW = """
import pytest, threading

@pytest.mark.timeout(1)
def test_waits():
    threading.Event().wait()
"""
SESSION_LEAK = """
import pytest

@pytest.fixture(scope="session")
def service():
    yield
    assert False, "a process is left"
"""
LEAK = """
import pytest

@pytest.fixture(scope="module")
def service():
    yield
    assert False, "a process is left"

def test_uses_service(service): pass
"""

Runner = Callable[..., "Ended"]


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a run: exit status, output, and the numbers passed, failed and skipped."""

    status: int
    output: str
    counts: tuple[int, ...]


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    """Return a function that runs test files, given as name and text, with two workers."""

    def call(
        files: Mapping[str, str], *options: str, env: Mapping[str, str] | None = None
    ) -> Ended:
        command = prepare(tmp_path, files, options)
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={
                **os.environ,
                **ENVIRONMENT,
                "CYBORG_TEST_DURATIONS": str(tmp_path / "durations.json"),
                **(env or {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
        return Ended(done.returncode, done.stdout, read_counts(tmp_path))

    return call


def prepare(folder: Path, files: Mapping[str, str], options: Sequence[str]) -> list[str]:
    """Write test files; return the command of the runner."""
    (folder / "conftest.py").write_text(PLUGINS)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p timeout\nfilterwarnings = error\n")
    for name, text in files.items():
        (folder / name).write_text(text)
    return [
        *(sys.executable, "-m", "cyborg.tests.fixtures.runs.runner", "--workers", "2"),
        *("--counts", "counts", *(options or ("--limit", "100")), *files),
    ]


def read_counts(folder: Path) -> tuple[int, ...]:
    """Return the numbers that the runner wrote."""
    path = folder / "counts"
    return tuple(map(int, path.read_text().split())) if path.exists() else ()


def test_run_killed_worker_fails_its_test_and_runs_the_others(run: Runner) -> None:
    files = {f"test_{number}.py": KILLING for number in range(4)} | {"test_5.py": PASSING}
    ended = run(files)
    assert ended.counts == (5, 4, 0), ended.output
    assert ended.status == 1
    assert "crashed while running 'test_0.py::test_kills'" in ended.output
    assert "has died while no test ran" not in ended.output


@pytest.mark.long
def test_run_killed_worker_is_no_flaky_test(run: Runner) -> None:
    ended = run({"test_a.py": KILLED_ONCE, "test_b.py": PASSING}, "--limit", "100", "--retry")
    assert (ended.status, ended.counts) == (1, (1, 1, 0)), ended.output
    assert "it runs once more" not in ended.output


@pytest.mark.matrix
def test_run_open_connection_that_only_the_collector_finds_fails(run: Runner) -> None:
    plugin = {"PYTEST_PLUGINS": "cyborg.tests.fixtures.databases.unclosed"}
    ended = run({"test_a.py": UNCLOSED, "test_b.py": PASSING}, env=plugin)
    assert ended.status == 1, ended.output
    assert "opened in test_a.py::test_leaves_connection (call) was not closed" in ended.output


@pytest.mark.matrix
def test_run_endless_test_in_native_code_ends_with_its_process(run: Runner) -> None:
    files = {"test_a.py": ENDLESS, "test_b.py": PASSING}
    ended = run(files, "--limit", "100", "--grace", "2")
    assert ended.counts == (1, 1, 0), ended.output
    assert "test_a.py::test_does_not_end did not end in 1 s: its process is ended" in ended.output
    assert "in test_does_not_end" in ended.output  # the stack


@pytest.mark.matrix
def test_run_over_its_limit_fails_and_names_the_tests_that_ran(run: Runner) -> None:
    files = {"test_a.py": WAITING, "test_b.py": PASSING}
    ended = run(files, "--limit", "30", "--grace", "5")
    assert ended.status == 1
    assert ended.counts == (1, 1, 0), ended.output
    problem = "FAILED the run took longer than its limit of 30 s; tests that ran then: "
    assert f"{problem}test_a.py::test_waits" in ended.output


@pytest.mark.matrix
def test_run_without_controller_fails_with_the_tests_without_result(run: Runner) -> None:
    killing = "import os\ndef test_kills_parent(): os.kill(os.getppid(), 9)\n"
    ended = run({"test_a.py": killing + PASSING})
    assert ended.status == 1
    assert ended.counts[1] >= 1, ended.output
    assert "collected tests have no result: " in ended.output
    assert "test_a.py::test_passes" in ended.output


@pytest.mark.matrix
def test_run_interrupted_prints_progress_and_exits_130(tmp_path: Path) -> None:
    files = {"test_a.py": WAITING, "test_b.py": PASSING + "def test_passes_too(): pass\n"}
    command = prepare(tmp_path, files, ())
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, **ENVIRONMENT},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until("two tests have passed", lambda: b".." in output.read_bytes())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    last = output.read_text().splitlines()[-1]
    assert last in ("interrupted after 1 of 3", "interrupted after 2 of 3")


@pytest.mark.matrix
def test_run_whose_record_cannot_be_read_leaves_no_process(run: Runner) -> None:
    # The output ends with the last process.
    ended = run({"test_a.py": UNREADABLE}, "--limit", "100", "--grace", "5")
    assert (ended.status, ended.counts) == (1, ()), ended.output
    assert "IsADirectoryError" in ended.output


@pytest.mark.matrix
def test_run_result_does_not_depend_on_the_file_of_the_durations(
    run: Runner, tmp_path: Path
) -> None:
    (tmp_path / "durations.json").mkdir()
    ended = run({"test_a.py": PASSING})
    assert (ended.status, ended.counts) == (0, (1, 0, 0)), ended.output
    assert "the durations of the tests are not kept: " in ended.output


@pytest.mark.matrix
def test_run_flaky_test_passes_and_keeps_its_first_output(run: Runner, tmp_path: Path) -> None:
    files = {"test_a.py": FIRST_FAILS, "test_b.py": PASSING}
    ended = run(files, "--limit", "100", "--retry", "--flaky", "flaky")
    assert (ended.status, ended.counts) == (0, (2, 0, 0)), ended.output
    assert "FLAKY test_a.py::test_fails_once" in ended.output.splitlines()
    assert "assert 1 == 2" in (tmp_path / "flaky").read_text()


@pytest.mark.matrix
def test_run_flaky_test_whose_output_cannot_be_kept_stays_failed(run: Runner) -> None:
    files = {"test_a.py": FIRST_FAILS, "test_b.py": PASSING}
    ended = run(files, "--limit", "100", "--retry", "--flaky", "/dev/full")
    assert (ended.status, ended.counts) == (1, (1, 1, 0)), ended.output
    reason = "its first output cannot be kept: [Errno 28] No space left on device"
    assert f"test_a.py::test_fails_once stays failed: {reason}" in ended.output


@pytest.mark.long
def test_run_test_that_fails_twice_is_a_failure(run: Runner) -> None:
    failing = "def test_fails(): assert False\n"
    ended = run({"test_a.py": failing}, "--limit", "100", "--retry")
    assert (ended.status, ended.counts) == (1, (0, 1, 0)), ended.output
    assert "FLAKY" not in ended.output


@pytest.mark.long
def test_run_more_than_three_failures_are_not_retried(run: Runner) -> None:
    files = {f"test_{number}.py": "def test_fails(): assert False\n" for number in range(4)}
    ended = run(files, "--limit", "100", "--retry")
    assert (ended.status, ended.counts) == (1, (0, 4, 0)), ended.output
    assert "it runs once more" not in ended.output


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("text", "counts"), [(LEAK, (0, 1, 0)), (LEAK + LEAK_AND_FAILURE, (1, 1, 0))]
)
def test_run_failure_of_a_shared_fixture_is_not_retried(
    run: Runner, text: str, counts: tuple[int, ...]
) -> None:
    ended = run({"test_a.py": text}, "--limit", "100", "--retry")
    assert (ended.status, ended.counts) == (1, counts), ended.output
    assert "it runs once more" not in ended.output
    assert "a process is left" in ended.output


@pytest.mark.matrix
def test_run_worker_that_dies_after_its_tests_fails(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    files = {"test_a.py": PASSING, "test_b.py": PASSING}
    ended = run(files, env={"PYTEST_PLUGINS": "dying", "PYTHONPATH": str(tmp_path)})
    assert ended.status == 1, ended.output
    assert "FAILED worker gw0 has died while no test ran: " in ended.output


@pytest.mark.matrix
def test_run_workers_that_die_at_their_start_end_the_run(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING_AT_START)
    plugin = {"PYTEST_PLUGINS": "dying", "PYTHONPATH": str(tmp_path)}
    ended = run({"test_a.py": PASSING, "test_b.py": PASSING}, env=plugin)
    assert (ended.status, ended.counts) == (1, (0, 2, 0)), ended.output
    assert "10 workers have died" in ended.output
    assert "2 of 2 collected tests have no result" in ended.output


@pytest.mark.matrix
def test_run_shares_a_session_fixture_between_the_files_of_a_worker(
    run: Runner, tmp_path: Path
) -> None:
    (tmp_path / "service.py").write_text(SERVICE)
    files = {f"test_{number}.py": "def test_uses(service): pass\n" for number in range(8)}
    ended = run(files, env={"PYTEST_PLUGINS": "service", "PYTHONPATH": str(tmp_path)})
    assert (ended.status, ended.counts) == (0, (8, 0, 0)), ended.output
    assert 1 <= len((tmp_path / "starts").read_text().splitlines()) <= 2


@pytest.mark.matrix
def test_run_test_over_its_limit_says_so(run: Runner) -> None:
    ended = run({"test_a.py": SLOW, "test_b.py": PASSING})
    assert (ended.status, ended.counts) == (1, (1, 1, 0)), ended.output
    assert "FAILED test_a.py::test_waits - Failed: Timeout (>1.0s)" in ended.output


@pytest.mark.matrix
def test_run_error_of_a_session_fixture_at_the_end_fails(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(SESSION_LEAK)
    plugin = {"PYTEST_PLUGINS": "service", "PYTHONPATH": str(tmp_path)}
    ended = run({"test_a.py": "def test_uses(service): pass\n"}, env=plugin)
    assert (ended.status, ended.counts) == (1, (1, 1, 0)), ended.output
    assert "a process is left" in ended.output


@pytest.mark.matrix
def test_run_divides_large_files_for_workers(run: Runner) -> None:
    # The first test ends when another group has begun, which only another worker can do. It has a
    # pid too: the other worker may run all the rest.
    waiting = (
        "import os, time\nfrom pathlib import Path\nBEGUN = Path('begun')\n"
        "def test_waits(record_property):\n    while not BEGUN.exists(): time.sleep(0.01)\n"
        "    record_property('summary', f'pid {os.getpid()}')\n"
    )
    pids = "".join(
        f"def test_{number}(record_property):\n    {'BEGUN.touch()' if number > 9 else 'pass'}\n"
        "    record_property('summary', f'pid {os.getpid()}')\n"
        for number in range(40)
    )
    files = {"test_a.py": waiting + pids}
    ended = run(files, "--limit", "100", "--max-group", "5")
    assert (ended.status, ended.counts) == (0, (41, 0, 0)), ended.output
    assert len({line for line in ended.output.splitlines() if line.startswith("pid ")}) == 2


@pytest.mark.matrix
def test_run_new_worker_starts_with_a_file_that_has_one_test(run: Runner) -> None:
    # Both workers die; of each file, one test is left.
    ended = run({"test_a.py": KILLING, "test_b.py": KILLING}, "--limit", "60")
    assert (ended.status, ended.counts) == (1, (2, 2, 0)), ended.output


@pytest.mark.matrix
def test_run_worker_killed_within_a_message_ends_though_its_child_lives(run: Runner) -> None:
    ended = run({"test_a.py": KILLED_IN_MESSAGE, "test_b.py": PASSING}, "--limit", "60")
    assert (ended.status, ended.counts) == (1, (1, 1, 0)), ended.output
    assert "crashed while running 'test_a.py::test_is_killed' (status -9)" in ended.output


@pytest.mark.matrix
def test_run_child_that_returns_from_a_test_has_no_results(run: Runner, tmp_path: Path) -> None:
    ended = run({"test_a.py": RETURNING_CHILD}, "--limit", "60")
    assert (ended.status, ended.counts) == (0, (2, 0, 0)), ended.output
    assert len((tmp_path / "ends").read_text().splitlines()) == 1


@pytest.mark.matrix
def test_run_module_with_error_fails(run: Runner) -> None:
    ended = run({"test_a.py": "import missing_module\n", "test_b.py": PASSING})
    assert ended.status == 1
    assert "FAILED modules that cannot be collected: test_a.py" in ended.output


@pytest.mark.matrix
def test_run_replaces_large_workers(run: Runner) -> None:
    skipping = "import pytest\ndef test_skips(): pytest.skip('no card')\n"
    files = {f"test_{number}.py": PASSING for number in range(6)} | {"test_7.py": skipping}
    ended = run(files, env={"CYBORG_TEST_WORKER_MB": "1"})
    assert (ended.status, ended.counts) == (0, (6, 0, 1)), ended.output
    assert "replaced, as it was large" in ended.output
    assert "1 skipped because: no card" in ended.output


def test_wait_until_daemon_that_ends_at_once_fails_with_its_log(tmp_path: Path) -> None:
    script = "import sys; sys.exit('no broker')"
    daemon = Daemon("conductor", [sys.executable, "-c", script], tmp_path, {})
    daemon.start()
    begin = time.monotonic()
    try:
        with pytest.raises(AssertionError) as caught:
            wait_until("the service is ready", lambda: False)
        assert "conductor has ended, before: the service is ready" in str(caught.value)
        assert "no broker" in str(caught.value)
        assert time.monotonic() < begin + 60
    finally:
        daemon.stop()
    with pytest.raises(AssertionError, match="timeout"):
        wait_until("nothing", lambda: False, seconds=0.1)
