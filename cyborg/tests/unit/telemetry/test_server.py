# SPDX-License-Identifier: Apache-2.0
"""The server of the metrics of several workers: one serves them, another one takes over."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from cyborg.telemetry.recorder import BINDS, MetricRecorder
from cyborg.telemetry.server import MetricsServer
from cyborg.tests.fixtures.machine.log_lines import warnings_of
from cyborg.tests.fixtures.machine.processes import free_port

pytestmark = pytest.mark.slow


class Worker:
    """A worker with its recorder."""

    def __init__(self, port: int, folder: Path) -> None:
        self.recorder = MetricRecorder()
        self.server = MetricsServer("127.0.0.1", port, self.recorder, folder)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Worker]]:
    port = free_port()
    found = [Worker(port, tmp_path / "metrics") for _ in range(2)]
    yield found
    for worker in found:
        worker.server.stop()


def scrape(port: int) -> dict[tuple[str, ...], float]:
    answer = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=10)
    assert answer.status_code == 200
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_one_worker_serves_all_until_another_takes_over(workers: list[Worker]) -> None:
    first, second = workers
    assert [worker.server.ensure() for worker in workers] == [True, False]
    for worker in workers:
        worker.recorder.count(BINDS, "bound")
    port = first.server.port
    assert port is not None
    samples = scrape(port)
    assert samples["cyborg_binds_total", "bound"] == 2
    # The processes exist, and their metrics are plausible.
    pid = str(os.getpid())
    assert 0 < samples["process_resident_memory_bytes", pid] < 2**40
    assert samples["process_start_time_seconds", pid] > 1e9
    assert samples["process_open_fds", pid] > 3
    first.server.stop()
    first.recorder.count(BINDS, "bound")
    assert second.server.ensure()
    assert scrape(port)["cyborg_binds_total", "bound"] == 2


def test_directory_that_cannot_be_used_is_logged_with_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    worker = Worker(free_port(), tmp_path / "file" / "metrics")
    for _ in range(2):
        assert not worker.server.ensure()
        worker.recorder.count(BINDS, "bound")
    (line,) = caplog.messages
    assert line.startswith("Cannot serve metrics: ")
    assert str(tmp_path / "file") in line
    worker.server.stop()


def test_scrape_without_the_directory_is_logged(
    workers: list[Worker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = workers
    assert first.server.ensure()
    first.recorder.count(BINDS, "bound")
    (tmp_path / "metrics").rename(tmp_path / "other")
    port = first.server.port
    assert port is not None
    assert scrape(port) == {}
    (tmp_path / "other").rename(tmp_path / "metrics")
    assert scrape(port)["cyborg_binds_total", "bound"] == 1
    (line,) = [r.getMessage() for r in warnings_of(caplog.records)]
    assert line.startswith("Cannot read the metrics of the workers: ")
