# SPDX-License-Identifier: Apache-2.0
"""Two simulated HGX H100 hosts in a cloud of real processes, from the flavor to the partition.

MariaDB, RabbitMQ, Placement, the API, two conductors and two agents are real; so are the drivers,
and the library by which they call Fabric Manager. ``fixtures.device_sets.hgx_host`` says what is
simulated.
"""

import itertools
import json
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.device_sets.hgx_cloud import (
    HOSTS,
    PARTITIONS,
    SIZES,
    BootFailed,
    HgxCloud,
    NotAllocated,
    Server,
    Servers,
    run_hgx_cloud,
)
from cyborg.tests.fixtures.device_sets.host import SOURCE
from cyborg.tests.fixtures.machine.processes import BIN, wait_until

HOUR = timedelta(hours=1)
MAX_ATTEMPTS = 10  # of an allocation
pytestmark = [pytest.mark.services, pytest.mark.requires("compiler"), pytest.mark.matrix]


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[HgxCloud]:
    with run_hgx_cloud(tmp_path_factory.mktemp("hgx"), rabbit_url) as cloud:
        yield cloud


@pytest.fixture
def servers(cloud: HgxCloud) -> Iterator[Servers]:
    """Servers of one test, each of which has the whole active partition that it got."""
    servers = Servers(cloud)
    yield servers
    assert servers.violations == []


def boot(servers: Servers, size: int) -> Server:
    """Build a server on the first candidate, which must come soon."""
    for attempt in itertools.count(1):
        candidates = wait_until(
            f"a set of {size} is offered", lambda: servers.cloud.candidates(size)
        )
        try:
            return servers.boot(size, candidates[0])
        except NotAllocated:
            # A candidate may be reserved before it is allocated: Nova asks for others then.
            if attempt == MAX_ATTEMPTS:
                raise
    raise AssertionError("not reached")


def test_server_gets_one_partition_which_is_active_while_it_is_bound(
    cloud: HgxCloud, servers: Servers
) -> None:
    idle = {host: set[int]() for host in HOSTS}
    assert cloud.active() == idle
    for size in SIZES:
        server = boot(servers, size)
        assert len(server.gpus) == size
        assert server.gpus == PARTITIONS[server.partition]
        assert cloud.active() == {**idle, server.host: {server.partition}}
        servers.delete(server)
        wait_until("the partition is inactive", lambda: cloud.active() == idle)


@pytest.mark.long
def test_restarted_fabric_manager_gets_the_bound_partitions(
    cloud: HgxCloud, servers: Servers
) -> None:
    server = boot(servers, 2)
    fabric = cloud.hgx[server.host].fabric
    fabric.stop()
    fabric.start(restart=True)
    wait_until("Fabric Manager has the list", lambda: fabric.values("phase") == ["running"])
    assert set(fabric.active) == {server.partition}
    servers.delete(server)
    wait_until("the partition is inactive", lambda: not fabric.active)
    assert fabric.values("cut") + fabric.values("refused") == []


@pytest.mark.long
def test_sets_are_closed_while_fabric_manager_is_away(cloud: HgxCloud) -> None:
    host = HOSTS[0]
    fabric = cloud.hgx[host].fabric
    wait_until("sets are offered", lambda: cloud.offered()[host])
    fabric.stop()
    wait_until("no set is offered", lambda: not cloud.offered()[host])
    reason = cloud.find_device(host, SOURCE)["health_reason"]
    assert "Fabric Manager" in reason
    assert "systemctl" in reason or "start" in reason
    fabric.start(restart=True)
    wait_until("sets are offered again", lambda: cloud.offered()[host])


def test_failed_link_fails_the_boot_and_leaves_nothing(cloud: HgxCloud, servers: Servers) -> None:
    for host in cloud.hgx.values():
        host.fabric.set("fail", "fmActivateFabricPartition -10 0")
    with pytest.raises(BootFailed, match="BindFailed"):
        boot(servers, 4)
    for host in cloud.hgx.values():
        host.fabric.set("fail")
    failed = [d["job_failures"] for d in rows.read(cloud.engine, schema.devices, address=SOURCE)]
    assert "NVLink" in str(failed)
    wait_until("every GPU is clean", lambda: not cloud.find_used())
    servers.delete(boot(servers, 4))


@pytest.mark.long
def test_fatal_switch_error_closes_the_sets_with_links(cloud: HgxCloud) -> None:
    host = HOSTS[1]
    hgx = cloud.hgx[host]
    singles = {number for number, gpus in PARTITIONS.items() if len(gpus) == 1}
    hgx.log(
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 30 sourcetrack timeout error"
    )
    wait_until("only single GPUs are offered", lambda: cloud.offered()[host] == singles)
    hgx.clear_log()
    cloud.restart_agent(host)
    wait_until("sets are offered again", lambda: cloud.offered()[host] - singles)


def test_rebooted_host_activates_the_bound_partition_again(
    cloud: HgxCloud, servers: Servers
) -> None:
    server = boot(servers, 2)
    hgx = cloud.hgx[server.host]
    cloud.daemons[f"agent-{server.host}"].kill()
    hgx.boot()
    assert not hgx.fabric.active
    cloud.agent(server.host)
    wait_until("the partition is active", lambda: set(hgx.fabric.active) == {server.partition})
    wait_until("no ARQ waits", lambda: not rows.read(cloud.engine, schema.jobs, state="pending"))
    servers.delete(server)
    wait_until("every GPU is clean", lambda: not cloud.find_used())


@pytest.mark.long
def test_audit_finds_the_partition_of_another_program_which_closes_its_sets(
    cloud: HgxCloud,
) -> None:
    host = HOSTS[0]
    fabric = cloud.hgx[host].fabric
    overlapping = {number for number, gpus in PARTITIONS.items() if gpus & PARTITIONS[3]}
    wait_until("sets are offered", lambda: cloud.offered()[host] & overlapping)
    fabric.set("active", "3")
    wait_until("no set with its GPUs is offered", lambda: not cloud.offered()[host] & overlapping)
    found = [(f["Kind"], f["Object"], f["Repaired"]) for f in audit(cloud, "--repair")]
    assert found == [("partition_unused", f"partition {SOURCE}:3", "no")]
    assert set(fabric.active) == {3}
    fabric.set("active")
    wait_until("the sets are offered again", lambda: cloud.offered()[host] & overlapping)
    assert audit(cloud) == []


@pytest.mark.long
def test_audit_repair_deactivates_and_activates_partitions(
    cloud: HgxCloud, servers: Servers
) -> None:
    bound, lost = boot(servers, 2), boot(servers, 1)
    # As after the database was restored from a backup: it knows nothing of a server.
    assert audit(cloud) == []
    forget(cloud.engine, lost)
    # As after a restart of Fabric Manager without --restart.
    fabric = cloud.hgx[bound.host].fabric
    fabric.set("active", *(n for n in fabric.active if n != bound.partition))
    for row in rows.read(cloud.engine, schema.arqs):
        rows.update(cloud.engine, schema.arqs, row["id"], updated_at=row["created_at"] - HOUR)
    expected = {
        ("partition_inactive", f"partition {SOURCE}:{bound.partition}"),
        ("partition_unused", f"partition {SOURCE}:{lost.partition}"),
    }
    findings = [f for f in audit(cloud, "--repair") if f["Kind"].startswith("partition")]
    # The agent asks about its active partitions too: it may be the first to find the unused one.
    found = {(f["Kind"], f["Object"]) for f in findings}
    assert {f for f in expected if f[0] == "partition_inactive"} <= found <= expected
    # It may also deactivate that one between the audit and its repair.
    inactive = [f for f in findings if f["Kind"] == "partition_inactive"]
    assert all(f["Repaired"].startswith("yes") for f in inactive), findings
    active = {host: set[int]() for host in HOSTS} | {bound.host: {bound.partition}}
    wait_until("only the partition of the server is active", lambda: cloud.active() == active)
    servers.delete(bound)
    wait_until("every GPU is clean", lambda: not cloud.find_used())
    cloud.placement.delete(f"/allocations/{lost.uuid}")


def test_started_agent_has_a_partition_without_a_request_deactivated(
    cloud: HgxCloud, servers: Servers
) -> None:
    kept, lost = boot(servers, 2), boot(servers, 1)
    cloud.daemons[f"agent-{lost.host}"].kill()
    forget(cloud.engine, lost)
    cloud.agent(lost.host)
    active = {host: set[int]() for host in HOSTS} | {kept.host: {kept.partition}}
    wait_until("only the partition of the server is active", lambda: cloud.active() == active)
    wait_until("the other GPU is clean", lambda: len(cloud.find_used()) == len(kept.gpus))
    servers.delete(kept)
    wait_until("every GPU is clean", lambda: not cloud.find_used())
    cloud.placement.delete(f"/allocations/{lost.uuid}")


def audit(cloud: HgxCloud, *options: str) -> list[dict[str, Any]]:
    """Run ``cyborg audit`` and return its findings."""
    command = (BIN / "cyborg", "--os-auth-type", "none", "--os-endpoint", cloud.endpoint)
    process = subprocess.run(
        [*command, "audit", "-f", "json", *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode in (0, 1), process.stderr
    return list(json.loads(process.stdout))


def forget(engine: sa.Engine, server: Server) -> None:
    """Remove the ARQs of a server from the database, with the claims of their handles."""
    for arq in rows.read(engine, schema.arqs, instance_uuid=server.uuid):
        for handle in rows.read(engine, schema.attach_handles, arq_id=arq["id"]):
            free = {"arq_id": None, "set_id": None, "needs_cleaning": False}
            rows.update(engine, schema.attach_handles, handle["id"], **free)
        with engine.begin() as connection:
            connection.execute(sa.delete(schema.arqs).where(schema.arqs.c.id == arq["id"]))
