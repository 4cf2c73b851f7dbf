# SPDX-License-Identifier: Apache-2.0
"""A simulated HGX H100 host with vGPUs and ``FABRIC_MODE=2`` in a cloud of real processes.

Fabric Manager activates a partition with one virtual function of each of its GPUs, in the order of
the partition. No guest runs: the host work is that of a guest.
"""

import contextlib
from collections.abc import Iterator

import pytest

from cyborg.core.address import PciAddress
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.device_sets.hgx_cloud import (
    PARTITIONS,
    HgxCloud,
    NotAllocated,
    Server,
    Servers,
    run_hgx_cloud,
)
from cyborg.tests.fixtures.device_sets.hgx_host import PLACES
from cyborg.tests.fixtures.device_sets.hgx_vgpus import read_vgpus
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample

HOST = "hgx-1"
pytestmark = [pytest.mark.services, pytest.mark.requires("compiler"), pytest.mark.matrix]


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory, rabbit_url: str) -> Iterator[HgxCloud]:
    folder = tmp_path_factory.mktemp("hgx-vgpus")
    with run_hgx_cloud(folder, rabbit_url, (HOST,), vgpus=True) as cloud:
        yield cloud


def boot(servers: Servers, size: int) -> Server:
    """Build a server on the only host; again if its offers change meanwhile, as Nova does."""

    def build() -> Server | None:
        for candidate in servers.cloud.candidates(size)[:1]:
            with contextlib.suppress(NotAllocated):
                return servers.boot(size, candidate)
        return None

    server: Server = wait_until(f"a set of {size} is offered", build)
    return server


def check(cloud: HgxCloud, server: Server) -> tuple[str, ...]:
    """Assert that the partition is active with a vGPU of each GPU; return their functions."""
    hgx = cloud.hgx[HOST]
    assert set(hgx.fabric.active) == {server.partition}
    functions = hgx.fabric.active[server.partition]
    assert [f[:7] for f in functions] == [PLACES[m][:7] for m in _modules(server.partition)]
    assert all(PciAddress.parse(f).function for f in functions), "virtual functions"
    assert read_vgpus(hgx.folder) == set(functions)
    return functions


def _modules(partition: int) -> list[int]:
    return sorted(PARTITIONS[partition])


@pytest.mark.parametrize("size", sample([1, 2, 4], 2, mark=pytest.mark.long))
def test_partition_is_activated_with_the_functions_of_its_vgpus(cloud: HgxCloud, size: int) -> None:
    servers, hgx = Servers(cloud), cloud.hgx[HOST]
    server = boot(servers, size)
    assert len(check(cloud, server)) == size
    servers.delete(server)
    wait_until("the partition is inactive", lambda: not hgx.fabric.active)
    wait_until("no vGPU is left", lambda: not read_vgpus(hgx.folder))
    assert servers.violations + hgx.fabric.values("refused") == []


def test_reboot_creates_the_vgpus_before_it_activates_the_partition(
    cloud: HgxCloud,
) -> None:
    servers, hgx = Servers(cloud), cloud.hgx[HOST]
    server = boot(servers, 2)
    functions = check(cloud, server)
    cloud.restart_agent(HOST)
    cloud.daemons[f"agent-{HOST}"].kill()
    assert read_vgpus(hgx.folder) == set(functions)
    hgx.boot()
    cloud.agent(HOST)
    wait_until("the partition is active", lambda: hgx.fabric.active)
    assert check(cloud, server) == functions
    wait_until("no ARQ waits", lambda: not rows.read(cloud.engine, schema.jobs, state="pending"))
    servers.delete(server)
    wait_until("no vGPU is left", lambda: not read_vgpus(hgx.folder) and not hgx.fabric.active)
    assert servers.violations + hgx.fabric.values("refused") == []
