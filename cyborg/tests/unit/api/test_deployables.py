# SPDX-License-Identifier: Apache-2.0
"""Programming a deployable by the API; what the conductor makes of it is tested there."""

from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.core.device import Ability
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.api import ApiBed, fault

IMAGE = "9a17439a-85d0-4c53-a3d3-0f68a2eac896"


def body(image: str = IMAGE) -> list[dict[str, Any]]:
    return [{"path": "/program", "op": "replace", "value": [{"image_uuid": image}]}]


@pytest.fixture
def card(api: ApiBed) -> str:
    """Return the path of a deployable whose driver programs."""
    made = rows.card(api.engine, abilities=[str(Ability.PROGRAMS)])
    (row,) = rows.read(api.engine, schema.deployables, id=made.deployable_id)
    return f"/v2/deployables/{row['uuid']}"


@pytest.mark.parametrize("more", ["", "/", "/anything", "/9a17439a-85d0-4c53-a3d3-0f68a2eac896"])
def test_the_answer_is_the_deployable(api: ApiBed, card: str, more: str) -> None:
    answer = api.call("PATCH", f"{card}/program{more}", body())
    assert answer.status_int == 200, answer.text
    assert answer.json == api.get(card, "2.0")
    assert api.line.calls == ["deployable_program"]
    (job,) = rows.read(api.engine, schema.jobs)
    assert job["arguments"]["image"] == IMAGE


def test_another_image_waits_for_the_end_of_the_first(api: ApiBed, card: str) -> None:
    for _ in range(2):
        assert api.call("PATCH", f"{card}/program", body()).status_int == 200
    refused = api.call("PATCH", f"{card}/program", body(str(uuid4())))
    assert refused.status_int == 409
    assert IMAGE in fault(refused)


def test_what_is_bound_is_not_programmed(api: ApiBed, card: str) -> None:
    api.profile()
    (arq,) = api.arqs()
    deployable = api.get(card)
    assert api.bind(arq, deployable["rp_uuid"]).status_int == 202
    refused = api.call("PATCH", f"{card}/program", body())
    assert refused.status_int == 409
    assert arq in fault(refused)


def test_nothing_wrong_reaches_the_conductor(api: ApiBed, card: str) -> None:
    for wrong in ({}, [], body("x"), body() * 2, [{"path": "/program"}]):
        assert api.call("PATCH", f"{card}/program", wrong).status_int == 400, wrong
    assert api.call("PATCH", "/v2/deployables/x/program", body()).status_int == 400
    assert api.line.calls == []
    assert api.call("PATCH", f"/v2/deployables/{uuid4()}/program", body()).status_int == 404


def test_a_card_that_goes_meanwhile(api: ApiBed, card: str) -> None:
    """The row is read after the call: it may be gone then."""
    with api.engine.begin() as tx:
        tx.execute(sa.delete(schema.attach_handles))
    start = api.line.__getattr__("deployable_program")

    def and_go(*args: Any) -> None:
        start(*args)
        with api.engine.begin() as tx:
            tx.execute(sa.delete(schema.deployables))

    api.line.__dict__["deployable_program"] = and_go
    assert api.call("PATCH", f"{card}/program", body()).status_int == 404
