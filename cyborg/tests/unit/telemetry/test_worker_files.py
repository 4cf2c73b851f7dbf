# SPDX-License-Identifier: Apache-2.0
"""Metrics of several workers: sums, workers that are killed, files that are merged."""

import json
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cyborg.telemetry.recorder import API_SECONDS, BINDS, LOOP_OVERDUE, MetricRecorder
from cyborg.telemetry.server import SIZE, MetricsServer, Samples, WorkerFiles

WORKER = """
import os, signal, sys
from pathlib import Path
from cyborg.telemetry.recorder import BINDS, LOOP_OVERDUE
from cyborg.telemetry.recorder import MetricRecorder
from cyborg.telemetry.server import WorkerFiles
recorder = MetricRecorder()
recorder.open(WorkerFiles(Path(sys.argv[1])))
for _ in range(int(sys.argv[2])):
    recorder.count(BINDS, "bound")
recorder.set(LOOP_OVERDUE, 99.0, "jobs")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / "metrics"


def open_worker(folder: Path) -> tuple[MetricRecorder, WorkerFiles]:
    recorder, files = MetricRecorder(), WorkerFiles(folder)
    recorder.open(files)
    return recorder, files


def end_worker(folder: Path, binds: int) -> None:
    """Count binds in a worker that ends."""
    recorder, files = open_worker(folder)
    recorder.count(BINDS, "bound", amount=binds)
    recorder.observe(API_SECONDS, 0.2, "GET", "/v2/devices")
    recorder.set(LOOP_OVERDUE, 500.0, "jobs")
    recorder.close()
    files.close()


def bound(samples: Samples) -> float:
    return samples[BINDS.name, "bound"][0]


def names(folder: Path) -> list[str]:
    return sorted(path.suffix or path.name for path in folder.iterdir())


def test_workers_are_summed_and_gauges_have_the_greatest_value(folder: Path) -> None:
    workers = [open_worker(folder) for _ in range(3)]
    for number, (recorder, _) in enumerate(workers, 1):
        recorder.count(BINDS, "bound", amount=number)
        recorder.observe(API_SECONDS, 0.2, "GET", "/v2/devices")
        recorder.set(LOOP_OVERDUE, number, "jobs")
    for _, files in workers:
        snapshot = files.read()
        assert bound(snapshot.samples) == 6
        assert snapshot.samples[LOOP_OVERDUE.name, "jobs"] == [3]
        values = snapshot.samples[API_SECONDS.name, "GET", "/v2/devices"]
        assert sum(values[:-1]) == 3
        assert values[-1] == pytest.approx(0.6)
        assert snapshot.pids == (os.getpid(),) * 3
    for _, files in workers:
        files.close()


@pytest.mark.slow
def test_killed_worker_loses_no_count(folder: Path) -> None:
    _, files = open_worker(folder)
    command = [sys.executable, "-c", WORKER, str(folder), "17"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        running = files.read()
        assert bound(running.samples) == 17
        assert sorted(running.pids) == sorted((os.getpid(), worker.pid))
        assert running.samples[LOOP_OVERDUE.name, "jobs"] == [99]
        worker.send_signal(signal.SIGKILL)
    for _ in range(2):
        ended = files.read()
        assert bound(ended.samples) == 17
        assert ended.pids == (os.getpid(),)
        assert (LOOP_OVERDUE.name, "jobs") not in ended.samples
    files.close()


def test_ended_workers_leave_no_files(folder: Path) -> None:
    for _ in range(20):
        end_worker(folder, 2)
    assert names(folder) == [".json", ".keys", ".values", "lock"]
    _, files = open_worker(folder)
    snapshot = files.read()
    assert bound(snapshot.samples) == 40
    assert sum(snapshot.samples[API_SECONDS.name, "GET", "/v2/devices"][:-1]) == 20
    assert names(folder) == [".json", ".keys", ".values", "lock"]
    files.close()


def test_merge_that_is_interrupted_counts_once(folder: Path, tmp_path: Path) -> None:
    end_worker(folder, 5)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    _, files = open_worker(folder)
    # The sums are written, and the files of the worker are not deleted yet.
    for path in copy.glob("*-*"):
        shutil.copy(path, folder)
    for _ in range(2):
        assert bound(files.read().samples) == 5
    assert names(folder) == [".json", ".keys", ".values", "lock"]
    end_worker(folder, 1)
    assert bound(files.read().samples) == 6
    files.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"merged": 1, "samples": []}'])
def test_sums_that_cannot_be_read_start_again(folder: Path, text: str) -> None:
    end_worker(folder, 5)
    _, files = open_worker(folder)
    (folder / "ended.json").write_text(text)
    assert (BINDS.name, "bound") not in files.read().samples
    end_worker(folder, 1)
    assert bound(files.read().samples) == 1
    files.close()


def test_values_of_another_release_are_left_out(folder: Path) -> None:
    recorder, files = open_worker(folder)
    recorder.count(BINDS, "bound")
    samples = [
        [[API_SECONDS.name, "GET", "/"], [1.0, 2.0]],
        [["cyborg_removed_total"], [1.0]],
        [[BINDS.name], [4.0]],
    ]
    document = {"merged": [], "samples": samples}
    (folder / "ended.json").write_text(json.dumps(document))
    assert files.read().samples == {(BINDS.name, "bound"): [1]}
    files.close()


def test_files_are_private_and_allocated(folder: Path) -> None:
    _, files = open_worker(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (values,) = folder.glob("*.values")
    assert values.stat().st_blocks * 512 >= SIZE == values.stat().st_size
    files.close()


def test_directory_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        WorkerFiles(tmp_path / "file" / "metrics")


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Make each write beyond 64 KiB of a file fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, old)


@pytest.mark.usefixtures("full_disk")
def test_full_disk_leaves_neither_files_nor_descriptors(folder: Path) -> None:
    def count_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count_descriptors()
    for _ in range(5):
        with pytest.raises(OSError, match="large"):
            WorkerFiles(folder)
    assert count_descriptors() == before
    assert names(folder) == ["lock"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.with_suffix(".keys").unlink(),
        lambda path: path.with_suffix(".keys").write_bytes(b"\xff\x00{\n"),
        lambda path: path.with_suffix(".keys").write_bytes(b'[["a"], null]\n'),
        lambda path: path.with_suffix(".keys").write_bytes(b"[[7], 1]\n"),
        lambda path: path.with_suffix(".keys").write_bytes(b"7\n"),
        lambda path: path.write_bytes(b"\x00" * 7),
    ],
)
def test_damaged_file_counts_as_empty_and_goes(
    folder: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    end_worker(folder, 5)
    (values,) = folder.glob("*.values")
    damage(values)
    _, files = open_worker(folder)
    for _ in range(2):
        assert (BINDS.name, "bound") not in files.read().samples
    assert names(folder) == [".json", ".keys", ".values", "lock"]
    assert caplog.text.count("are lost") <= 1
    end_worker(folder, 1)
    assert bound(files.read().samples) == 1
    files.close()


def test_key_that_is_cut_off_does_not_damage_the_next(folder: Path) -> None:
    recorder, files = open_worker(folder)
    recorder.count(BINDS, "bound")
    (keys,) = folder.glob("*.keys")
    with keys.open("ab") as file:
        file.write(b'[["cyborg_binds_')
    recorder.count(BINDS, "no_handle")
    samples = files.read().samples
    assert samples == {(BINDS.name, "bound"): [1], (BINDS.name, "no_handle"): [1]}
    files.close()


@pytest.mark.slow
def test_one_worker_serves_and_another_takes_over(folder: Path) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        port = used.getsockname()[1]
    first, second = (MetricsServer("127.0.0.1", port, MetricRecorder(), folder) for _ in range(2))
    assert (first.ensure(), second.ensure()) == (True, False)
    first.stop()
    assert second.ensure()
    second.stop()


def test_port_of_another_program_is_reported(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        server = MetricsServer("127.0.0.1", used.getsockname()[1], MetricRecorder(), folder)
        assert not server.ensure()
        server.stop()
    assert "another program uses port" in caplog.text
