# SPDX-License-Identifier: Apache-2.0
"""Metrics of the API under the WSGI servers of the install guide, with two workers."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from cyborg.tests.fixtures.clouds.web_servers import Server, gunicorn, serving, uwsgi
from cyborg.tests.fixtures.machine.processes import free_port, wait_until

Samples = dict[tuple[str, ...], float]
DEVICES = "/v2/devices"
REQUESTS = 200


def scrape(port: int) -> Samples:
    answer = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=10)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def send(server: Server, count: int) -> None:
    """Send requests on connections of their own, so that all workers get some."""

    def get(number: int) -> int:
        url = f"{server.url}{DEVICES}/{number}" if number % 10 == 0 else f"{server.url}{DEVICES}"
        return requests.get(url, timeout=60).status_code

    with ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(get, range(count)))
    assert (statuses.count(200), statuses.count(404)) == (count * 9 // 10, count // 10)


def workers_of(samples: Samples) -> list[int]:
    return sorted(int(key[1]) for key in samples if key[0] == "process_cpu_seconds_total")


@pytest.mark.matrix
@pytest.mark.parametrize("make", [gunicorn, uwsgi], ids=lambda make: make.__name__)
def test_each_scrape_has_the_requests_of_all_workers(
    make: Callable[[Path, Path], list[str]], tmp_path: Path
) -> None:
    port = free_port()
    folder = tmp_path / "metrics"
    options = {"workers": 2, "metrics_port": port, "metrics_directory": folder}
    with serving(make, tmp_path, options) as server:

        def both_record() -> bool:
            send(server, 20)
            return len(list(folder.glob("*.values"))) == 2

        wait_until("both workers record", both_record)
        before = scrape(port)
        send(server, REQUESTS)
        after = scrape(port)
        found = ("cyborg_api_requests_total", "GET", DEVICES, "200")
        missing = ("cyborg_api_requests_total", "GET", f"{DEVICES}/{{uuid}}", "404")
        seconds = ("cyborg_api_request_seconds_count", "GET", DEVICES)
        assert after[found] - before[found] == REQUESTS * 9 // 10
        assert after[missing] - before[missing] == REQUESTS // 10
        assert after[seconds] - before[seconds] == REQUESTS * 9 // 10
        workers = workers_of(after)
        assert len(workers) == 2
        # Neither the requests of a killed worker are lost, nor the port, if that worker served it.
        os.kill(workers[0], signal.SIGKILL)

        def replaced() -> bool:
            send(server, 20)
            try:
                now = workers_of(scrape(port))
            except requests.ConnectionError:
                return False
            return len(now) == 2 and workers[0] not in now

        wait_until("another worker records", replaced)
        last = scrape(port)
        send(server, REQUESTS)
        end = scrape(port)
        assert last[found] > after[found]
        assert end[found] - last[found] == REQUESTS * 9 // 10
        assert len(list(folder.glob("*.values"))) == 2
