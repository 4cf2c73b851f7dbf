# SPDX-License-Identifier: Apache-2.0
"""A bind whose claim takes fewer handles than it has chosen is undone, on each database."""

import sqlalchemy as sa

from cyborg.conductor.inventory.devices import Devices
from cyborg.core.errors import NoHandle
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.interleave import Race
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.host_work import JobsEnv


def test_bind_to_a_device_that_is_disabled_before_the_claim_binds_nothing(
    engine: sa.Engine,
) -> None:
    env = JobsEnv(engine)
    card, arqs = env.add_card(abilities=[]), [env.add_arq(), env.add_arq()]
    (device,) = rows.read(engine, schema.devices)
    race = Race(
        engine,
        lambda: env.bind(card, *arqs),
        "UPDATE attach_handles SET",
        lambda: build(Devices, env.uow).set_status(device["uuid"], "maintaining"),
    )
    assert (race.reached, race.second) == (True, None)
    # On SQLite the change of the device waits for the bind; elsewhere it waits only if the machine
    # is so busy that it has not begun.
    if race.first is None:
        assert race.waited
        assert (env.states(), env.handles()) == ({"Bound": 2}, {"owned": 2, "free": 14})
    else:
        assert isinstance(race.first, NoHandle)
        assert "maintenance" in race.first.message
        assert (env.states(), env.handles()) == ({"Initial": 2}, {"free": 16})
