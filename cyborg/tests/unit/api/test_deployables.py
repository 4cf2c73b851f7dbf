# SPDX-License-Identifier: Apache-2.0
"""Programming of deployables through the API; the conductor's work has tests of its own."""

from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.core.inventory.device import Ability
from cyborg.db import schema
from cyborg.tests.fixtures.clouds.api import ApiEnv, error_message
from cyborg.tests.fixtures.databases import rows

IMAGE = "9a17439a-85d0-4c53-a3d3-0f68a2eac896"


def body(image: str = IMAGE) -> list[dict[str, Any]]:
    return [{"path": "/program", "op": "replace", "value": [{"image_uuid": image}]}]


@pytest.fixture
def card(api: ApiEnv) -> str:
    """Return the path of a deployable whose driver can program."""
    card = rows.insert_card(api.engine, abilities=[str(Ability.PROGRAMS)])
    (row,) = rows.read(api.engine, schema.deployables, id=card.deployable_id)
    return f"/v2/deployables/{row['uuid']}"


@pytest.mark.parametrize("suffix", ["", "/", "/anything", "/9a17439a-85d0-4c53-a3d3-0f68a2eac896"])
def test_program_returns_deployable(api: ApiEnv, card: str, suffix: str) -> None:
    answer = api.call("PATCH", f"{card}/program{suffix}", body())
    assert answer.status_int == 200, answer.text
    assert answer.json == api.get(card, "2.0")
    assert api.conductor.calls == ["deployable_program"]
    (job,) = rows.read(api.engine, schema.jobs)
    assert job["arguments"]["image"] == IMAGE


def test_program_other_image_during_programming_is_409(api: ApiEnv, card: str) -> None:
    for _ in range(2):
        assert api.call("PATCH", f"{card}/program", body()).status_int == 200
    refused = api.call("PATCH", f"{card}/program", body(str(uuid4())))
    assert refused.status_int == 409
    assert IMAGE in error_message(refused)


def test_program_bound_deployable_is_409(api: ApiEnv, card: str) -> None:
    api.create_profile()
    (arq,) = api.create_arqs()
    deployable = api.get(card)
    assert api.bind(arq, deployable["rp_uuid"]).status_int == 202
    refused = api.call("PATCH", f"{card}/program", body())
    assert refused.status_int == 409
    assert arq in error_message(refused)


def test_program_invalid_request_is_rejected(api: ApiEnv, card: str) -> None:
    bodies: tuple[Any, ...] = ({}, [], body("x"), body() * 2, [{"path": "/program"}])
    for invalid in bodies:
        assert api.call("PATCH", f"{card}/program", invalid).status_int == 400, invalid
    assert api.call("PATCH", "/v2/deployables/x/program", body()).status_int == 400
    assert api.conductor.calls == []
    assert api.call("PATCH", f"/v2/deployables/{uuid4()}/program", body()).status_int == 404


def test_program_deployable_deleted_during_call_is_404(api: ApiEnv, card: str) -> None:
    """The row is read after the call to the conductor and may be deleted by then."""
    with api.engine.begin() as tx:
        tx.execute(sa.delete(schema.attach_handles))
    program = api.conductor.__getattr__("deployable_program")

    def program_and_delete(*args: Any) -> None:
        program(*args)
        with api.engine.begin() as tx:
            tx.execute(sa.delete(schema.deployables))

    api.conductor.__dict__["deployable_program"] = program_and_delete
    assert api.call("PATCH", f"{card}/program", body()).status_int == 404
