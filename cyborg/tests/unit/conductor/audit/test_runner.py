# SPDX-License-Identifier: Apache-2.0
"""Audits on each kind of database, with a real Placement and a Nova on a socket."""

import threading
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.audit import runner
from cyborg.conductor.audit import runner as lease
from cyborg.conductor.placement.compute_nodes import ComputeNodeResolver
from cyborg.core import naming
from cyborg.core.errors import Conflict, Invalid, NotFound, TimedOut, Unavailable
from cyborg.db import schema
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.audit_setup import Env
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.hosts.hosts import card

__all__ = ["node", "placement_adapter"]


@pytest.fixture
def env(engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    return Env(engine, node, fake_nova)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    """An environment on SQLite, for tests that do not depend on the database."""
    return Env(sqlite_engine, node, fake_nova)


def test_audit_of_equal_sources_has_no_findings(env: Env) -> None:
    row = env.run_audit()
    assert (row["state"], row["findings"], row["num_findings"]) == ("DONE", [], 0)
    assert (row["hosts_done"], row["hosts_total"], row["owner"]) == (1, 1, None)
    assert row["sources"] == ["hardware", "database", "placement", "nova"]
    assert (env.paused, len(env.fake_nova.requested_paths)) == ([], 2)


def test_audit_reports_differences_and_runs_safe_repairs(env: Env) -> None:
    leftover = env.add_leftover_provider()
    env.agents.devices[env.host.name] = [card(0), card(1), card(2)]
    env.node.client.put(
        f"/resource_providers/{env.provider(1)}/traits",
        json={"resource_provider_generation": generation(env, 1), "traits": []},
    )
    consumer = env.node.allocate(env.provider(1), "CUSTOM_FAKE")
    (dirty,) = rows.read(env.engine, schema.attach_handles, arq_id=None)[-1:]
    rows.update(env.engine, schema.attach_handles, dirty["id"], needs_cleaning=True)
    del env.fake_nova.servers[env.instance]
    expected = [
        ("device_unrecorded", "device 0000:02:00.0"),
        ("traits_differ", f"provider {env.host.name}_0000:01:00.0"),
        ("provider_leftover", f"provider {env.host.name}_lost"),
        ("handle_dirty", "handle 0000:01:00.0/0001"),
        ("instance_gone", f"request {env.request}"),
        ("allocation_unused", f"instance {consumer} on {env.host.name}_0000:01:00.0"),
    ]
    assert env.run_and_list() == expected
    assert env.paused == [runner.RECHECK_DELAY]
    row = env.run_audit(repair=True)
    results = {f["kind"]: (f["repair"], f["repaired"], f["error"]) for f in row["findings"]}
    assert results == {
        "device_unrecorded": ("report", True, None),
        "traits_differ": ("publish", True, None),
        "provider_leftover": ("delete_provider", True, None),
        "handle_dirty": ("clean", True, None),
        "instance_gone": (None, False, None),
        "allocation_unused": (None, False, None),
    }
    assert env.woken == ["publisher", "jobs"]
    assert env.node.placement.get(leftover) is None
    (job,) = rows.read(env.engine, schema.jobs)
    assert (job["kind"], job["host"]) == ("release", env.host.name)
    env.send_report()
    # The repairs are done; findings that need an operator remain.
    assert [kind for kind, _ in env.run_and_list()] == ["instance_gone", "allocation_unused"]


def generation(env: Env, n: int) -> int:
    summary = env.node.placement.get(env.provider(n))
    assert summary is not None
    return summary.generation


def test_difference_that_disappears_before_the_recheck_is_no_finding(sqlite_env: Env) -> None:
    sqlite_env.agents.devices[sqlite_env.host.name] = [card(0), card(1), card(2)]
    sqlite_env.node.placement.delete(sqlite_env.provider(1))
    sqlite_env.meanwhile = sqlite_env.send_report
    assert sqlite_env.run_and_list() == [
        ("provider_missing", f"provider {sqlite_env.host.name}_0000:01:00.0")
    ]
    call_count = len(sqlite_env.agents.calls)
    assert (call_count, sqlite_env.paused) == (2, [runner.RECHECK_DELAY])


def test_foreign_provider_is_not_read(sqlite_env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = str(uuid4())
    sqlite_env.node.placement.create(
        foreign, f"{sqlite_env.host.name}_bandwidth", sqlite_env.node.uuid
    )
    read = sqlite_env.node.placement.inventories
    read_uuids: list[str] = []

    def record(uuid: str) -> Any:
        read_uuids.append(uuid)
        return read(uuid)

    monkeypatch.setattr(sqlite_env.node.placement, "inventories", record)
    assert sqlite_env.run_and_list() == []
    assert sorted(read_uuids) == sorted([sqlite_env.provider(0), sqlite_env.provider(1)])


def test_own_provider_without_trait_is_identified_by_its_name(sqlite_env: Env) -> None:
    leftover = sqlite_env.provider(7)
    sqlite_env.node.placement.create(
        leftover, f"{sqlite_env.host.name}_0000:07:00.0", sqlite_env.node.uuid
    )
    assert sqlite_env.run_and_list() == [
        ("provider_leftover", f"provider {sqlite_env.host.name}_0000:07:00.0")
    ]


def test_leftover_provider_with_allocations_is_kept(sqlite_env: Env) -> None:
    leftover = sqlite_env.add_leftover_provider()
    body = {"CUSTOM_FAKE": {"total": 1}}
    summary = sqlite_env.node.placement.get(leftover)
    assert summary is not None
    sqlite_env.node.placement.set_inventories(leftover, summary.generation, body)
    sqlite_env.node.allocate(leftover, "CUSTOM_FAKE")
    (finding,) = sqlite_env.run_audit(repair=True)["findings"]
    assert (finding["kind"], finding["repair"], finding["repaired"]) == (
        "provider_leftover",
        None,
        False,
    )
    assert "1 consumers" in finding["explanation"]
    assert sqlite_env.node.placement.get(leftover) is not None


def test_leftover_provider_that_cannot_be_deleted_has_the_error(sqlite_env: Env) -> None:
    leftover = sqlite_env.add_leftover_provider()
    sqlite_env.node.placement.create(str(uuid4()), f"{sqlite_env.host.name}-child", leftover)
    (finding,) = sqlite_env.run_audit(repair=True)["findings"]
    assert finding["repaired"] is False
    assert "409" in finding["error"]


def test_orphan_is_marked_suspected_and_not_released(env: Env) -> None:
    assert env.node.client.delete(f"/allocations/{env.instance}").status_code == 204
    (finding,) = env.run_audit(repair=True)["findings"]
    assert (finding["kind"], finding["repair"], finding["repaired"]) == (
        "allocation_missing",
        "reconcile",
        True,
    )
    (row,) = rows.read(env.engine, schema.arqs, uuid=env.request)
    assert (row["state"], row["orphan_since"]) == ("Bound", env.clock.now)
    (second,) = env.run_audit(repair=True)["findings"]
    assert second["repair"] is None


def test_unreachable_agent_hides_only_its_source(sqlite_env: Env) -> None:
    sqlite_env.agents.unreachable.add(sqlite_env.host.name)
    sqlite_env.node.placement.delete(sqlite_env.provider(1))
    assert [kind for kind, _ in sqlite_env.run_and_list()] == [
        "agent_unreachable",
        "provider_missing",
    ]
    sqlite_env.send_report()
    sqlite_env.clock.now += timedelta(hours=1)
    sqlite_env.paused.clear()
    call_count = len(sqlite_env.agents.calls)
    # After an outage of the conductors the deadline has passed, and the agent may run.
    sqlite_env.run_and_list()
    assert len(sqlite_env.agents.calls) > call_count
    call_count = len(sqlite_env.agents.calls)
    for agent in rows.read(sqlite_env.engine, schema.services):
        rows.update(
            sqlite_env.engine, schema.services, agent["id"], down_since=sqlite_env.clock.now
        )
    kinds = [kind for kind, _ in sqlite_env.run_and_list()]
    # An agent that is marked down is not called.
    assert "agent_unreachable" in kinds
    assert len(sqlite_env.agents.calls) == call_count


def test_agent_that_does_not_answer_delays_no_other_host(sqlite_env: Env) -> None:
    env = sqlite_env
    names = sorted(f"a{n}-{uuid4().hex[:6]}" for n in range(5))
    for name in names:
        rows.insert_agent(env.engine, name)
        env.agents.devices[name] = []
    hardware, others = env.agents.hardware, threading.Barrier(len(names), timeout=60)

    def answer(host: str, driver: str | None = None) -> Any:
        if host in names:
            # All of them are called at a time, also those after the first.
            others.wait()
        if host == names[0]:
            raise TimedOut(f"agent {host} did not answer in 30 s")
        return hardware(host)

    env.agents.hardware = answer  # type: ignore[method-assign]
    row = env.run_audit()
    assert (row["state"], row["hosts_done"], row["last_host"]) == ("DONE", 6, env.host.name)
    assert [(f["host"], f["kind"]) for f in row["findings"]] == [(names[0], "agent_unreachable")]


def test_number_of_hosts_that_are_audited_at_a_time_is_limited(
    sqlite_env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = sqlite_env
    monkeypatch.setattr(runner, "MAX_HOSTS", 2)
    for n in range(6):
        rows.insert_agent(env.engine, f"a{n}")
        env.agents.devices[f"a{n}"] = []
    hardware, lock = env.agents.hardware, threading.Lock()
    running = most = 0

    def answer(host: str, driver: str | None = None) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        try:
            return hardware(host)
        finally:
            with lock:
                running -= 1

    env.agents.hardware = answer  # type: ignore[method-assign]
    assert env.run_audit()["hosts_done"] == 7
    assert most <= 2


def test_audit_without_nova_has_three_sources(sqlite_engine: sa.Engine, node: Node) -> None:
    env = Env(sqlite_engine, node, None)
    assert node.client.delete(f"/allocations/{env.instance}").status_code == 204
    row = env.run_audit()
    # Without allocations, a missing allocation is no finding.
    assert (row["state"], row["findings"]) == ("DONE", [])
    assert row["sources"] == ["hardware", "database", "placement"]


def test_nova_outage_is_reported_once(sqlite_env: Env) -> None:
    rows.insert_agent(sqlite_env.engine, "zz-other")
    sqlite_env.fake_nova.status, sqlite_env.fake_nova.body = 503, {}
    row = sqlite_env.run_audit()
    results = [(f["host"], f["kind"]) for f in row["findings"]]
    assert (sqlite_env.host.name, "nova_unavailable") in results
    assert [kind for _, kind in results].count("nova_unavailable") == 1
    assert len(sqlite_env.fake_nova.requested_paths) == 1


def test_placement_outage_fails_the_audit(sqlite_env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: Any) -> None:
        raise Unavailable("Placement cannot be reached: no route")

    monkeypatch.setattr(sqlite_env.node.placement, "tree", unavailable)
    row = sqlite_env.run_audit()
    assert (row["state"], row["error"]) == ("FAILED", "Placement cannot be reached: no route")
    assert row["hosts_done"] == 0


def test_threads_that_wait_for_their_turn_make_no_call_after_an_outage(
    sqlite_env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = sqlite_env
    env.conf.set_override("max_placement_calls", 1, group="conductor")
    names = [f"a{n}" for n in range(9)]
    for name in names:
        rows.insert_agent(env.engine, name)
        env.agents.devices[name] = []
    hardware, has_turn = env.agents.hardware, threading.Event()
    answered, calls = threading.Barrier(len(names), timeout=60), list[str]()

    def answer(host: str, driver: str | None = None) -> Any:
        if host != names[0]:
            has_turn.wait(60)
        if host in names[1:]:
            answered.wait()
        return hardware(host)

    def find(resolver: ComputeNodeResolver, host: str) -> Any:
        calls.append(host)
        has_turn.set()
        if host == names[0]:
            answered.wait()
        threading.Event().wait(0.3)  # as for a Placement that does not answer
        raise TimedOut("Placement did not answer")

    env.agents.hardware = answer  # type: ignore[method-assign]
    monkeypatch.setattr(ComputeNodeResolver, "find", find)
    row = env.run_audit()
    assert (row["state"], row["error"]) == ("FAILED", "Placement did not answer")
    assert (calls[0], len(calls) < 4) == (names[0], True), calls


def test_audit_runs_a_constant_number_of_statements(sqlite_env: Env) -> None:
    def cost() -> int:
        uuid = sqlite_env.audits.create(None, False)["uuid"]
        with count_statements(sqlite_env.engine) as counted:
            sqlite_env.audits.run_once()
        assert sqlite_env.row(uuid)["findings"] == []
        return len(counted)

    small = cost()
    sqlite_env.agents.devices[sqlite_env.host.name] = [card(n, 4) for n in range(12)]
    sqlite_env.send_report()
    for n in range(2, 12):
        sqlite_env.bind(n)
    assert cost() == small


def test_audit_with_expired_lease_is_continued_by_another_conductor(env: Env) -> None:
    names = sorted(f"h{n}-{uuid4().hex[:6]}" for n in range(3))
    for name in names:
        rows.insert_agent(env.engine, name)
        env.agents.devices[name] = []
    uuid = env.audits.create(None, False)["uuid"]
    hardware = env.agents.hardware

    def die_at_second(host: str, driver: str | None = None) -> Any:
        if host == names[1]:
            env.agents.hardware = hardware  # type: ignore[method-assign]
            raise KeyboardInterrupt
        return hardware(host)

    env.agents.hardware = die_at_second  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        env.audits.run_once()
    partial = env.row(uuid)
    assert (partial["state"], partial["hosts_done"], partial["last_host"]) == (
        "RUNNING",
        2,
        names[0],
    )
    assert env.new_runner().run_once() == 0  # the lease is still valid
    env.clock.now += timedelta(days=1)
    assert env.new_runner().run_once() == 1
    row = env.row(uuid)
    assert (row["state"], row["hosts_done"], row["hosts_total"]) == ("DONE", 4, 4)
    hosts_called = [host for host in env.agents.calls if host in names]
    assert hosts_called.count(names[0]) == 1


def test_runner_without_lease_writes_nothing(sqlite_env: Env) -> None:
    uuid = sqlite_env.audits.create(None, False)["uuid"]
    sqlite_env.node.placement.delete(sqlite_env.provider(1))

    def meanwhile() -> None:
        (row,) = rows.read(sqlite_env.engine, schema.audits)
        rows.update(sqlite_env.engine, schema.audits, row["id"], owner="another")

    sqlite_env.meanwhile = meanwhile
    assert sqlite_env.audits.run_once() == 0
    assert (sqlite_env.row(uuid)["state"], sqlite_env.row(uuid)["hosts_done"]) == ("RUNNING", 0)


def test_stop_releases_the_audit(sqlite_env: Env) -> None:
    uuid = sqlite_env.audits.create(None, False)["uuid"]
    sqlite_env.node.placement.delete(sqlite_env.provider(1))
    sqlite_env.meanwhile = sqlite_env.audits.stop
    assert sqlite_env.audits.run_once() == 0
    assert (sqlite_env.row(uuid)["owner"], sqlite_env.row(uuid)["lease_until"]) == (None, None)
    sqlite_env.meanwhile = lambda: None
    assert sqlite_env.new_runner().run_once() == 1
    assert sqlite_env.row(uuid)["num_findings"] == 1


def test_findings_over_the_limit_are_omitted(
    sqlite_env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "MAX_FINDINGS", 2)
    for n in range(4):
        rows.insert_agent(sqlite_env.engine, f"zz-{n}")
        sqlite_env.agents.unreachable.add(f"zz-{n}")
    row = sqlite_env.run_audit()
    assert row["num_findings"] == 4
    assert [f["kind"] for f in row["findings"]] == ["agent_unreachable"] * 2 + ["too_many"]


def test_audit_of_one_host_ignores_others(sqlite_env: Env) -> None:
    rows.insert_agent(sqlite_env.engine, "zz-other")
    sqlite_env.agents.unreachable.add("zz-other")
    assert sqlite_env.run_audit(host=sqlite_env.host.name)["num_findings"] == 0
    (finding,) = sqlite_env.run_audit(host="zz-other")["findings"]
    assert (finding["host"], finding["kind"]) == ("zz-other", "agent_unreachable")
    with pytest.raises(NotFound, match="nobody"):
        sqlite_env.audits.create("nobody", False)
    for host, repair in (("", False), ("a\nb", False), (7, False), (None, "yes")):
        with pytest.raises(Invalid):
            sqlite_env.audits.create(host, repair)  # type: ignore[arg-type]


def test_unexpected_error_fails_the_audit(sqlite_env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(sqlite_env.node.placement, "tree", fail)
    row = sqlite_env.run_audit()
    assert (row["state"], row["error"]) == (
        "FAILED",
        "internal error: the conductor's log has it",
    )


def test_sweep_deletes_old_audits(env: Env) -> None:
    done = env.run_audit()
    waiting = env.audits.create(None, False)["uuid"]
    old = env.clock.now - runner.RETENTION - timedelta(seconds=1)
    rows.update(env.engine, schema.audits, done["id"], updated_at=old)
    assert env.audits.sweep() == 1
    assert [row["uuid"] for row in rows.read(env.engine, schema.audits)] == [waiting]


def test_create_over_the_limit_of_open_audits_is_refused(
    sqlite_env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_OPEN_AUDITS", 2)
    for _ in range(2):
        sqlite_env.audits.create(None, False)
    with pytest.raises(Conflict, match="2 audits are open"):
        sqlite_env.audits.create(sqlite_env.host.name, False)
    assert sqlite_env.audits.run_once() == 2
    sqlite_env.audits.create(None, False)


def test_provider_reported_during_its_deletion_is_created_again(
    sqlite_env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement, uuid = sqlite_env.node.placement, sqlite_env.provider(2)
    placement.create(
        uuid, naming.provider_name(sqlite_env.host.name, card(2).address), sqlite_env.node.uuid
    )
    placement.set_traits(uuid, 0, ["OWNER_CYBORG"])
    delete = placement.delete

    def delete_late(uuid: str) -> None:
        sqlite_env.agents.devices[sqlite_env.host.name] = [card(0), card(1), card(2)]
        sqlite_env.send_report()
        delete(uuid)

    monkeypatch.setattr(placement, "delete", delete_late)
    (finding,) = sqlite_env.run_audit(repair=True)["findings"]
    assert (finding["kind"], finding["repaired"]) == ("provider_leftover", True)
    assert placement.get(uuid) is None
    sqlite_env.publish()
    assert placement.inventories(uuid), "the device is reported, so its provider is created again"
