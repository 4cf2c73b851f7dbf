# SPDX-License-Identifier: Apache-2.0
"""Two simulated HGX H100 hosts in a cloud of real processes, from the flavor to the partition.

MariaDB, RabbitMQ, Placement, the API, two conductors and two agents are real; so are the drivers,
and the library by which they call Fabric Manager. ``fixtures.device_sets.hgx_host`` says what is
simulated.
"""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.testing.fabric_manager import build
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.device_sets.hgx_cloud import (
    HOSTS,
    PARTITIONS,
    SIZES,
    BootFailed,
    HgxCloud,
    Server,
    Servers,
    run_hgx_cloud,
)
from cyborg.tests.fixtures.device_sets.host import SOURCE
from cyborg.tests.fixtures.machine.processes import wait_until

pytestmark = [pytest.mark.services, pytest.mark.requires("compiler")]


@pytest.fixture(scope="module")
def env(
    tmp_path_factory: pytest.TempPathFactory, rabbit_url: str
) -> Iterator[tuple[HgxCloud, sa.Engine]]:
    folder = tmp_path_factory.mktemp("hgx")
    with (
        fresh_database("mysql", folder) as url,
        engine_of(url) as engine,
        run_hgx_cloud(folder, url, rabbit_url, build(folder), {}) as cloud,
    ):
        yield cloud, engine


def boot(cloud: HgxCloud, servers: Servers, size: int) -> Server:
    """Build a server on the first candidate, which must come soon."""
    candidates = wait_until(f"a set of {size} is offered", lambda: cloud.candidates(size))
    return servers.boot(size, candidates[0])


def test_server_gets_one_partition_which_is_active_while_it_is_bound(
    env: tuple[HgxCloud, sa.Engine],
) -> None:
    cloud, _ = env
    servers = Servers(cloud)
    idle = {host: set[int]() for host in HOSTS}
    assert cloud.active() == idle
    for size in SIZES:
        server = boot(cloud, servers, size)
        assert len(server.gpus) == size
        assert server.gpus == PARTITIONS[server.partition]
        assert cloud.active() == {**idle, server.host: {server.partition}}
        servers.delete(server)
        wait_until("the partition is inactive", lambda: cloud.active() == idle)
    assert servers.violations == []


@pytest.mark.matrix
def test_restarted_fabric_manager_gets_the_bound_partitions(
    env: tuple[HgxCloud, sa.Engine],
) -> None:
    cloud, _ = env
    servers = Servers(cloud)
    server = boot(cloud, servers, 2)
    fabric = cloud.hgx[server.host].fabric
    fabric.stop()
    fabric.start(restart=True)
    wait_until("Fabric Manager has the list", lambda: fabric.values("phase") == ["running"])
    assert set(fabric.active) == {server.partition}
    servers.delete(server)
    wait_until("the partition is inactive", lambda: not fabric.active)
    assert servers.violations + fabric.values("cut") + fabric.values("refused") == []


@pytest.mark.matrix
def test_sets_are_closed_while_fabric_manager_is_away(env: tuple[HgxCloud, sa.Engine]) -> None:
    cloud, _ = env
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


@pytest.mark.matrix
def test_failed_link_fails_the_boot_and_leaves_nothing(env: tuple[HgxCloud, sa.Engine]) -> None:
    cloud, engine = env
    servers = Servers(cloud)
    for host in cloud.hgx.values():
        host.fabric.set("fail", "fmActivateFabricPartition -10 0")
    with pytest.raises(BootFailed, match="BindFailed"):
        boot(cloud, servers, 4)
    for host in cloud.hgx.values():
        host.fabric.set("fail")
    failed = [d["job_failures"] for d in rows.read(engine, schema.devices, address=SOURCE)]
    assert "NVLink" in str(failed)
    wait_until("every GPU is clean", lambda: not find_used(engine))
    servers.delete(boot(cloud, servers, 4))
    assert servers.violations == []


@pytest.mark.matrix
def test_fatal_switch_error_closes_the_sets_with_links(env: tuple[HgxCloud, sa.Engine]) -> None:
    cloud, _ = env
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


@pytest.mark.matrix
def test_rebooted_host_activates_the_bound_partition_again(
    env: tuple[HgxCloud, sa.Engine],
) -> None:
    cloud, engine = env
    servers = Servers(cloud)
    server = boot(cloud, servers, 2)
    hgx = cloud.hgx[server.host]
    cloud.daemons[f"agent-{server.host}"].kill()
    hgx.boot()
    assert not hgx.fabric.active
    cloud.agent(server.host)
    wait_until("the partition is active", lambda: set(hgx.fabric.active) == {server.partition})
    wait_until("no ARQ waits", lambda: not rows.read(engine, schema.jobs, state="pending"))
    servers.delete(server)
    wait_until("every GPU is clean", lambda: not find_used(engine))
    assert servers.violations == []


def find_used(engine: sa.Engine) -> list[str]:
    """Return the GPUs that have an owner or must be cleaned."""
    found = rows.read(engine, schema.attach_handles)
    return [row["address"] for row in found if row["arq_id"] or row["needs_cleaning"]]
