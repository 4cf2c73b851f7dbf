# SPDX-License-Identifier: Apache-2.0
"""Start and stop of tracing, the export and its limits."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cyborg import tracing
from cyborg.core.errors import Misconfigured
from cyborg.tests.fixtures.machine.log_lines import texts_of
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import ends_within, free_port, wait_until
from cyborg.tests.fixtures.tracing.collector import serve_collector
from cyborg.tracing import SpanKind


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    tracing.stop()
    assert tracing._state.recorder is None


def record(count: int) -> None:
    """Record spans."""
    for number in range(count):
        with tracing.root_span(f"span {number}", None, SpanKind.SERVER):
            pass


def test_disabled_tracing_imports_nothing_and_returns_one_block() -> None:
    tracing.start(make_conf(), "test")
    assert tracing._state.recorder is None
    block = tracing.child_span("a", arq="x")
    assert block is tracing.root_span("b", "x", SpanKind.SERVER) is tracing.remote_spans("c", [])
    assert tracing.current_context() is None


def test_missing_extra_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cyborg.tracing.recorder", raising=False)
    monkeypatch.delattr(tracing, "recorder", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(Misconfigured, match=r"pip install 'cyborg\[tracing\]'"):
        tracing.start(make_conf(tracing={"enabled": True}), "test")
    tracing.check_config(make_conf())


def test_spans_reach_the_collector_at_the_stop() -> None:
    with serve_collector() as collector:
        conf = make_conf(tracing={"enabled": True, "otlp_endpoint": collector.url})
        tracing.start(conf, "cyborg-agent")
        tracing.start(conf, "second of the process")
        record(3)
        tracing.stop()
        assert tracing._state.recorder is not None, "the first service still runs"
        tracing.stop()
        spans = wait_until("the spans arrive", collector.spans)
    assert {span["name"] for span in spans} == {"span 0", "span 1", "span 2"}
    assert {(span["service"], span["host"]) for span in spans} == {
        ("cyborg-agent", conf.host),
    }


@pytest.mark.slow
def test_absent_collector_blocks_nothing_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options: dict[str, Any] = {
        "enabled": True,
        "otlp_endpoint": f"http://127.0.0.1:{free_port()}/v1/traces",
        "queue_size": 16,
        "timeout": 0.1,
    }
    tracing.start(make_conf(tracing=options), "test")
    with ends_within(6):
        record(2000)
        tracing.stop()
    warnings = [line for line in texts_of(caplog.records) if "collector of traces" in line]
    assert len(warnings) == 1
    assert "accepts no spans" in warnings[0]


# Python 3.12 warns of a fork beside threads; the child uses none of them.
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_child_process_does_not_use_the_recorder_of_its_parent() -> None:
    with serve_collector() as collector:
        conf = make_conf(tracing={"enabled": True, "otlp_endpoint": collector.url})
        tracing.start(conf, "parent")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                tracing.start(conf, "child")
                record(1)
                tracing.stop()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert [span["service"] for span in wait_until("a span", collector.spans)] == ["child"]
