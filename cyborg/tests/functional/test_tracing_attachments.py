# SPDX-License-Identifier: Apache-2.0
"""The work on an attachment belongs to the trace of its request, with Placement and Nova."""

from datetime import timedelta

import sqlalchemy as sa
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cyborg import tracing
from cyborg.core.log import MAX_TRACED_ATTEMPTS
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases.attachment_setup import Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.tracing.boot import TRACE, TRACEPARENT, plain
from cyborg.tests.fixtures.tracing.exporter import exporter
from cyborg.tracing import SpanKind

__all__ = ["exporter", "node", "placement_adapter"]


def test_steps_of_attach_and_detach_belong_to_their_requests(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova, exporter: InMemorySpanExporter
) -> None:
    env = Env(sqlite_engine, node, fake_nova, abilities=("prepares",))
    exporter.clear()
    with tracing.root_span("attach", TRACEPARENT, SpanKind.SERVER):
        env.attach()
    env.settle()
    assert env.check() == "attached"
    spans = [plain(span) for span in exporter.get_finished_spans()]
    assert {span["trace"] for span in spans} == {TRACE}
    found = {span["name"]: span for span in spans}
    steps = {name for name in found if name.startswith("attachment.")}
    assert steps >= {"attachment.allocate", "attachment.bind", "attachment.prepare"}
    parents = {span["span"]: span["name"] for span in spans}
    assert parents[found["placement PUT"]["parent"]] == "attachment.allocate"
    assert found["attachment.bind"]["attributes"]["cyborg.instance"] == env.instance

    exporter.clear()
    with tracing.root_span("detach", None, SpanKind.SERVER):
        env.detach()
    env.settle()
    spans = [plain(span) for span in exporter.get_finished_spans()]
    (root,) = (span for span in spans if span["name"] == "detach")
    assert {span["trace"] for span in spans} == {root["trace"]} != {TRACE}
    assert "attachment.release" in {span["name"] for span in spans}


def test_repeated_step_records_a_limited_number_of_spans(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova, exporter: InMemorySpanExporter
) -> None:
    """The host never prepares the device, so that the step is repeated until the timeout."""
    env = Env(sqlite_engine, node, fake_nova, abilities=("prepares",), attachment_timeout=3600.0)
    with tracing.root_span("attach", TRACEPARENT, SpanKind.SERVER):
        env.attach()
    for _ in range(2 * MAX_TRACED_ATTEMPTS):
        env.runner.run_once()
        env.now += timedelta(seconds=100)
    assert env.step() == "prepare"
    names = [span.name for span in exporter.get_finished_spans()]
    assert names.count("attachment.prepare") == MAX_TRACED_ATTEMPTS
