# SPDX-License-Identifier: Apache-2.0
"""Jobs and messages of the outbox keep the trace of the request that caused them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from oslo_utils import timeutils

from cyborg import tracing
from cyborg.conductor.notifications.outbox import Channel, OutboxWorker
from cyborg.core.jobs.job import JobKind
from cyborg.core.log import LENGTH
from cyborg.db import schema
from cyborg.db.jobs import write as jobs
from cyborg.db.outbox import write as outbox
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.tracing.boot import TRACE, TRACEPARENT, plain
from cyborg.tests.fixtures.tracing.exporter import exporter
from cyborg.tracing import SpanKind

__all__ = ["exporter"]

Open = Callable[[], AbstractContextManager[None]]


def root() -> AbstractContextManager[None]:
    return tracing.root_span("root", TRACEPARENT, SpanKind.SERVER)


def without_trace() -> AbstractContextManager[None]:
    return tracing.child_span("none")


@pytest.mark.parametrize("enter", [root, without_trace])
def test_rows_have_the_context_of_the_current_span(
    engine: sa.Engine, exporter: InMemorySpanExporter, enter: Open
) -> None:
    with enter(), engine.begin() as tx:
        context = tracing.current_context()
        # Two messages are one statement, which MariaDB executes in another way than one message.
        outbox.add_all(tx, [outbox.Message("kind", subject, {"a": 1}) for subject in ("s", "t")])
        jobs.enqueue(
            tx,
            kind=JobKind.RELEASE,
            host="h",
            subject="s",
            arguments={},
            now=timeutils.utcnow(),
            deadline=None,
        )
        tables = (schema.outbox, schema.jobs)
        stored = [tx.scalars(sa.select(table.c.trace_context)).all() for table in tables]
    assert (context is None) is (enter is without_trace)
    assert stored == [[context, context], [context]]
    assert context is None or len(context) == LENGTH


def test_delivery_belongs_to_the_trace_and_sends_the_payload_only(
    sqlite_engine: sa.Engine, exporter: InMemorySpanExporter
) -> None:
    sent: list[Mapping[str, Any]] = []

    def send(payloads: Sequence[Mapping[str, Any]]) -> list[str | None]:
        sent.extend(payloads)
        with tracing.child_span("send"):
            return [None for _ in payloads]

    uow = UnitOfWork(sqlite_engine)
    with root():
        uow.run(lambda tx: outbox.add_all(tx, [outbox.Message("kind", "s", {"a": 1})]))
    uow.run(lambda tx: outbox.add_all(tx, [outbox.Message("kind", "t", {"b": 2})]))
    worker = OutboxWorker(make_conf(), uow, Channel("kind", "a double", send, 1.0, 1.0))
    assert worker.run_once() == 2
    assert sorted(map(str, sent)) == ["{'a': 1}", "{'b': 2}"]
    found = {span["name"]: span for span in map(plain, exporter.get_finished_spans())}
    assert found["outbox.deliver kind"]["trace"] == found["send"]["trace"] == TRACE
    assert found["outbox.deliver kind"]["parent"] == found["db.transaction"]["span"]
