# SPDX-License-Identifier: Apache-2.0
"""Devices of boots that Nova does not attach: what the agent attaches, and what it reports."""

from functools import partial
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg import os_acc
from cyborg.agent.guests.reassertion import Reasserter, is_owner
from cyborg.conductor.attachments.deliveries import GuestDeliveries
from cyborg.conductor.inventory.function_owners import FunctionOwners
from cyborg.conductor.notifications.notifications import ArqEventRecorder, NotificationBuilder
from cyborg.core.errors import DriverFailed, Invalid, Stale
from cyborg.db import schema
from cyborg.db.binding import read as arqs
from cyborg.db.engine import Reader
from cyborg.db.totals import read as totals
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.telemetry.recorder import MetricRecorder
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import Env
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.options import make_conf

__all__ = ["node", "placement_adapter"]

HOST_WORK = ("prepares",)
ATTACHED, FAILED = "accelerator_request.attach.end", "accelerator_request.attach.error"


class Cloud(Env):
    """A host whose agent attaches the VFIO handles of the servers that Nova builds."""

    def __init__(self, engine: sa.Engine, node: Node, nova: FakeNova) -> None:
        self.is_ready = False
        super().__init__(engine, node, nova, abilities=HOST_WORK, live=True)
        self.is_ready = True
        with engine.begin() as tx:
            tx.execute(sa.update(schema.attach_handles).values(type="VFIO"))
        (self.agent,) = rows.read(engine, schema.services)
        conf = make_conf()
        is_enabled(conf)  # registers the option
        conf.set_override("driver", ["messagingv2"], group=GROUP)
        self.uow = UnitOfWork(engine)
        recorder = ArqEventRecorder(conf, NotificationBuilder(conf, now=self.uow.clock))
        self.deliveries = GuestDeliveries(self.uow, recorder, MetricRecorder())
        self.monotonic = 0.0
        self.start_agent()

    def start_agent(self) -> None:
        """Start the agent of the host, again if it runs."""
        super().start_agent()
        if self.is_ready:
            self.reasserter = Reasserter(
                self.node.name,
                self.agent["epoch"],
                self,  # type: ignore[arg-type]
                self.guests,
                lambda: None,
                60.0,
                clock=lambda: self.monotonic,
            )

    def get_guest_devices(self, host: str, epoch: str) -> Any:
        """Call the conductor."""
        return self.runner.guests.list_of_host(host, epoch)

    def report_guest_devices(self, host: str, epoch: str, devices: Any) -> None:
        """Call the conductor."""
        self.deliveries.record(host, epoch, devices)

    def find_function_owners(self, host: str, functions: Any) -> Any:
        """Call the conductor."""
        return FunctionOwners(self.uow).find(host, functions)

    def check_guests(self) -> None:
        """Check nothing: the devices of this cloud belong to no attachment."""

    def arq(self) -> dict[str, Any]:
        """Return the ARQ of the server."""
        (row,) = rows.read(self.engine, schema.arqs, instance_uuid=self.instance)
        return row

    def missing(self) -> list[str]:
        """Return the ARQs whose devices running guests lack, which the summary counts."""
        with Reader(self.engine).connect() as connection:
            found = arqs.find(connection, attach_failed=True)
            assert totals.read(connection, now=self.now).guest_devices_missing == len(found)
        return [row["uuid"] for row in found]

    def events(self) -> list[tuple[str, Any]]:
        """Return the type and the error of each recorded notification."""
        return [
            (row["payload"]["event_type"], row["payload"]["payload"]["data"]["error"])
            for row in rows.read(self.engine, schema.outbox, kind="notification")
        ]


@pytest.fixture
def cloud(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Cloud:
    return Cloud(sqlite_engine, node, fake_nova)


def refuse(instance: str, device: str) -> None:
    """Refuse each device, as libvirt does without a free PCIe root port."""
    raise DriverFailed("libvirt refused: No more available PCI slots")


def test_guest_gets_its_device_at_each_start_on_each_database(
    engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    cloud = Cloud(engine, node, fake_nova)
    before = cloud.arq()
    assert (before["state"], before["attached_at"]) == ("Bound", None)
    for starts in (1, 2):
        cloud.hypervisor.start(cloud.instance)
        assert cloud.reasserter.run_once() == 60.0
        assert cloud.hypervisor.count(cloud.instance) == 1
        assert cloud.events() == [(ATTACHED, None)] * starts
    after = cloud.arq()
    assert after["attached_at"] is not None
    # The orphan collector uses it as the time of the bind.
    assert after["updated_at"] == before["updated_at"]
    (device,) = cloud.hypervisor.guests[cloud.instance].running.values()
    assert 'managed="no"' in device


def test_guest_without_its_device_has_an_error_until_it_gets_it(cloud: Cloud) -> None:
    attach = cloud.hypervisor.attach
    cloud.hypervisor.attach = refuse  # type: ignore[method-assign]
    for cloud.monotonic in (0.0, 30.0, 60.0, 90.0):
        cloud.reasserter.run_once()
    error = "libvirt refused: No more available PCI slots"
    assert (cloud.arq()["attach_error"], cloud.arq()["attached_at"]) == (error, None)
    assert cloud.arq()["state"] == "Bound"
    assert cloud.events() == [(FAILED, error)]
    assert cloud.missing() == [cloud.arq()["uuid"]]
    since = cloud.arq()["attach_failed_at"]
    body = [{"arq": cloud.arq()["uuid"], "error": "another one"}]
    cloud.report_guest_devices(cloud.node.name, cloud.agent["epoch"], body)
    assert cloud.arq()["attach_failed_at"] == since is not None, "since the first error"
    cloud.start_agent()
    cloud.hypervisor.attach = attach  # type: ignore[method-assign]
    cloud.reasserter.run_once()
    assert (cloud.arq()["attach_error"], cloud.arq()["attach_failed_at"]) == (None, None)
    assert cloud.missing() == []
    assert cloud.events() == [(FAILED, error), (ATTACHED, None)]


def test_error_of_a_guest_ends_with_its_stop_and_its_next_start_is_reported(cloud: Cloud) -> None:
    attach = cloud.hypervisor.attach
    cloud.hypervisor.attach = refuse  # type: ignore[method-assign]
    for cloud.monotonic in (0.0, 30.0, 60.0):
        cloud.reasserter.run_once()
    assert cloud.missing() == [cloud.arq()["uuid"]]
    before = cloud.arq()
    cloud.hypervisor.guests[cloud.instance].runs = False
    assert cloud.reasserter.run_once() == 60.0, "it lacks nothing"
    after = cloud.arq()
    assert (after["attach_error"], after["attach_failed_at"], after["attached_at"]) == (None,) * 3
    assert after["updated_at"] == before["updated_at"]
    assert cloud.missing() == []
    cloud.hypervisor.start(cloud.instance)
    for cloud.monotonic in (100.0, 130.0, 160.0):
        cloud.reasserter.run_once()
    assert cloud.missing() == [after["uuid"]]
    error = "libvirt refused: No more available PCI slots"
    assert cloud.events() == [(FAILED, error)] * 2, "once for each start"
    cloud.hypervisor.attach = attach  # type: ignore[method-assign]
    cloud.reasserter.run_once()
    since = cloud.arq()["attached_at"]
    cloud.hypervisor.guests[cloud.instance].runs = False
    cloud.reasserter.run_once()
    assert cloud.arq()["attached_at"] == since is not None, "at its last start"


def test_unbound_arq_of_a_guest_without_its_device_is_not_missing(cloud: Cloud) -> None:
    cloud.hypervisor.attach = refuse  # type: ignore[method-assign]
    for cloud.monotonic in (0.0, 30.0, 60.0, 90.0):
        cloud.reasserter.run_once()
    assert cloud.missing() == [cloud.arq()["uuid"]]
    cloud.arqs().unbind([{"request": cloud.arq()["uuid"]}], None)
    assert cloud.missing() == []


def test_restarted_agent_reports_nothing_that_is_recorded(cloud: Cloud) -> None:
    cloud.reasserter.run_once()
    cloud.start_agent()
    assert cloud.reasserter.run_once() == 60.0
    assert (cloud.hypervisor.attached, cloud.events()) == (1, [(ATTACHED, None)])


def test_unbound_arq_has_no_device_to_attach(cloud: Cloud) -> None:
    cloud.reasserter.run_once()
    arq = cloud.arq()
    cloud.arqs().unbind([{"request": arq["uuid"]}], None)
    (row,) = rows.read(cloud.engine, schema.arqs)
    assert (row["attached_at"], row["attach_error"]) == (None, None)
    assert cloud.get_guest_devices(cloud.node.name, cloud.agent["epoch"]) == {"devices": []}
    # A report that is late changes nothing.
    body = [{"arq": arq["uuid"], "error": None}]
    cloud.report_guest_devices(cloud.node.name, cloud.agent["epoch"], body)
    assert rows.read(cloud.engine, schema.arqs)[0]["attached_at"] is None


def test_device_is_attached_after_the_host_has_restored_it(cloud: Cloud) -> None:
    """After a reboot of the host, a guest may start before its device is prepared."""
    arq = cloud.arq()
    job = rows.insert(
        cloud.engine,
        schema.jobs,
        kind="restore",
        host=cloud.node.name,
        subject=cloud.instance,
        arguments={},
        next_try_at=cloud.now,
    )
    rows.update(cloud.engine, schema.arqs, arq["id"], job_id=job)
    assert cloud.reasserter.run_once() == 2.0
    assert cloud.hypervisor.count(cloud.instance) == 0
    rows.update(cloud.engine, schema.jobs, job, state="done")
    cloud.reasserter.notice_job()
    assert cloud.reasserter.run_once() == 60.0
    assert cloud.hypervisor.count(cloud.instance) == 1


def test_device_that_nova_forgets_is_attached(cloud: Cloud) -> None:
    """Nova starts a guest at the boot of its host without the devices of its flavor."""
    with cloud.engine.begin() as tx:
        tx.execute(sa.update(schema.attach_handles).values(type="PCI"))
    (item,) = cloud.get_guest_devices(cloud.node.name, cloud.agent["epoch"])["devices"]
    assert item["attached"], "not reported again"
    cloud.hypervisor.start(cloud.instance)
    cloud.hypervisor.attach(cloud.instance, os_acc.attach(item["arq"]))  # as Nova does
    assert cloud.reasserter.run_once() == 60.0
    assert (cloud.arq()["attached_at"], cloud.events()) == (None, [])
    cloud.hypervisor.start(cloud.instance)
    assert cloud.hypervisor.count(cloud.instance) == 0
    assert cloud.reasserter.run_once() == 60.0
    assert cloud.hypervisor.count(cloud.instance) == 1
    assert cloud.arq()["attached_at"] is not None
    assert cloud.events() == [(ATTACHED, None)]


@pytest.mark.parametrize("exception", ["context", "port", "attachment"])
def test_device_that_nova_may_withhold_is_left_to_nova(cloud: Cloud, exception: str) -> None:
    """The guest gets the device of a context or of an attachment at its next start by Nova.

    The function of a port that was deleted must not come back without its MAC address and VLAN.
    """
    with cloud.engine.begin() as tx:
        tx.execute(sa.update(schema.attach_handles).values(type="PCI"))
    arq = cloud.arq()
    (handle,) = rows.read(cloud.engine, schema.attach_handles, arq_id=arq["id"])
    if exception == "context":
        values = {"state": "bound", "groups": [], "config_data": {}}
        context = rows.insert(cloud.engine, schema.device_contexts, **values)
        rows.update(cloud.engine, schema.arqs, arq["id"], context_id=context)
    elif exception == "port":
        info = {**handle["info"], "physical_network": "physnet1"}
        rows.update(cloud.engine, schema.attach_handles, handle["id"], info=info)
    else:
        cloud.attach(mode="next-boot")
        cloud.settle()
    answer = cloud.get_guest_devices(cloud.node.name, cloud.agent["epoch"])
    found = [item["arq"]["uuid"] for item in answer["devices"]]
    assert found == ([arq["uuid"]] if exception == "attachment" else [])


@pytest.mark.parametrize("owned", [True, False])
def test_device_that_was_released_since_it_was_listed_is_not_attached(
    cloud: Cloud, *, owned: bool
) -> None:
    arq = cloud.arq()

    def release(_: Any) -> None:
        if not owned:
            cloud.arqs().unbind([{"request": arq["uuid"]}], None)

    cloud.guests.make_ready = release
    cloud.guests.is_owner = partial(is_owner, cloud.node.name, cloud)  # type: ignore[arg-type]
    cloud.reasserter.run_once()
    assert cloud.hypervisor.count(cloud.instance) == int(owned)


@pytest.mark.parametrize("type_", ["MDEV", "TEST_PCI"])
def test_device_that_nova_attaches_is_left_to_nova(cloud: Cloud, type_: str) -> None:
    with cloud.engine.begin() as tx:
        tx.execute(sa.update(schema.attach_handles).values(type=type_))
    assert cloud.get_guest_devices(cloud.node.name, cloud.agent["epoch"]) == {"devices": []}


def test_live_attachment_of_a_vfio_handle_is_attached_by_its_own_job(cloud: Cloud) -> None:
    cloud.reasserter.run_once()
    cloud.attach(mode="live")
    cloud.settle()
    assert cloud.rows()[0]["state"] == "attached"
    assert cloud.hypervisor.count(cloud.instance) == 2
    cloud.hypervisor.start(cloud.instance)
    cloud.reasserter.run_once()
    assert cloud.hypervisor.count(cloud.instance) == 2
    cloud.detach()
    cloud.settle()
    assert cloud.hypervisor.count(cloud.instance) == 1


def test_report_costs_the_same_statements_for_any_number_of_devices(cloud: Cloud) -> None:
    others = [cloud.add_server() for _ in range(2)]
    uuids = [row["uuid"] for row in rows.read(cloud.engine, schema.arqs)]
    assert len(uuids) == len(others) + 1
    counts = []
    for reported in (uuids[:1], uuids):
        body = [{"arq": uuid, "error": None} for uuid in reported]
        with count_statements(cloud.engine) as statements:
            cloud.report_guest_devices(cloud.node.name, cloud.agent["epoch"], body)
        counts.append(len(statements))
    assert counts[0] == counts[1]
    with count_statements(cloud.engine) as statements:
        answer = cloud.get_guest_devices(cloud.node.name, cloud.agent["epoch"])
    assert (len(answer["devices"]), len(statements)) == (3, 2)


def test_report_of_another_agent_is_refused(cloud: Cloud) -> None:
    body = [{"arq": cloud.arq()["uuid"], "error": "broken"}]
    with pytest.raises(Stale):
        cloud.report_guest_devices(cloud.node.name, str(uuid4()), body)
    rows.insert_agent(cloud.engine, "other")
    (other,) = rows.read(cloud.engine, schema.services, host="other")
    cloud.report_guest_devices("other", other["epoch"], body)
    assert cloud.arq()["attach_error"] is None
    with pytest.raises(Invalid):
        cloud.report_guest_devices(cloud.node.name, cloud.agent["epoch"], [{"arq": "x"}])
