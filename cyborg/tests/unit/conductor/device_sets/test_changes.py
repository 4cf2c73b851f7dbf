# SPDX-License-Identifier: Apache-2.0
"""Device sets that are turned on and off, or whose devices change, while servers have devices."""

from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.jobs.dispatcher import JobDispatcher
from cyborg.core.inventory.device import Ability
from cyborg.core.inventory.device_set import SetKind
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.device_sets.families import H100_FOUR
from cyborg.tests.fixtures.device_sets.host import GPU, SetHost, gpu_address, make_source
from cyborg.tests.fixtures.device_sets.saved import make_set_host
from cyborg.tests.fixtures.hosts.hosts import make_hosts
from cyborg.tests.fixtures.machine.options import make_conf

__all__ = ["node", "placement_adapter"]


@pytest.fixture
def host(engine: sa.Engine, node: Node) -> SetHost:
    """Return a host whose sets need no work."""
    return make_set_host(engine, node, H100_FOUR, kind=SetKind.PCIE)


def turn_off(host: SetHost) -> None:
    """Report the GPUs without sets, and publish."""
    host.host.send(make_hosts(host.engine), *host.gpus.values())
    host.publish()


def gpu_provider(host: SetHost, unit: str) -> str:
    (row,) = rows.read(host.engine, schema.deployables, address=gpu_address(unit))
    return str(row["rp_uuid"])


def bind_gpu(host: SetHost, unit: str) -> str:
    """Boot a server with one GPU of a host without sets; return the instance."""
    (arq,), instance = host.create_arqs(1), str(uuid4())
    provider = gpu_provider(host, unit)
    host.node.allocate(provider, GPU, consumer=instance)
    request = {"request": arq, "hostname": host.node.name, "device_rp_uuid": provider}
    host.arqs.bind([{**request, "instance_uuid": instance}], None)
    return instance


def finish_cleaning(host: SetHost) -> None:
    """Report the end of the only release job, as the agent does."""
    (job,) = host.jobs("release")
    jobs: Any = build(JobDispatcher, make_conf(), UnitOfWork(host.engine), None, lambda _: None)
    jobs.complete(job["uuid"], job["host"], "done", None)


def test_removed_sets_make_their_gpus_single_again(host: SetHost) -> None:
    turn_off(host)
    for unit in host.gpus:
        assert host.node.inventory(gpu_provider(host, unit))[GPU]["reserved"] == 0


def test_removed_set_with_an_owner_makes_its_gpus_single_after_the_release(host: SetHost) -> None:
    instance = host.bind("3")
    turn_off(host)
    single = [unit for unit in host.gpus if host.node.inventory(gpu_provider(host, unit))]
    assert set(single) == set(host.gpus) - host.family["3"]
    host.delete(instance)
    make_hosts(host.engine).sweep()
    turn_off(host)
    assert all(host.node.inventory(gpu_provider(host, unit)) for unit in host.gpus)


def test_gpu_of_a_server_before_sets_is_in_sets_after_its_release(host: SetHost) -> None:
    turn_off(host)
    instance = bind_gpu(host, "01")
    host.report()
    assert host.node.inventory(gpu_provider(host, "01"))[GPU]["total"] == 1
    assert all("01" not in host.family[name] for name in host.offered())
    host.delete(instance)
    host.node.deallocate(instance)
    host.publish()
    assert host.node.inventory(gpu_provider(host, "01")) == {}
    assert host.offered() == {"1": 4}


def test_gpu_that_is_cleaned_when_sets_appear_is_in_sets_after_that(host: SetHost) -> None:
    cleaned = frozenset({Ability.SANITISES})
    host.gpus = {unit: replace(gpu, abilities=cleaned) for unit, gpu in host.gpus.items()}
    turn_off(host)
    instance = bind_gpu(host, "01")
    host.delete(instance)
    host.node.deallocate(instance)
    host.report()
    assert all("01" not in host.family[name] for name in host.offered())
    finish_cleaning(host)
    host.publish()
    assert host.offered() == {"1": 4}


def test_sets_that_return_do_not_overlap_what_placement_has_allocated(host: SetHost) -> None:
    # A server is being built.
    consumer = host.node.allocate(host.provider("1"), GPU, 4)
    turn_off(host)
    host.source = make_source(H100_FOUR, wanted={"1": 4}, kind=SetKind.PCIE)
    host.report()
    assert host.offered() == {}
    host.bind("1", instance=consumer)
    assert set(host.owners()) == set(host.gpus)
