# SPDX-License-Identifier: Apache-2.0
"""Recording: counters, gauges and histograms, with limits."""

import errno
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.core import Metric

from cyborg.core.errors import NoHandle
from cyborg.telemetry.recorder import (
    API_SECONDS,
    BINDS,
    FAMILIES,
    LOOP_OVERDUE,
    MAX_VALUES,
    RETRY_INTERVAL,
    RPC_CLIENT_CALLS,
    RPC_CLIENT_SECONDS,
    Key,
    MetricRecorder,
)
from cyborg.telemetry.server import MemoryValues, WorkerCollector

Samples = dict[tuple[str, ...], float]


def recording() -> tuple[MetricRecorder, MemoryValues]:
    recorder, store = MetricRecorder(), MemoryValues()
    recorder.open(store)
    return recorder, store


def collect(store: MemoryValues) -> Samples:
    return read(WorkerCollector(store.read).collect())


def read(metrics: Any) -> Samples:
    found: list[Metric] = list(metrics)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in found
        for sample in metric.samples
    }


def test_recorder_that_is_not_open_records_nothing() -> None:
    recorder, store = MetricRecorder(), MemoryValues()
    recorder.count(BINDS, "bound")
    recorder.open(store)
    recorder.close()
    recorder.count(BINDS, "bound")
    assert store.read().samples == {}


def test_counter_gauge_and_histogram_are_exposed() -> None:
    recorder, store = recording()
    recorder.count(BINDS, "no_handle", amount=0)
    for _ in range(3):
        recorder.count(BINDS, "bound")
    recorder.set(LOOP_OVERDUE, 7.0, "jobs")
    recorder.set(LOOP_OVERDUE, 5.0, "jobs")
    for seconds in (0.0005, 0.001, 0.3, 99.0):
        recorder.observe(API_SECONDS, seconds, "GET", "/v2/devices")
    samples = collect(store)
    assert samples["cyborg_binds_total", "bound"] == 3
    assert samples["cyborg_binds_total", "no_handle"] == 0
    assert samples["process_loop_overdue_seconds", "jobs"] == 5
    bucket = ("cyborg_api_request_seconds_bucket", "GET", "/v2/devices")
    # A bucket has its upper limit, and all smaller ones.
    counts = [samples[*bucket, limit] for limit in ("0.001", "0.25", "0.5", "30.0", "+Inf")]
    assert counts == [2, 2, 3, 3, 4]
    assert samples["cyborg_api_request_seconds_count", "GET", "/v2/devices"] == 4
    total = samples["cyborg_api_request_seconds_sum", "GET", "/v2/devices"]
    assert total == pytest.approx(99.3015)


@pytest.mark.parametrize(
    ("raised", "result"), [(None, "ok"), (NoHandle("none"), "no_handle"), (KeyError(), "internal")]
)
def test_measured_call_has_the_code_of_its_error(raised: Exception | None, result: str) -> None:
    recorder, store = recording()

    def call() -> None:
        with recorder.measure(RPC_CLIENT_CALLS, RPC_CLIENT_SECONDS, "agent.job"):
            if raised is not None:
                raise raised

    if raised is None:
        call()
    else:
        with pytest.raises(type(raised)):
            call()
    samples = collect(store)
    assert samples["cyborg_rpc_client_calls_total", "agent.job", result] == 1
    assert samples["cyborg_rpc_client_seconds_count", "agent.job"] == 1


def test_number_of_values_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    recorder, store = recording()
    for number in range(MAX_VALUES + 10):
        recorder.count(BINDS, str(number))
    recorder.count(BINDS, "0")
    samples = store.read().samples
    assert len(samples) == MAX_VALUES
    assert samples[BINDS.name, "0"] == [2]
    assert caplog.text.count("Too many metrics") == 1


def test_key_that_cannot_be_stored_is_stored_later_and_fails_no_caller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Store(MemoryValues):
        is_full = False

        def add_key(self, key: Key, width: int) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "full")
            super().add_key(key, width)

    now = [100.0]
    monkeypatch.setattr("cyborg.telemetry.recorder.time.monotonic", lambda: now[0])
    recorder, store = MetricRecorder(), Store()
    recorder.open(store)
    recorder.count(BINDS, "first")
    store.is_full = True
    for outcome in ("second", "third", "first"):
        recorder.count(BINDS, outcome)
    assert caplog.text.count("Cannot store metrics") == 1
    store.is_full = False
    recorder.count(BINDS, "second")  # not tried yet
    now[0] += RETRY_INTERVAL
    recorder.count(BINDS, "second")
    found = {key[1]: values for key, values in store.read().samples.items()}
    assert found == {"first": [2], "second": [1]}


def test_negative_duration_does_not_lower_the_sum() -> None:
    recorder, store = recording()
    for seconds in (1.0, -5.0):
        recorder.observe(API_SECONDS, seconds, "GET", "/v2/devices")
    samples = collect(store)
    assert samples["cyborg_api_request_seconds_sum", "GET", "/v2/devices"] == 1
    assert samples["cyborg_api_request_seconds_count", "GET", "/v2/devices"] == 2


def test_describing_metrics_reads_no_values() -> None:
    def fail() -> Any:
        raise AssertionError

    read_values: Callable[[], Any] = fail
    described = WorkerCollector(read_values).describe()
    names = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in described
    }
    assert names == set(FAMILIES)
