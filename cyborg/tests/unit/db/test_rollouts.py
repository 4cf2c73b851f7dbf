# SPDX-License-Identifier: Apache-2.0
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.db.write import rollouts
from cyborg.tests.fixtures.databases import rows


def insert_owners(engine: sa.Engine, host: str, backend: str, count: int) -> list[str]:
    """Insert a device all of whose handles are owned; return the ARQs."""
    card = rows.insert_card(engine, host, handles=count, backend=backend)
    profile = rows.insert_profile(engine, f"{host}-{backend}")
    uuids = []
    for handle in rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id):
        uuids.append(rows.insert_arq(engine, profile))
        (arq,) = rows.read(engine, schema.arqs, uuid=uuids[-1])
        rows.update(engine, schema.attach_handles, handle["id"], arq_id=arq["id"])
    return uuids


def test_holders_of_other_backends_do_not_fill_the_limit(engine: sa.Engine) -> None:
    insert_owners(engine, "a", "y", 3)
    expected = insert_owners(engine, "b", "y", 3)
    expected += insert_owners(engine, "a1", "x", 1)
    with engine.begin() as tx:
        found = rollouts.holders(tx, [("a1", "x"), ("a", "x"), ("b", "y")], 3)
    assert len(found) == 3
    assert {row["uuid"] for row in found} <= set(expected)
