# SPDX-License-Identifier: Apache-2.0
"""Layouts and images that a device loses with a reboot of its host."""

from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.drivers.rollout_controller import RolloutController
from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.conductor.jobs.programming import Partitions
from cyborg.conductor.jobs.reboot import LostValues
from cyborg.core.errors import WrongState
from cyborg.core.inventory.device import Ability, Device, Layout
from cyborg.db import schema
from cyborg.db.deployables import programming
from cyborg.db.devices import read as devices
from cyborg.db.engine import Reader
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.host_work import UNREACHABLE, JobsEnv
from cyborg.tests.fixtures.hosts.hosts import Host, card

LAYOUTS = (Layout("1", {"FPGA": 1}), Layout("4", {"FPGA": 4}))
IMAGE = str(uuid4())
APPLIED = ("device.layout.end", "1", None)
FAILED = ("device.layout.error", "1", "it broke")


class BootEnv(JobsEnv):
    """A host with a card that has layouts and can be programmed."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
        is_enabled(self.conf)  # registers the options of notifications
        self.conf.set_override("driver", ["log"], group=GROUP)
        self.jobs = self.new_dispatcher()
        self.hosts = build(Hosts, self.conf, self.uow, now=self.now)
        self.partitions = build(Partitions, self.conf, self.uow, now=self.now)
        self.lost = LostValues(self.uow, self.partitions, self.programs)
        self.host = Host(boot_id="boot 1")
        self.report("4")

    @property
    def device(self) -> dict[str, Any]:
        """The row of the card."""
        (row,) = rows.read(self.engine, schema.devices)
        return row

    @property
    def deployable(self) -> dict[str, Any]:
        """The row of the deployable of the card."""
        (row,) = rows.read(self.engine, schema.deployables)
        return row

    def report(self, layout: str, image: str | None = None) -> None:
        """Report the card with this layout and this image."""
        self.host.send(self.hosts, self.card(layout, image))

    def card(self, layout: str, image: str | None) -> Device:
        found = card(0, int(layout))
        (deployable,) = found.deployables
        return replace(
            found,
            deployables=(replace(deployable, bitstream_id=image),),
            abilities=frozenset({Ability.PARTITIONS, Ability.PROGRAMS}),
            layout=layout,
            layouts=LAYOUTS,
        )

    def apply_layout(self, layout: str) -> None:
        """Apply a layout as an operator does."""
        self.partitions.start(self.device["uuid"], layout)
        self.jobs.run_once()
        self.report(layout)
        assert (self.device["layout"], self.device["desired_layout"]) == (layout, layout)

    def program(self) -> None:
        """Program an image as an operator does."""
        self.programs.start(self.deployable["uuid"], IMAGE)
        self.jobs.run_once()
        assert self.deployable["desired_image"] == IMAGE
        self.report("4", IMAGE)

    def reboot(self) -> None:
        """Let the agent send its first heartbeat after a reboot of the host."""
        self.host = replace(self.host, epoch=str(uuid4()), boot_id=str(uuid4()), generation=0)
        # No discovery is complete yet: there is no digest.
        drivers = [backend.to_dict() for backend in self.host.backends]
        name, epoch, boot_id = self.host.name, self.host.epoch, self.host.boot_id
        self.hosts.heartbeat(name, epoch, "agent", "READY", drivers, None, {}, None, boot_id)

    def bind_card(self) -> str:
        """Let an ARQ own the first handle of the card; return its instance."""
        instance = str(uuid4())
        bind = {"instance_uuid": instance, "device_rp_uuid": self.deployable["rp_uuid"]}
        uuid = rows.insert_arq(self.engine, self.profile, state="Bound", **bind)
        (arq,) = rows.read(self.engine, schema.arqs, uuid=uuid)
        handle = rows.read(self.engine, schema.attach_handles)[0]
        rows.update(self.engine, schema.attach_handles, handle["id"], arq_id=arq["id"])
        return instance

    def retry(self) -> list[str]:
        """Return the kinds of the jobs that the agent has got within the maximum delay."""
        self.advance(100)
        return self.kinds()

    def errors(self) -> list[str]:
        """Return the errors of jobs that the card shows."""
        with Reader(self.engine).connect() as connection:
            return devices.find(connection)[0]["job_errors"]

    def custody(self) -> list[str]:
        """Return the events of the custody log."""
        return [row["event"] for row in rows.read(self.engine, schema.custody_records)]

    def notifications(self) -> list[tuple[str, str, str | None]]:
        """Return type, layout and error of the notifications."""
        found = [row["payload"] for row in rows.read(self.engine, schema.outbox)]
        data = [(each["event_type"], each["payload"]["data"]) for each in found]
        return [(event, fields["layout"], fields["error"]) for event, fields in data]

    def kinds(self) -> list[str]:
        """Return the kinds of the jobs that the sweep has created and the agent has done."""
        self.agents.calls.clear()
        self.lost.sweep()
        self.jobs.run_once()
        return self.agents.kinds()


@pytest.fixture
def env(engine: sa.Engine) -> BootEnv:
    return BootEnv(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> BootEnv:
    return BootEnv(sqlite_engine)


def test_lost_layout_is_applied_again(env: BootEnv) -> None:
    env.apply_layout("1")
    env.reboot()
    assert env.kinds() == [], "the host has not reported yet"
    env.report("4")
    assert (env.device["layout"], env.device["desired_layout"]) == ("4", "1")
    assert env.kinds() == ["partition"]
    (call,) = env.agents.calls
    assert (call["layout"], call["previous_layout"]) == ("1", "4")
    env.report("1")
    assert env.device["layout"] == "1"
    assert env.kinds() == []


def test_lost_image_is_programmed_again(env: BootEnv) -> None:
    env.program()
    env.reboot()
    env.report("4")
    assert env.deployable.get("bitstream_id") is None
    assert env.kinds() == ["program"]
    assert env.agents.calls[0]["image"] == IMAGE
    assert env.deployable["bitstream_id"] == IMAGE
    assert env.kinds() == []


def test_values_that_survive_the_reboot_are_not_applied_again(sqlite_env: BootEnv) -> None:
    env = sqlite_env
    env.apply_layout("1")
    env.reboot()
    env.report("1")
    assert env.device["boot_check"] is None
    assert env.kinds() == []


def test_change_without_a_reboot_is_left_as_it_is(sqlite_env: BootEnv) -> None:
    """An administrator of the host may change the device on purpose."""
    env = sqlite_env
    env.apply_layout("1")
    env.report("4")
    assert env.kinds() == []
    assert env.device["layout"] == "4"


def test_device_without_a_desired_layout_is_left_as_it_is(sqlite_env: BootEnv) -> None:
    env = sqlite_env
    env.reboot()
    env.report("1")
    assert env.kinds() == []


def test_layout_of_a_bound_device_is_retried(env: BootEnv) -> None:
    env.apply_layout("4")
    env.bind_card()
    env.agents.answers["partition"] = "failed"
    env.reboot()
    assert env.kinds() == ["partition"]
    env.report("1")
    assert env.device["layout"] == "4", "bound handles are not drained meanwhile"
    assert env.retry() == ["partition"]
    env.agents.answers["partition"] = "done"
    assert env.retry() == ["partition"]
    env.report("4")
    assert (env.device["layout"], env.device["desired_layout"]) == ("4", "4")
    assert env.kinds() == []
    assert env.open_jobs() == []


def test_layout_of_a_device_in_use_is_not_the_desired_one(sqlite_env: BootEnv) -> None:
    """No operator has applied it."""
    env = sqlite_env
    env.bind_card()
    env.reboot()
    assert env.kinds() == ["partition"]
    env.report("4")
    assert env.device["desired_layout"] is None


def test_image_is_checked_although_the_layout_was_applied_again(sqlite_env: BootEnv) -> None:
    env = sqlite_env
    env.program()
    instance = env.bind_card()
    env.reboot()
    assert env.kinds() == ["partition"]
    env.report("4")
    assert env.device["boot_check"] == "lost"
    env.arqs.delete(None, instance, None, allow_bound=True)
    assert env.kinds() == ["program"]


def test_failed_layout_is_retried_and_shown(env: BootEnv) -> None:
    env.apply_layout("1")
    env.agents.answers["partition"] = "failed"
    env.reboot()
    env.report("4")
    assert env.kinds() == ["partition"]
    assert env.kinds() == [], "not at once"
    (error,) = env.errors()
    assert error.startswith("partition job ")
    assert error.endswith(": it broke")
    records = env.custody()
    assert env.retry() == ["partition"]
    assert env.custody() == records, "only the first failure is recorded"
    assert env.notifications() == [APPLIED, FAILED]
    assert env.deployable["job_id"] is not None, "the device stays closed"
    env.agents.answers["partition"] = UNREACHABLE
    assert env.retry() == ["partition"]
    assert env.errors() == [error], "the error is that of the host"
    env.agents.answers["partition"] = "done"
    assert env.retry() == ["partition"]
    env.report("1")
    assert (env.device["layout"], env.errors(), env.open_jobs()) == ("1", [], [])
    assert env.notifications() == [APPLIED, FAILED, APPLIED]


def test_retried_layout_survives_another_reboot(sqlite_env: BootEnv) -> None:
    env = sqlite_env
    env.apply_layout("1")
    env.agents.answers["partition"] = "failed"
    env.reboot()
    env.report("4")
    env.kinds()
    env.reboot()
    env.agents.answers["partition"] = "done"
    assert env.kinds() == ["partition"], "the same job, at once"
    env.report("1")
    assert env.kinds() == []
    assert env.device["layout"] == "1"


def test_failed_image_is_retried_and_shown(env: BootEnv) -> None:
    env.program()
    env.agents.answers["program"] = "failed"
    env.reboot()
    env.report("4")
    assert env.kinds() == ["program"]
    (call,) = env.agents.calls
    assert call["seconds"] == env.conf.conductor.program_timeout
    (error,) = env.errors()
    assert error.startswith("program job ")
    assert env.retry() == ["program"]
    env.agents.answers["program"] = "done"
    assert env.retry() == ["program"]
    assert (env.deployable["bitstream_id"], env.errors()) == (IMAGE, [])


def test_report_locks_no_job_that_is_not_retried_after_a_reboot(env: BootEnv) -> None:
    """A completion locks its job before the agent, a report its agent first."""
    env.agents.answers["partition"] = UNREACHABLE
    env.partitions.start(env.device["uuid"], "1")
    env.jobs.run_once()
    (job,) = rows.read(env.engine, schema.jobs, state="pending")
    assert job["error"] is not None
    with count_statements(env.engine) as count:
        env.report("1")
    of_jobs = [text for text in count.statements if "FROM jobs" in text]
    assert of_jobs
    assert not [text for text in of_jobs if "FOR UPDATE" in text]


@pytest.mark.parametrize(("kind", "layout"), [("partition", "1"), ("program", "4")])
def test_cancelled_retry_ends_with_the_next_failure(
    sqlite_env: BootEnv, kind: str, layout: str
) -> None:
    env = sqlite_env
    rollouts = build(RolloutController, env.conf, env.uow, env.agents, now=env.now)
    if kind == "program":
        env.program()
    else:
        env.apply_layout("1")
    env.agents.answers[kind] = "failed"
    env.reboot()
    env.report("4")
    env.kinds()
    (job,) = rows.read(env.engine, schema.jobs, state="pending")
    rollouts.cancel(job["uuid"])
    assert env.open_jobs() == [kind], "the agent may work on it"
    assert env.kinds() == [kind]
    assert env.agents.calls[0]["cancelled"], "so that the agent does not begin again"
    (job,) = rows.read(env.engine, schema.jobs, uuid=job["uuid"])
    assert (job["state"], job["error"]) == ("cancelled", "it broke")
    env.report("4")
    assert env.deployable["job_id"] is None
    (failure,) = env.errors()
    assert failure.endswith(f"job {job['uuid']}: it broke")
    assert env.retry() == []
    with pytest.raises(WrongState, match="cannot be cancelled"):
        rollouts.cancel(job["uuid"])


def test_layout_that_is_not_possible_yet_waits(sqlite_env: BootEnv) -> None:
    """The kernel driver of the device may be bound later."""
    env = sqlite_env
    env.apply_layout("1")
    rows.update(env.engine, schema.devices, 1, desired_layout="9")
    env.reboot()
    env.report("4")
    assert env.kinds() == []
    assert env.device["boot_check"] == "lost"
    rows.update(env.engine, schema.devices, 1, desired_layout="1")
    assert env.kinds() == ["partition"]


def test_sweeps_of_two_conductors_create_one_job(env: BootEnv) -> None:
    env.apply_layout("1")
    env.reboot()
    env.report("4")
    other = LostValues(env.uow, env.partitions, env.programs)
    found = env.uow.run(lambda tx: programming.find_lost(tx, 5))
    assert len(found) == 1
    env.lost.sweep()
    assert other._apply(found[0])
    assert env.open_jobs() == ["partition"]


def test_new_layout_of_an_operator_ends_the_check(sqlite_env: BootEnv) -> None:
    env = sqlite_env
    env.apply_layout("1")
    env.reboot()
    env.report("4")
    assert env.device["boot_check"] == "lost"
    env.partitions.start(env.device["uuid"], "4")
    env.jobs.run_once()
    env.report("4")
    assert env.kinds() == []
    assert env.device["desired_layout"] == "4"
