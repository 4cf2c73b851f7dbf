# SPDX-License-Identifier: Apache-2.0
"""A device context is bound to an instance of its project only, as Placement knows it."""

from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.binder import InstanceAllocations
from cyborg.core.errors import Conflict, Unavailable
from cyborg.tests.fixtures.hosts.context_work import PROJECT, ContextEnv


@pytest.fixture
def env(engine: sa.Engine) -> ContextEnv:
    return ContextEnv(engine)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine) -> ContextEnv:
    return ContextEnv(sqlite_engine)


class Owners:
    """Double of Placement: the project of each instance, None for no answer."""

    def __init__(self, project: str | None) -> None:
        self.project = project
        self.units: dict[str, int] = {}

    def find_allocations(self, instance: str) -> InstanceAllocations:
        if self.project is None:
            raise Unavailable("Placement is away")
        return InstanceAllocations(self.project, self.units)


def test_context_is_not_bound_to_an_instance_of_unknown_project(env: ContextEnv) -> None:
    context, owners = env.create(), Owners(None)
    env.arqs = Arqs(env.conf, env.uow, owners=owners, now=env.now)
    with pytest.raises(Unavailable, match="project of instance"):
        env.boot(context)
    assert (env.state(context), env.handles()) == ("unbound", {"free": 4})
    owners.project = "other"
    with pytest.raises(Conflict, match="belongs to project other"):
        env.boot(context)
    owners.project = PROJECT
    env.boot(context)
    assert env.state(context) == "bound"


def test_context_is_not_bound_to_an_instance_without_an_allocation(env: ContextEnv) -> None:
    """To retry would not help."""
    context, owners = env.create(), Owners("")
    owners.find_allocations = lambda instance: InstanceAllocations()  # type: ignore[method-assign]
    env.arqs = Arqs(env.conf, env.uow, owners=owners, now=env.now)
    with pytest.raises(Conflict, match="Placement has no allocation of instance"):
        env.bind(env.card, *env.read_arqs(context))
    assert (env.state(context), env.handles()) == ("unbound", {"free": 4})


@pytest.mark.parametrize("units", [{}, {"other": 2}, {"card": 1}])
def test_lease_is_not_bound_without_an_allocation_at_its_provider(
    env: ContextEnv, units: dict[str, int]
) -> None:
    """Neither by a call for the context nor by Nova; the lease stays, and serves later."""
    context, owners, instance = env.create(), Owners(PROJECT), str(uuid4())
    env.arqs = Arqs(env.conf, env.uow, owners=owners, now=env.now)
    env.leases = env.new_leases()
    env.reserve(context)
    owners.units = {env.card.provider if name == "card" else name: n for name, n in units.items()}
    with pytest.raises(Conflict, match=f"of 2 units of resource provider {env.card.provider} to"):
        env.bind_lease(context, instance, epoch=1)
    with pytest.raises(Conflict, match="allocate the units of the lease to the instance"):
        env.bind(env.card, *env.read_arqs(context))
    assert env.state(context) == "reserved"
    owners.units = {env.card.provider: 2}
    assert env.bind_lease(context, instance, epoch=1)["state"] == "bound"


def test_request_names_the_project_while_placement_is_away(sqlite_env: ContextEnv) -> None:
    env = sqlite_env
    context = env.create()
    env.arqs = Arqs(env.conf, env.uow, owners=Owners(None), now=env.now)
    request = {
        "hostname": env.card.host,
        "device_rp_uuid": env.card.provider,
        "instance_uuid": str(uuid4()),
        "project_id": PROJECT,
    }
    env.arqs.bind([{"request": arq, **request} for arq in env.read_arqs(context)], None)
    assert env.state(context) == "bound"
