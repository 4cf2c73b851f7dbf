# SPDX-License-Identifier: Apache-2.0
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.core.errors import InUse, NoHandle, NotFound, WrongState
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.hosts.host_work import JobsEnv

IMAGE = str(uuid4())


@pytest.fixture
def env(engine: sa.Engine) -> JobsEnv:
    return JobsEnv(engine)


def deployable(env: JobsEnv) -> dict[str, object]:
    (row,) = rows.read(env.engine, schema.deployables)
    return row


def test_start_loads_an_image_and_blocks_claims(env: JobsEnv) -> None:
    card = env.add_card()
    uuid = str(deployable(env)["uuid"])
    env.programs.start(uuid, IMAGE)
    env.programs.start(uuid, IMAGE)  # changes nothing
    assert env.open_jobs() == ["program"]
    with pytest.raises(NoHandle, match="being programmed"):
        env.bind(card)
    with pytest.raises(WrongState, match=IMAGE):
        env.programs.start(uuid, str(uuid4()))
    (provider,) = rows.read(env.engine, schema.providers)
    assert provider["stale_since"] is not None
    env.jobs.run_once()
    (call,) = env.agents.calls
    assert (call["kind"], call["image"]) == ("program", IMAGE)
    assert call["items"][0]["deployable"] == deployable(env)["address"]
    assert (deployable(env)["bitstream_id"], deployable(env)["job_id"]) == (IMAGE, None)
    env.bind(card)


def test_failed_programming_clears_the_image(env: JobsEnv) -> None:
    env.add_card()
    rows.update(env.engine, schema.deployables, int(str(deployable(env)["id"])), bitstream_id=IMAGE)
    env.programs.start(str(deployable(env)["uuid"]), str(uuid4()))
    env.agents.answers["program"] = "failed"
    env.jobs.run_once()
    assert (deployable(env)["bitstream_id"], deployable(env)["job_id"]) == (None, None)


def test_start_on_a_deployable_in_use_is_refused(env: JobsEnv) -> None:
    card, request = env.add_card(), env.add_arq()
    env.bind(card, request)
    with pytest.raises(InUse, match=request):
        env.programs.start(str(deployable(env)["uuid"]), IMAGE)


def test_start_without_ability_or_deployable_is_refused(env: JobsEnv) -> None:
    env.add_card(abilities=["prepares"])
    with pytest.raises(WrongState, match="its driver does not support this"):
        env.programs.start(str(deployable(env)["uuid"]), IMAGE)
    with pytest.raises(NotFound):
        env.programs.start(str(uuid4()), IMAGE)
