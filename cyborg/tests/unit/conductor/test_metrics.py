# SPDX-License-Identifier: Apache-2.0
"""What Prometheus reads, over real HTTP and through its own parser."""

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import requests
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families

import cyborg
from cyborg.conductor.metrics import CACHE_SECONDS, METRICS, DatabaseCollector, make_server
from cyborg.conductor.orphans.watcher import RESULTS
from cyborg.conductor.service import ConductorService
from cyborg.core.audit.sources import State
from cyborg.core.errors import Unavailable
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db import schema
from cyborg.db.engine import Reader
from cyborg.db.totals import write as self_heal
from cyborg.rpc.transport import register_options
from cyborg.telemetry.recorder import FAMILIES, MetricRecorder
from cyborg.telemetry.server import MetricsServer
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.databases import engine_of
from cyborg.tests.fixtures.databases.services import at
from cyborg.tests.fixtures.machine.log_lines import warnings_of
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import free_port, wait_until
from cyborg.threads import locks

NOW = datetime(2026, 4, 1)
PAGE = Path(cyborg.__file__).parents[1] / "doc" / "source" / "admin" / "metrics.rst"
# By metric name and label values, sorted by label name.
Samples = dict[tuple[str, tuple[str, ...]], float]


class Env:
    """A metrics server on a free port."""

    def __init__(self, engine: sa.Engine, folder: Path) -> None:
        self.engine = engine
        options = {"metrics_port": free_port(), "metrics_directory": str(folder / "metrics")}
        self.conf = make_conf(conductor=options)
        self.server = self.make_server()

    def make_server(self) -> MetricsServer:
        return make_server(
            self.conf,
            Reader(self.engine),
            MetricRecorder(),
            lambda: {"jobs": 90.0},
            lambda: {"queued": 2, "ignored": 5},
        )

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
def env(sqlite_engine: sa.Engine, tmp_path: Path) -> Iterator[Env]:
    metrics_env = Env(sqlite_engine, tmp_path)
    try:
        yield metrics_env
    finally:
        metrics_env.server.stop()


def collect(collector: DatabaseCollector) -> Samples:
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


COUNTED = (
    "cyborg_device_contexts",
    "cyborg_attachments",
    "cyborg_device_successors",
    "cyborg_maintenance_windows",
)


@pytest.mark.slow
def test_scrape_returns_the_counts_of_the_database(env: Env) -> None:
    rows.insert_card(env.engine, handles=3)
    rows.insert_arq(env.engine, rows.insert_profile(env.engine))
    rows.insert_agent(env.engine)
    pair = rows.insert_card(env.engine, "compute-2", "hgx:3", handles=0)
    device_set = {"device_set": {"kind": "fabric"}, "set_size": 2, "offer": "offered"}
    rows.update(env.engine, schema.deployables, pair.deployable_id, **device_set)
    with env.engine.begin() as tx:
        self_heal.increment(tx, CorrectiveAction.ORPHANS_RELEASED, 2, NOW)
    assert env.server.ensure()
    assert env.server.port == env.conf.conductor.metrics_port
    samples = env.scrape()
    assert samples["cyborg_database_up", ()] == 1
    assert samples["cyborg_arqs", ("Initial",)] == 1
    assert samples["cyborg_arqs", ("Bound",)] == 0
    assert samples["cyborg_device_contexts", ("unbound",)] == 0
    assert samples["cyborg_attachments", ("attached",)] == 0
    assert samples["cyborg_handles", ("free",)] == 3
    assert samples["cyborg_devices", ("ok", "enabled")] == 2
    # In the order of the names of the labels.
    assert samples["cyborg_device_sets", ("fabric", "offered", "2")] == 1
    assert samples["cyborg_device_sets", ("fabric", "withheld", "2")] == 0
    assert samples["cyborg_services", ("cyborg-agent", "up")] == 1
    assert samples["cyborg_providers", ()] == 2
    assert samples["cyborg_self_heal_actions_total", ("orphans_released",)] == 2
    assert samples["cyborg_self_heal_actions_total", ("jobs_undone",)] == 0
    assert samples["cyborg_class_handles", ("FPGA", "free")] == 3
    assert samples["cyborg_class_handles", ("FPGA", "owned")] == 0
    assert samples["cyborg_devices_failing", ()] == 0
    assert samples["cyborg_binds_total", ("bound",)] == 0
    assert samples["cyborg_guest_devices_total", ("failed",)] == 0
    assert samples["process_loop_overdue_seconds", ("jobs",)] == 90
    assert samples["process_nova_notifications_total", ("queued",)] == 2
    assert samples["process_nova_notifications_total", ("ignored",)] == 5
    assert samples["process_resident_memory_bytes", (str(os.getpid()),)] > 0


def test_ages_are_those_of_pending_objects(sqlite_engine: sa.Engine) -> None:
    created_at = NOW - timedelta(seconds=90)
    message: dict[str, Any] = {"kind": "nova-event", "subject": "s", "payload": {}}
    rows.insert(sqlite_engine, schema.outbox, **message, created_at=created_at)
    rows.insert(sqlite_engine, schema.outbox, **message, created_at=NOW, state="dead")
    job: dict[str, Any] = {"kind": "release", "host": "h", "subject": "s", "arguments": {}}
    rows.insert(sqlite_engine, schema.jobs, **job, created_at=created_at)
    with sqlite_engine.begin() as tx:
        self_heal.increment(tx, CorrectiveAction.JOBS_UNDONE, 1, datetime(1970, 1, 2))
    samples = collect(DatabaseCollector(at(Reader(sqlite_engine), lambda: NOW)))
    assert samples["cyborg_outbox_messages", ("nova-event", "pending")] == 1
    assert samples["cyborg_outbox_messages", ("nova-event", "dead")] == 1
    assert samples["cyborg_outbox_oldest_seconds", ("nova-event",)] == 90
    assert samples["cyborg_jobs_open", ("release",)] == 1
    assert samples["cyborg_jobs_overdue", ("release",)] == 0
    assert samples["cyborg_jobs_oldest_seconds", ("release",)] == 90
    assert samples["cyborg_placement_sync_lag_seconds", ()] == 0
    # Timestamps of the database are UTC in every time zone of the conductor.
    assert samples["cyborg_self_heal_last_timestamp_seconds", ("jobs_undone",)] == 86400


def test_contexts_and_attachments_are_counted_by_state(sqlite_engine: sa.Engine) -> None:
    for state in ("unbound", "unbound", "bound"):
        context: dict[str, Any] = {
            "uuid": str(uuid4()),
            "state": state,
            "groups": [],
            "config_data": {},
        }
        rows.insert(sqlite_engine, schema.device_contexts, **context)
    attachment = {
        "uuid": str(uuid4()),
        "project_id": "p",
        "instance_uuid": str(uuid4()),
        "hostname": "compute-1",
        "device_profile_name": "fpga",
        "mode": "next-boot",
        "reboot": False,
        "state": "attaching",
        "deadline": NOW,
    }
    rows.insert(sqlite_engine, schema.attachments, **attachment)
    successor = {
        "uuid": str(uuid4()),
        "successor_of": str(uuid4()),
        "maintained_device": str(uuid4()),
    }
    rows.insert(
        sqlite_engine,
        schema.attachments,
        **{**attachment, **successor, "state": "detaching", "step": "guest"},
    )
    rows.insert(
        sqlite_engine,
        schema.device_maintenances,
        device_uuid=successor["maintained_device"],
        until=NOW,
        next_status="enabled",
    )
    samples = collect(DatabaseCollector(Reader(sqlite_engine)))
    counted = {
        (name, *labels): value
        for (name, labels), value in samples.items()
        if name in COUNTED and value
    }
    assert counted == {
        ("cyborg_device_contexts", "unbound"): 2,
        ("cyborg_device_contexts", "bound"): 1,
        ("cyborg_attachments", "attaching"): 1,
        ("cyborg_device_successors", "awaiting_restart"): 1,
        ("cyborg_maintenance_windows",): 1,
    }
    assert samples["cyborg_device_contexts", ("reserved",)] == 0
    assert samples["cyborg_attachments", ("error",)] == 0


def test_counts_by_state_read_an_index_only(sqlite_engine: sa.Engine) -> None:
    with count_statements(sqlite_engine) as counted:
        collect(DatabaseCollector(Reader(sqlite_engine)))
    for table in ("device_contexts", "attachments"):
        (query,) = [
            text
            for text in counted.statements
            if f"FROM {table} " in f"{text} " and "maintained_device" not in text
        ]
        with sqlite_engine.connect() as connection:
            (step,) = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}")
        assert "COVERING INDEX" in step.detail


def test_scrape_within_the_cache_time_runs_no_statement(sqlite_engine: sa.Engine) -> None:
    seconds = [0.0]
    collector = DatabaseCollector(Reader(sqlite_engine), clock=lambda: seconds[0])
    first = collect(collector)
    rows.insert_arq(sqlite_engine, rows.insert_profile(sqlite_engine))
    seconds[0] = CACHE_SECONDS - 0.1
    with count_statements(sqlite_engine) as counted:
        assert collect(collector) == first
    assert len(counted) == 0
    seconds[0] = CACHE_SECONDS
    assert collect(collector)["cyborg_arqs", ("Initial",)] == 1


def test_database_outage_is_reported(tmp_path: Path) -> None:
    with engine_of(f"sqlite:///{tmp_path}/empty.db") as engine:
        samples = collect(DatabaseCollector(Reader(engine)))
    assert samples == {("cyborg_database_up", ()): 0}


def test_scrape_does_not_wait_for_ever_for_another_one(
    sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "MAX_WAIT", 0.05)
    started, go_on = threading.Event(), threading.Event()

    def now() -> datetime:
        started.set()
        assert go_on.wait(30)
        return NOW

    collector = DatabaseCollector(at(Reader(sqlite_engine), now))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(collect, collector)
        assert started.wait(30)
        assert collect(collector) == {("cyborg_database_up", ()): 0}
        go_on.set()
        assert first.result()["cyborg_database_up", ()] == 1


def test_scrapes_while_the_database_hangs_wait_for_one_timeout(sqlite_engine: sa.Engine) -> None:
    scrapers: set[int] = set()
    reads: list[float] = []
    all_scrape, seconds = threading.Event(), [0.0]

    def clock() -> float:
        scrapers.add(threading.get_ident())
        if len(scrapers) == 4:
            all_scrape.set()
        return seconds[0]

    def hang() -> datetime:
        reads.append(seconds[0])
        assert all_scrape.wait(30)
        seconds[0] += 2 * CACHE_SECONDS
        raise Unavailable("no answer")

    collector = DatabaseCollector(at(Reader(sqlite_engine), hang), clock=clock)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(collect, collector) for _ in range(4)]
        assert [call.result() for call in calls] == [{("cyborg_database_up", ()): 0}] * 4
    assert reads == [0.0]


@pytest.mark.slow
def test_first_server_on_the_port_serves(env: Env, caplog: pytest.LogCaptureFixture) -> None:
    other = env.make_server()
    try:
        assert env.server.ensure()
        assert env.server.ensure()
        assert not other.ensure()
        assert other.port is None
        assert warnings_of(caplog.records) == []
        env.server.stop()
        assert other.ensure()
        assert env.scrape()["cyborg_database_up", ()] == 1
        assert not env.server.ensure()
    finally:
        other.stop()
        other.stop()
    with pytest.raises(requests.ConnectionError):
        env.scrape()


def test_address_that_cannot_be_bound_is_logged_once(
    env: Env, caplog: pytest.LogCaptureFixture
) -> None:
    env.conf.set_override("metrics_listen", "192.0.2.1", group="conductor")
    server = env.make_server()
    for _ in range(2):
        assert not server.ensure()
    server.stop()
    (line,) = caplog.messages
    assert line.startswith("Cannot serve metrics: ")


def read_metrics(url: str) -> str | None:
    """Return the metrics, None before the service listens."""
    with contextlib.suppress(requests.ConnectionError):
        return requests.get(url, timeout=10).text
    return None


@pytest.mark.slow
def test_conductor_waiting_for_its_database_serves_metrics(tmp_path: Path) -> None:
    port = free_port()
    conf = make_conf(
        conductor={"metrics_port": port, "metrics_directory": f"{tmp_path}/metrics"},
        database={"connection": f"sqlite:///{tmp_path}/no-tables.db"},
        nova={"send_events": False},
        placement={"endpoint_override": "http://127.0.0.1:1"},
    )
    register_options(conf)
    conf.set_override("transport_url", "kombu+memory:////")
    service = ConductorService(conf)
    url = f"http://127.0.0.1:{port}/metrics"
    service.start()
    try:
        text = wait_until("the service listens", partial(read_metrics, url))
        assert "\ncyborg_database_up 0.0\n" in text
    finally:
        service.stop()
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=10)


@pytest.mark.static
def test_documentation_lists_every_metric_with_labels_and_help_text() -> None:
    text = PAGE.read_text(encoding="utf-8")
    form = r"^``((?:cyborg|process)_\w+)``((?:\n    .+)+)"
    documented = dict(re.findall(form, text, re.MULTILINE))
    expected = {}
    recorded = {family.name: (family.text, family.labels) for family in FAMILIES.values()}
    for name, (sentence, labels) in {**METRICS, **recorded}.items():
        suffix = f" By {', '.join(f'``{label}``' for label in labels)}." if labels else ""
        expected[name] = sentence + suffix
    assert {name: " ".join(words.split()) for name, words in documented.items()} == expected


@pytest.mark.static
def test_documentation_lists_every_corrective_action() -> None:
    text = PAGE.read_text(encoding="utf-8")
    documented = dict(re.findall(r"^``([a-z_]+)`` +(\S.*)$", text, re.MULTILINE))
    assert documented == {str(action): action.description for action in CorrectiveAction}


@pytest.mark.static
def test_documentation_lists_every_result_of_notifications() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"``{result}``" in text for result in RESULTS)


def test_failing_devices_and_findings_of_the_last_audit(sqlite_engine: sa.Engine) -> None:
    rows.insert_card(sqlite_engine, handles=1)
    with sqlite_engine.begin() as tx:
        tx.execute(schema.devices.update().values(failing=True, retry_at=NOW))
    collector = DatabaseCollector(Reader(sqlite_engine))
    samples = collect(collector)
    assert samples["cyborg_devices_failing", ()] == 1
    assert ("cyborg_audit_findings", ()) not in samples
    for state, count in ((State.DONE, 7), (State.DONE, 3), (State.RUNNING, 0)):
        rows.insert(
            sqlite_engine, schema.audits, uuid=str(uuid4()), state=state, num_findings=count
        )
    samples = collect(DatabaseCollector(Reader(sqlite_engine)))
    assert samples["cyborg_audit_findings", ()] == 3
