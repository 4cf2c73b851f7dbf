# SPDX-License-Identifier: Apache-2.0
"""The workers of a run: what they share and replace, and each way in which one can end."""

from pathlib import Path

import pytest
from _pytest.tmpdir import get_user

from cyborg.tests.fixtures.runs.small_runs import KILLING, PASSING, Runner, run

__all__ = ["run"]

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
FAILING_FIRST_PROCESS = """
import multiprocessing

def pytest_sessionstart():
    from cyborg.tests.fixtures.runs import workers
    workers.END_SECONDS = 1

def pytest_runtest_logreport(report):
    if report.when == "call" and multiprocessing.parent_process() is None:
        raise ValueError("no room")
"""
FULL_DISK = """
import os

def test_fills_disk(pytestconfig):
    recorder = pytestconfig.pluginmanager.getplugin("cyborg-recorder")
    os.dup2(os.open("/dev/full", os.O_WRONLY), recorder._file)

"""
SESSION_CYCLE = """
import pytest

class File:
    def __init__(self): self.itself = self
    def __del__(self): raise ValueError("left open")

@pytest.fixture(scope="session")
def service():
    yield
    File()
"""
# Registered first, so called last.
GARBAGE = """
import atexit, multiprocessing, os, tempfile
from pathlib import Path

def print_garbage():
    names = [path.name for path in Path(tempfile.gettempdir()).glob("pytest-of-*/garbage-*")]
    process = "worker" if multiprocessing.parent_process() else "first process"
    os.write(2, f"{process}: {names}\\n".encode())

atexit.register(print_garbage)
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
SESSION_LEAK = """
import pytest

@pytest.fixture(scope="session")
def service():
    yield
    assert False, "a process is left"
"""


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
def test_run_error_of_the_first_process_ends_although_a_test_does_not(
    run: Runner, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(FAILING_FIRST_PROCESS)
    plugin = {"PYTEST_PLUGINS": "failing", "PYTHONPATH": str(tmp_path)}
    begun = "import threading\nfrom pathlib import Path\nBEGUN = Path('begun')\n"
    files = {
        "test_a.py": f"{begun}def test_waits():\n    BEGUN.touch()\n    threading.Event().wait()\n",
        "test_b.py": f"{begun}def test_passes():\n    while not BEGUN.exists(): pass\n",
    }
    ended = run(files, "--limit", "30", env=plugin)
    assert ended.status == 1, ended.output
    assert "does not end: it is killed" in ended.output
    assert "took longer than its limit" not in ended.output
    assert "tests have no result: " in ended.output


@pytest.mark.matrix
def test_run_worker_with_full_disk_shows_the_error(run: Runner) -> None:
    ended = run({"test_a.py": FULL_DISK + PASSING})
    assert (ended.status, ended.counts) == (1, (1, 1, 0)), ended.output
    assert "crashed while running 'test_a.py::test_passes' (status 1)" in ended.output
    assert "OSError: [Errno 28] No space left on device" in ended.output


@pytest.mark.matrix
def test_run_leak_of_a_session_fixture_fails(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(SESSION_CYCLE)
    plugin = {"PYTEST_PLUGINS": "service", "PYTHONPATH": str(tmp_path)}
    ended = run({"test_a.py": "def test_uses(service): pass\n"}, env=plugin)
    assert (ended.status, ended.counts) == (1, (1, 1, 0)), ended.output
    assert "error in a destructor: ValueError('left open')" in ended.output


@pytest.mark.matrix
def test_run_workers_do_not_delete_the_folders_of_earlier_runs(run: Runner, tmp_path: Path) -> None:
    folder = tmp_path / f"pytest-of-{get_user() or 'unknown'}"
    folder.mkdir(mode=0o700)
    (folder / "garbage-1").mkdir()
    (tmp_path / "garbage.py").write_text(GARBAGE)
    env = {"PYTEST_PLUGINS": "garbage", "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    ended = run({"test_a.py": PASSING}, env=env)
    assert (ended.status, ended.counts) == (0, (1, 0, 0)), ended.output
    assert "worker: ['garbage-1']" in ended.output
    assert "first process: []" in ended.output


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
def test_run_replaces_large_workers(run: Runner) -> None:
    skipping = "import pytest\ndef test_skips(): pytest.skip('no card')\n"
    files = {f"test_{number}.py": PASSING for number in range(6)} | {"test_7.py": skipping}
    ended = run(files, env={"CYBORG_TEST_WORKER_MB": "1"})
    assert (ended.status, ended.counts) == (0, (6, 0, 1)), ended.output
    assert "replaced, as it was large" in ended.output
    assert "1 skipped because: no card" in ended.output
