# SPDX-License-Identifier: Apache-2.0
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.core.errors import InUse, NoHandle, NotFound, WrongState
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.workers import Conductors

IMAGE = str(uuid4())


@pytest.fixture
def bed(engine: sa.Engine) -> Conductors:
    return Conductors(engine)


def part(bed: Conductors) -> dict[str, object]:
    (row,) = rows.read(bed.engine, schema.deployables)
    return row


def test_an_image_is_loaded_while_nothing_is_given_out(bed: Conductors) -> None:
    card = bed.card()
    uuid = str(part(bed)["uuid"])
    bed.programs.start(uuid, IMAGE)
    bed.programs.start(uuid, IMAGE)  # the same promise
    assert bed.open_jobs() == ["program"]
    with pytest.raises(NoHandle, match="being programmed"):
        bed.bind(card)
    with pytest.raises(WrongState, match=IMAGE):
        bed.programs.start(uuid, str(uuid4()))
    (provider,) = rows.read(bed.engine, schema.providers)
    assert provider["stale_since"] is not None
    bed.jobs.run_once()
    (asked,) = bed.workers.asked
    assert (asked["kind"], asked["image"]) == ("program", IMAGE)
    assert asked["items"][0]["deployable"] == part(bed)["address"]
    assert (part(bed)["bitstream_id"], part(bed)["job_id"]) == (IMAGE, None)
    bed.bind(card)


def test_what_fails_leaves_the_image_unknown(bed: Conductors) -> None:
    bed.card()
    rows.change(bed.engine, schema.deployables, int(str(part(bed)["id"])), bitstream_id=IMAGE)
    bed.programs.start(str(part(bed)["uuid"]), str(uuid4()))
    bed.workers.answers["program"] = "failed"
    bed.jobs.run_once()
    assert (part(bed)["bitstream_id"], part(bed)["job_id"]) == (None, None)


def test_what_is_in_use_is_not_programmed(bed: Conductors) -> None:
    card, request = bed.card(), bed.make()
    bed.bind(card, request)
    with pytest.raises(InUse, match=request):
        bed.programs.start(str(part(bed)["uuid"]), IMAGE)


def test_what_cannot_be_programmed(bed: Conductors) -> None:
    bed.card(abilities=["prepares"])
    with pytest.raises(WrongState, match="no such ability"):
        bed.programs.start(str(part(bed)["uuid"]), IMAGE)
    with pytest.raises(NotFound):
        bed.programs.start(str(uuid4()), IMAGE)
