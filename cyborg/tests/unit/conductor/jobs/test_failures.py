# SPDX-License-Identifier: Apache-2.0
"""Failures that a device shows, and devices that are closed because their prepare jobs fail."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.inventory.devices import Devices
from cyborg.conductor.jobs import completion
from cyborg.conductor.jobs.programming import Partitions
from cyborg.core.errors import NoHandle
from cyborg.db import schema
from cyborg.db.binding import accelerators
from cyborg.db.deployables import write as deployables
from cyborg.db.devices import read as devices
from cyborg.db.devices import write as store
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.host_work import START, UNREACHABLE, JobsEnv

CARD, NEIGHBOUR = "0000:01:00.0", "0000:02:00.0"


class FailureEnv(JobsEnv):
    """Two cards of a host."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
        self.agents.names_items = True
        self.card, self.neighbour = self.add_card(), self.add_card(address=NEIGHBOUR, handles=2)
        handles = rows.read(
            engine, schema.attach_handles, deployable_id=self.neighbour.deployable_id
        )
        for handle in handles:
            address = f"{NEIGHBOUR}/{handle['address']}"
            rows.update(engine, schema.attach_handles, handle["id"], address=address)

    def advance(self, seconds: float) -> None:
        """Advance the clock; the agent sends heartbeats in the meantime."""
        super().advance(seconds)
        (agent,) = rows.read(self.engine, schema.services)
        rows.update(self.engine, schema.services, agent["id"], **rows.heartbeat(self.time))

    def device(self, address: str = CARD) -> devices.DeviceRow:
        """Return a device as it is shown."""
        with self.engine.connect() as connection:
            return next(iter(devices.find(connection, address=address)))

    def fail_bind(self, times: int = 1, answer: str = "failed") -> None:
        """Let binds of the card fail, one after the other."""
        self.agents.answers["prepare"] = answer
        for _ in range(times):
            self.bind(self.card)
            self.jobs.run_once()
            if answer == UNREACHABLE:
                self.advance(self.conf.conductor.prepare_timeout)
                self.jobs.run_once()
        del self.agents.answers["prepare"]

    def bind_well(self) -> None:
        """Bind the card, without an error."""
        self.bind(self.card)
        self.jobs.run_once()

    def pass_close_time(self) -> None:
        """Let the sweep open the devices whose time has passed."""
        self.advance(self.conf.conductor.device_cordon_time)
        self.jobs.sweep()

    def is_closed(self) -> bool:
        """Return whether the card is closed, and its neighbour is not."""
        with self.engine.connect() as connection:
            found = deployables.desired_state(
                connection, [self.card.provider, self.neighbour.provider]
            )
            free = {row["hostname"] for row in accelerators.find(connection, states=["free"])}
        shown = {row["uuid"]: row["failing"] for row in found}
        assert shown.pop(self.neighbour.provider) is False
        assert free == {self.card.host}
        return shown[self.card.provider]


@contextlib.contextmanager
def explain_statements(tx: sa.Connection) -> Iterator[list[str]]:
    """Yield a list that gets the plans of the statements of the block, after its end."""
    explain = "EXPLAIN QUERY PLAN" if tx.dialect.name == "sqlite" else "EXPLAIN"
    executed: list[tuple[str, Any]] = []
    plans: list[str] = []

    def record(connection: Any, cursor: Any, statement: str, values: Any, *_: Any) -> None:
        executed.append((statement, values))

    sa.event.listen(tx, "before_cursor_execute", record)
    yield plans
    sa.event.remove(tx, "before_cursor_execute", record)
    for statement, values in executed:
        # The text of a row is not complete, that of a tuple is.
        found = tx.exec_driver_sql(f"{explain} {statement}", values)
        plans.append(str([tuple(row) for row in found]))


@pytest.fixture
def env(engine: sa.Engine) -> FailureEnv:
    return FailureEnv(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> FailureEnv:
    return FailureEnv(sqlite_engine)


def test_failed_prepare_is_shown_until_one_succeeds(env: FailureEnv) -> None:
    env.fail_bind()
    (job,) = rows.read(env.engine, schema.jobs, kind="prepare")
    (error,) = env.device()["job_errors"]
    (item,) = job["arguments"]["items"]
    assert error == (
        f"prepare of {item['handle']} failed at 2026-01-01T00:00:00Z, job {job['uuid']}: it broke"
    )
    assert env.device(NEIGHBOUR)["job_errors"] == []
    env.bind_well()
    assert env.device()["job_errors"] == []
    assert env.device()["failed_prepares"] == 0


def test_error_names_the_card_of_a_request_for_two(sqlite_env: FailureEnv) -> None:
    env = sqlite_env
    instance, cards = str(uuid4()), (env.card, env.neighbour)
    env.arqs.bind(
        [
            {
                "request": env.add_arq(),
                "hostname": card.host,
                "device_rp_uuid": card.provider,
                "instance_uuid": instance,
            }
            for card in cards
        ],
        None,
    )
    (job,) = rows.read(env.engine, schema.jobs)
    (item,) = [item for item in job["arguments"]["items"] if item["device"] == NEIGHBOUR]
    text = f"prepare of {item['handle']}: it smokes"
    env.jobs.complete(job["uuid"], env.card.host, "failed", text)
    assert env.device()["job_errors"] == []
    (error,) = env.device(NEIGHBOUR)["job_errors"]
    assert error.endswith("it smokes")
    assert env.states() == {"BindFailed": 2}


def test_failed_layout_and_program_are_shown_until_they_succeed(env: FailureEnv) -> None:
    layout = {"name": "1", "offers": {"FPGA": 1}, "traits": []}
    row = rows.read(env.engine, schema.devices, address=CARD)[0]
    abilities = ["partitions", "programs"]
    rows.update(env.engine, schema.devices, row["id"], abilities=abilities, layouts=[layout])
    (part,) = rows.read(env.engine, schema.deployables, device_id=row["id"])
    partitions = build(Partitions, env.conf, env.uow, now=env.now)

    def run(**answers: str) -> list[str]:
        env.agents.answers = answers
        partitions.start(row["uuid"], "1")
        env.jobs.run_once()
        rows.update(env.engine, schema.deployables, part["id"], job_id=None)  # as a report does
        env.programs.start(part["uuid"], str(uuid4()))
        env.jobs.run_once()
        return [text.split(" failed at ")[0] for text in env.device()["job_errors"]]

    assert run(partition="failed", program="failed") == [
        f"program of {CARD}",
        f"partition of {CARD}",
    ]
    assert not env.device()["failing"]
    assert run(program="failed") == [f"program of {CARD}"]
    assert run() == []


def test_device_closes_after_failures_in_a_row_and_opens_by_itself(env: FailureEnv) -> None:
    env.fail_bind(2)
    env.bind_well()
    env.fail_bind(2)
    assert not env.is_closed(), "a success between them ends the row"
    provider = rows.read(env.engine, schema.providers, uuid=env.card.provider)[0]
    env.fail_bind()
    assert env.is_closed()
    assert (
        rows.read(env.engine, schema.providers, uuid=env.card.provider)[0]["revision"]
        > provider["revision"]
    ), "Placement is changed"
    assert (env.results[-2].closed_device, env.results[-1].closed_device) == (
        env.device()["uuid"],
        None,
    )
    assert env.device()["job_errors"][0] == (
        "closed until 2026-01-01T00:10:00Z, because 3 prepare jobs failed in a row"
    )
    with pytest.raises(NoHandle, match="the last prepare jobs of the device failed"):
        env.bind(env.card)
    env.bind(env.neighbour)
    env.jobs.run_once()
    env.jobs.sweep()
    assert env.is_closed()
    env.pass_close_time()
    assert not env.is_closed()
    env.fail_bind()
    assert env.is_closed(), "after this, one failure is enough"
    env.pass_close_time()
    env.bind_well()
    assert not env.is_closed()
    env.fail_bind(2)
    assert not env.is_closed()


def test_operator_opens_a_failing_device(env: FailureEnv) -> None:
    env.fail_bind(3)
    service = build(Devices, env.uow, now=env.now)
    service.set_status(env.device()["uuid"], "maintaining")
    assert env.is_closed()
    service.set_status(env.device()["uuid"], "enabled")
    assert not env.is_closed()
    assert env.device()["retry_at"] is None
    (error,) = env.device()["job_errors"]
    assert error.startswith("prepare of")


def test_success_of_a_running_job_opens_the_device(sqlite_env: FailureEnv) -> None:
    env = sqlite_env
    env.agents.answers["prepare"] = "running"
    env.bind(env.card)
    env.jobs.run_once()
    (job,) = rows.read(env.engine, schema.jobs)
    env.fail_bind(3)
    assert env.is_closed()
    env.jobs.complete(job["uuid"], env.card.host, "done", None)
    assert not env.is_closed()
    assert env.results[-1].providers == 1


def test_failure_without_fault_of_the_device_does_not_close(sqlite_env: FailureEnv) -> None:
    """An agent that is away or whose disk is full, and a profile that may be wrong."""
    env = sqlite_env
    env.fail_bind(4, UNREACHABLE)
    assert not env.is_closed()
    assert "is away" in env.device()["job_errors"][0]
    env.agents.names_items = False
    env.fail_bind(4)
    assert not env.is_closed()
    env.agents.names_items = True
    groups = [{"resources:FPGA": "1", "accel:bitstream_id": str(uuid4())}]
    env.profile = rows.insert_profile(env.engine, "image", groups)
    arqs = [rows.insert_arq(env.engine, env.profile, group=groups[0]) for _ in range(4)]
    env.agents.answers["prepare"] = "failed"
    for arq in arqs:
        env.bind(env.card, arq)
        env.jobs.run_once()
    assert env.states() == {"BindFailed": 12}
    assert not env.is_closed()


def test_key_that_no_driver_reads_does_not_excuse_the_device(sqlite_env: FailureEnv) -> None:
    env = sqlite_env
    groups = [{"resources:FPGA": "1", "accel:attach_target": "instance"}]
    env.profile = rows.insert_profile(env.engine, "target", groups)
    env.agents.answers["prepare"] = "failed"
    for arq in [rows.insert_arq(env.engine, env.profile, group=groups[0]) for _ in range(3)]:
        env.bind(env.card, arq)
        env.jobs.run_once()
    assert env.is_closed()


def test_close_after_zero_never_closes(sqlite_env: FailureEnv) -> None:
    sqlite_env.conf.set_override("device_cordon_after", 0, "conductor")
    sqlite_env.fail_bind(9)
    assert not sqlite_env.is_closed()
    assert len(sqlite_env.device()["job_errors"]) == 1


def test_page_of_devices_costs_no_statement_for_failures(sqlite_env: FailureEnv) -> None:
    sqlite_env.fail_bind(3)
    with count_statements(sqlite_env.engine) as count, sqlite_env.engine.connect() as connection:
        assert len(devices.find(connection)) == 2
    assert len(count) == 4


def test_searches_for_failures_use_an_index(engine: sa.Engine) -> None:
    """The plans of a cloud of which no device is failing."""
    cloud: list[dict[str, Any]] = [
        {**rows.DEVICE_VALUES, "uuid": str(uuid4()), "host": f"h{n}", "address": "1"}
        for n in range(1000)
    ]
    analyze = {"sqlite": "ANALYZE", "postgresql": "ANALYZE devices"}
    with engine.begin() as tx:
        tx.execute(sa.insert(schema.devices), cloud)
    with engine.connect() as tx:
        tx.execute(sa.text(analyze.get(engine.dialect.name, "ANALYZE TABLE devices"))).close()
        with explain_statements(tx) as plans:
            assert store.open_due(tx, START, 5) == []
            assert store.addresses_with_failures(tx, "h7", ["1", "2"]) == []
    unique = (
        "host=? AND address=?" if engine.dialect.name == "sqlite" else "uq_devices_host_address"
    )
    assert "ix_devices_retry_at" in plans[0]
    assert unique in plans[1]


def test_end_of_an_outage_opens_all_devices_in_four_statements(engine: sa.Engine) -> None:
    cards = [
        rows.insert_card(engine, f"h{n}", handles=0, failing=True, retry_at=START) for n in range(3)
    ]
    with engine.begin() as tx, explain_statements(tx) as plans:
        assert completion.open_devices(tx, START) == 3
    assert len(plans) == 4
    assert "SUBQUERY" not in str(plans), "MariaDB would scan all providers for each device"
    for card in cards:
        (provider,) = rows.read(engine, schema.providers, uuid=card.provider)
        assert provider["stale_since"] == START
    assert not any(row["failing"] for row in rows.read(engine, schema.devices))


def test_device_that_waits_longest_is_opened_first(engine: sa.Engine) -> None:
    for n in (1, 3, 2):
        retry_at = START + timedelta(seconds=n)
        rows.insert_card(engine, f"h{n}", handles=0, failing=True, retry_at=retry_at)
    with engine.begin() as tx:
        store.open_due(tx, START + timedelta(seconds=9), 2)
    assert [row["host"] for row in rows.read(engine, schema.devices, failing=True)] == ["h3"]
