# SPDX-License-Identifier: Apache-2.0
"""A run of the tests ends and loses no result, whatever happens to its processes."""

import json
import os
import signal
import subprocess
import sys
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine.processes import Daemon, wait_until
from cyborg.tests.fixtures.runs.repetition import load
from cyborg.tests.fixtures.runs.runner import Interruption
from cyborg.tests.fixtures.runs.small_runs import (
    ENVIRONMENT,
    KILLING,
    PASSING,
    PLUGINS,
    Runner,
    prepare,
    run,
)

__all__ = ["run"]

ENDLESS = """
import pytest, sqlite3

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT count(*) FROM c"

@pytest.mark.timeout(1)
def test_does_not_end():
    sqlite3.connect(":memory:").execute(ENDLESS)
"""
REPEATED = ("--times", "2", "--load", "0")
WAITING = "import threading\ndef test_waits(): threading.Event().wait()\n"
FIRST_FAILS = """
from pathlib import Path

def test_fails_once():
    marker = Path(__file__).with_name("marker")
    if not marker.exists():
        marker.touch()
        assert 1 == 2
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
SLOW = """
import pytest, threading

@pytest.mark.timeout(1)
def test_waits():
    threading.Event().wait()
"""
LIMITED = r"""
import pytest
from cyborg.tests.fixtures.machine.processes import wait_until

@pytest.fixture
def slow():
    wait_until("the fixture is ready", lambda: False)

@pytest.mark.timeout(2)
def test_waits():
    wait_until("the test is ready", lambda: False)

@pytest.mark.timeout(2)
def test_has_slow_fixture(slow): pass

@pytest.mark.timeout(0)
def test_has_no_limit():
    with pytest.raises(AssertionError, match=r"timeout after \d+ s: the end; "):
        wait_until("the end", lambda: False, 0.5)
"""
LEAK = """
import pytest

@pytest.fixture(scope="module")
def service():
    yield
    assert False, "a process is left"

def test_uses_service(service): pass
"""


def test_run_killed_worker_fails_its_test_and_runs_the_others(run: Runner) -> None:
    files = {f"test_{number}.py": KILLING for number in range(4)} | {"test_5.py": PASSING}
    ended = run(files)
    assert ended.counts == (5, 4, 0), ended.output
    assert ended.status == 1
    assert "crashed while running 'test_0.py::test_kills'" in ended.output
    assert "has died while no test ran" not in ended.output


@pytest.mark.matrix
@pytest.mark.parametrize("workers", ["2", "0"])
def test_run_waits_end_before_the_limit_of_their_test(run: Runner, workers: str) -> None:
    ended = run({"test_1.py": LIMITED}, "--limit", "100", "--workers", workers)
    assert ended.counts == (1, 2, 0), ended.output
    for what in ("the test", "the fixture"):
        assert f"timeout after 2 s (limit of the test): {what} is ready" in ended.output
    assert "Timeout (>2" not in ended.output


@pytest.mark.matrix
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
    # The stack, which the process prints as it ends: both come in their order also in a pipe.
    message, stack = map(ended.output.index, ("its process is ended", "in test_does_not_end"))
    assert message < stack, ended.output


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
    assert (tmp_path / "counts").read_text() == f"{last.removeprefix('interrupted after ')}\n"


# Ctrl-C while pytest starts, while the results are reported, and while the durations are kept.
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("place", "progress"),
    [("subprocess.Popen", "0 of 0"), ("report", "1 of 1"), ("save_durations", "1 of 1")],
)
def test_run_interrupted_at_its_edges_leaves_no_process(
    tmp_path: Path, place: str, progress: str
) -> None:
    prepare(tmp_path, {"test_a.py": PASSING}, ())
    module, _, name = f"runner.{place}".rpartition(".")
    script = f"""
import os, signal, sys
from cyborg.tests.fixtures.runs import runner
original = {module}.{name}
def interrupted(*words, **values):
    started = original(*words, **values)
    os.kill(os.getpid(), signal.SIGINT)
    return started
{module}.{name} = interrupted
sys.exit(runner.main(sys.argv[1:]))
"""
    words = ("--limit", "100", "--workers", "1", "--counts", "counts", "test_a.py")
    # The output ends with the last process.
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=tmp_path,
        env=os.environ | ENVIRONMENT | {"CYBORG_TEST_DURATIONS": str(tmp_path / "durations")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 130, done.stdout
    assert done.stdout.splitlines()[-1] == f"interrupted after {progress}"
    assert "Traceback" not in done.stdout
    assert (tmp_path / "counts").read_text() == f"{progress}\n"


def test_load_interrupted_while_it_starts_ends_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[SpawnProcess] = []
    start = SpawnProcess.start

    def start_one(process: SpawnProcess) -> None:
        if started:
            raise Interruption
        start(process)
        started.append(process)

    monkeypatch.setattr(SpawnProcess, "start", start_one)
    with pytest.raises(Interruption), load(2):
        pass
    assert [process.exitcode for process in started] == [-signal.SIGKILL]


FIRST = ("--limit", "100", "--first", "static")
STATIC = "import pytest\n@pytest.mark.static\ndef test_reads():"
# The static test is in the file that is collected last.
LATE = {"test_a.py": PASSING, "test_b.py": PASSING + STATIC}


def test_run_first_tests_that_fail_leave_the_others_out(run: Runner) -> None:
    ended = run({**LATE, "test_b.py": f"{LATE['test_b.py']} assert 1 == 2\n"}, *FIRST)
    assert (ended.status, ended.counts) == (1, (0, 1, 0))
    failure, others, *_ = [
        line for line in ended.output.splitlines() if line[:4] in ("FAIL", "The ")
    ]
    assert failure == "FAILED test_b.py::test_reads - assert 1 == 2"
    assert others == "The other tests are not run: correct these errors first."
    assert "no result" not in ended.output


@pytest.mark.matrix
def test_run_first_test_that_fails_is_not_retried_as_the_others_did_not_run(
    run: Runner, tmp_path: Path
) -> None:
    first = FIRST_FAILS.replace("def ", "import pytest\n@pytest.mark.static\ndef ")
    durations = tmp_path / "durations.json"
    durations.write_text('{"test_b.py": 9.0}')
    ended = run({"test_a.py": PASSING, "test_b.py": PASSING + first}, *FIRST, "--retry")
    assert (ended.status, ended.counts) == (1, (0, 1, 0)), ended.output
    assert "it runs once more" not in ended.output
    # The time of this part of the file is not that of the file.
    assert json.loads(durations.read_text()) == {"test_b.py": 9.0}


def test_run_first_tests_that_pass_are_followed_by_the_others(run: Runner) -> None:
    begun = "import pathlib\nBEGUN = pathlib.Path(__file__).with_name('begun')\n"
    other = f"{begun}def test_other(): assert BEGUN.exists()\n"
    files = {"test_a.py": other, "test_b.py": f"{begun}{STATIC} BEGUN.touch()\n"}
    ended = run(files, *FIRST)
    assert (ended.status, ended.counts) == (0, (2, 0, 0)), ended.output


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


@pytest.mark.matrix
def test_run_test_that_fails_twice_is_a_failure(run: Runner) -> None:
    failing = "def test_fails(): assert False\n"
    ended = run({"test_a.py": failing}, "--limit", "100", "--retry")
    assert (ended.status, ended.counts) == (1, (0, 1, 0)), ended.output
    assert "FLAKY" not in ended.output


@pytest.mark.matrix
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
def test_run_test_over_its_limit_says_so(run: Runner) -> None:
    ended = run({"test_a.py": SLOW, "test_b.py": PASSING})
    assert (ended.status, ended.counts) == (1, (1, 1, 0)), ended.output
    assert "FAILED test_a.py::test_waits - Failed: Timeout (>1.0s)" in ended.output


@pytest.mark.matrix
def test_run_module_with_error_fails(run: Runner) -> None:
    ended = run({"test_a.py": "import missing_module\n", "test_b.py": PASSING})
    assert ended.status == 1
    assert "FAILED modules that cannot be collected: test_a.py" in ended.output


@pytest.mark.matrix
def test_repetition_of_a_wrong_name_ends_after_one_run(tmp_path: Path) -> None:
    prepare(tmp_path, {"test_a.py": PASSING}, ())
    (tmp_path / "conftest.py").write_text(
        PLUGINS + "def pytest_addoption(parser): parser.addoption('--tier')\n"
    )
    done = {
        name: subprocess.run(
            [sys.executable, "-m", "cyborg.tests.fixtures.runs.repetition", *REPEATED, name],
            cwd=tmp_path,
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        for name in ("test_a.py::test_wrong", "test_a.py::test_passes")
    }
    wrong, right = done.values()
    assert wrong.returncode == 2, wrong.stdout
    assert (
        "test_a.py::test_wrong: no test was collected: pytest ended with status 4" in wrong.stdout
    )
    assert "run 1 of 2" not in wrong.stdout
    assert right.returncode == 0, right.stdout
    assert "0 failures in 2 runs" in right.stdout


@pytest.mark.matrix
def test_repetition_interrupted_says_how_many_runs_have_ended(tmp_path: Path) -> None:
    prepare(tmp_path, {"test_a.py": PASSING}, ())
    (tmp_path / "conftest.py").write_text(
        PLUGINS + "def pytest_addoption(parser): parser.addoption('--tier')\n"
    )
    module = "cyborg.tests.fixtures.runs.repetition"
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--load", "1", "test_a.py"],
            cwd=tmp_path,
            env={**os.environ, **ENVIRONMENT},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until("a run has ended", lambda: b"run 1 of 30: passed" in output.read_bytes())
        # As a terminal does.
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    text = output.read_text()
    ended = text.count("of 30: passed")
    assert text.splitlines()[-1] == f"interrupted after {ended} of 30 runs"
    assert "Traceback" not in text


def test_wait_until_daemon_that_ends_at_once_fails_with_its_log(tmp_path: Path) -> None:
    script = "import sys; sys.exit('no broker')"
    daemon = Daemon("conductor", [sys.executable, "-c", script], tmp_path, {})
    questions: list[str] = []
    daemon.start()
    try:
        wait_until("the daemon has ended", daemon.has_ended)
        with pytest.raises(AssertionError) as caught:
            wait_until("the service is ready", lambda: questions.append("is it?"))
        assert "conductor has ended, before: the service is ready" in str(caught.value)
        assert "no broker" in str(caught.value)
        assert len(questions) == 1
    finally:
        daemon.stop()
    with pytest.raises(AssertionError, match="timeout"):
        wait_until("nothing", lambda: False, seconds=0.1)
