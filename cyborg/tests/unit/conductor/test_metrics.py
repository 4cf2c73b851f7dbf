# SPDX-License-Identifier: Apache-2.0
"""What Prometheus reads, over real HTTP and through its own parser."""

import logging
import re
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families

import cyborg
from cyborg.conductor.metrics import FRESH, METRICS, FromDatabase, MetricsServer
from cyborg.conductor.service import ConductorService
from cyborg.core.deed import SENTENCES, Deed
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.reader import Reader
from cyborg.db.store import deeds
from cyborg.fixtures import rows
from cyborg.fixtures.databases import engine_of
from cyborg.fixtures.options import make_conf
from cyborg.fixtures.processes import free_port
from cyborg.rpc.transport import register_options

NOW = datetime(2026, 4, 1)
PAGE = Path(cyborg.__file__).parents[1] / "doc" / "source" / "admin" / "metrics.rst"
# By name and the values of the labels, in the order of the labels' names.
Samples = dict[tuple[str, tuple[str, ...]], float]


class Bed:
    """A server of metrics on a port that is free."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.conf = make_conf(conductor={"metrics_port": free_port()})
        self.server = self.another()

    def another(self) -> MetricsServer:
        return MetricsServer(self.conf, Reader(self.engine))

    def scrape(self) -> Samples:
        port = self.conf.conductor.metrics_port
        answer = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=10)
        assert answer.status_code == 200
        return {
            (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }


@pytest.fixture
def bed(sqlite_engine: sa.Engine) -> Iterator[Bed]:
    made = Bed(sqlite_engine)
    try:
        yield made
    finally:
        made.server.stop()


def collect(collector: FromDatabase) -> Samples:
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def test_a_scrape_tells_what_the_database_has(bed: Bed) -> None:
    rows.card(bed.engine, handles=3)
    rows.request(bed.engine, rows.profile(bed.engine))
    rows.agent(bed.engine)
    with bed.engine.begin() as tx:
        deeds.add(tx, Deed.ORPHANS_FREED, 2, NOW)
    assert bed.server.ensure()
    assert bed.server.port == bed.conf.conductor.metrics_port
    found = bed.scrape()
    assert found["cyborg_database_up", ()] == 1
    assert found["cyborg_requests", ("Initial",)] == 1
    assert found["cyborg_requests", ("Bound",)] == 0
    assert found["cyborg_handles", ("free",)] == 3
    assert found["cyborg_devices", ("ok", "enabled")] == 1
    assert found["cyborg_services", ("cyborg-agent", "up")] == 1
    assert found["cyborg_providers", ()] == 1
    assert found["cyborg_deeds_total", ("orphans_freed",)] == 2
    assert found["cyborg_deeds_total", ("jobs_undone",)] == 0
    assert found["process_resident_memory_bytes", ()] > 0


def test_ages_are_of_what_waits(sqlite_engine: sa.Engine) -> None:
    then = NOW - timedelta(seconds=90)
    message: dict[str, Any] = {"kind": "nova-event", "subject": "s", "payload": {}}
    rows.insert(sqlite_engine, schema.outbox, **message, created_at=then)
    rows.insert(sqlite_engine, schema.outbox, **message, created_at=NOW, state="dead")
    job: dict[str, Any] = {"kind": "release", "host": "h", "subject": "s", "arguments": {}}
    rows.insert(sqlite_engine, schema.jobs, **job, created_at=then)
    with sqlite_engine.begin() as tx:
        deeds.add(tx, Deed.JOBS_UNDONE, 1, datetime(1970, 1, 2))
    found = collect(FromDatabase(make_conf(), Reader(sqlite_engine), now=lambda: NOW))
    assert found["cyborg_outbox_messages", ("nova-event", "pending")] == 1
    assert found["cyborg_outbox_messages", ("nova-event", "dead")] == 1
    assert found["cyborg_outbox_oldest_seconds", ("nova-event",)] == 90
    assert found["cyborg_jobs_open", ("release",)] == 1
    assert found["cyborg_jobs_overdue", ("release",)] == 0
    assert found["cyborg_jobs_oldest_seconds", ("release",)] == 90
    assert found["cyborg_providers_oldest_seconds", ()] == 0
    # Moments of the database are UTC wherever the conductor runs.
    assert found["cyborg_deeds_last_timestamp_seconds", ("jobs_undone",)] == 86400


def test_scrapes_at_short_intervals_cost_nothing(sqlite_engine: sa.Engine) -> None:
    seconds = [0.0]
    collector = FromDatabase(make_conf(), Reader(sqlite_engine), clock=lambda: seconds[0])
    first = collect(collector)
    rows.request(sqlite_engine, rows.profile(sqlite_engine))
    seconds[0] = FRESH - 0.1
    with counting(sqlite_engine) as counted:
        assert collect(collector) == first
    assert len(counted) == 0
    seconds[0] = FRESH
    assert collect(collector)["cyborg_requests", ("Initial",)] == 1


def test_a_database_that_is_away_is_told(tmp_path: Path) -> None:
    with engine_of(f"sqlite:///{tmp_path}/empty.db") as engine:
        found = collect(FromDatabase(make_conf(), Reader(engine)))
    assert found == {("cyborg_database_up", ()): 0}


def test_the_first_that_takes_the_port_serves(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    other = bed.another()
    try:
        assert bed.server.ensure()
        assert bed.server.ensure()
        assert not other.ensure()
        assert other.port is None
        assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
        bed.server.stop()
        assert other.ensure()
        assert bed.scrape()["cyborg_database_up", ()] == 1
        assert not bed.server.ensure()
    finally:
        other.stop()
        other.stop()
    with pytest.raises(requests.ConnectionError):
        bed.scrape()


def test_an_address_that_is_not_ours_is_complained_of(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    bed.conf.set_override("metrics_listen", "192.0.2.1", group="conductor")
    for _ in range(2):
        assert not bed.server.ensure()
    (line,) = caplog.messages
    assert line.startswith("Metrics cannot be served: ")


def test_a_conductor_answers_while_it_waits_for_its_database(tmp_path: Path) -> None:
    port = free_port()
    conf = make_conf(
        conductor={"metrics_port": port},
        database={"connection": f"sqlite:///{tmp_path}/no-tables.db"},
        nova={"notify": False},
        placement={"endpoint_override": "http://127.0.0.1:1"},
    )
    register_options(conf)
    conf.set_override("transport_url", "kombu+memory:////")
    service = ConductorService(conf)
    url = f"http://127.0.0.1:{port}/metrics"
    service.start()
    try:
        for _ in range(200):
            try:
                answer = requests.get(url, timeout=10)
                break
            except requests.ConnectionError:
                threading.Event().wait(0.05)
        assert "\ncyborg_database_up 0.0\n" in answer.text
    finally:
        service.stop()
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=10)


def test_the_page_has_every_metric_with_its_labels_and_its_sentence() -> None:
    text = PAGE.read_text(encoding="utf-8")
    told = dict(re.findall(r"^``(cyborg_\w+)``((?:\n    .+)+)", text, re.MULTILINE))
    said = {}
    for name, (sentence, labels) in METRICS.items():
        of = f" By {', '.join(f'``{label}``' for label in labels)}." if labels else ""
        said[name] = sentence + of
    assert {name: " ".join(words.split()) for name, words in told.items()} == said


def test_the_page_has_every_deed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    told = dict(re.findall(r"^``([a-z_]+)`` +(\S.*)$", text, re.MULTILINE))
    assert told == {str(deed): sentence for deed, sentence in SENTENCES.items()}
