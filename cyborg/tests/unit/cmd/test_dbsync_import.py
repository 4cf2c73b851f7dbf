# SPDX-License-Identifier: Apache-2.0
"""``cyborg-dbsync import`` of damaged databases: each row is taken, or dropped by name.

The source has no constraints, so that it can be damaged in each way.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import sqlalchemy as sa

from cyborg.cmd import dbsync_import
from cyborg.cmd.dbsync_import import ImportReport, import_database
from cyborg.core.errors import Conflict
from cyborg.core.migration import import_plan
from cyborg.db import schema
from cyborg.db.reference import reader
from cyborg.tests.fixtures.databases import former
from cyborg.tests.fixtures.databases.former import Damage
from cyborg.tests.fixtures.machine import tiers

_CONTENTS = tuple(
    (kind.KIND, schema.metadata.tables[name])
    for kind, name in (
        (import_plan.ProfileRow, "device_profiles"),
        (import_plan.DeviceRow, "devices"),
        (import_plan.DeployableRow, "deployables"),
        (import_plan.HandleRow, "attach_handles"),
        (import_plan.ArqRow, "arqs"),
    )
)


@pytest.fixture
def source() -> Iterator[sa.Engine]:
    """Yield a database of OpenStack Cyborg with two hosts."""
    engine = former.make_source()
    former.fill(engine)
    yield engine
    engine.dispose()


def run(source: sa.Engine, target: sa.Engine) -> ImportReport:
    with source.connect() as connection:
        return import_database(connection, target, lambda *_: None, dry_run=False)


def check(source: sa.Engine, target: sa.Engine) -> ImportReport:
    """Import a database and assert what holds for each; return the report."""
    report = run(source, target)
    objects = report.to_dict()["objects"]
    with source.connect() as connection:
        for kind, table in reader.TABLES.items():
            rows = connection.scalar(sa.select(sa.func.count()).select_from(table))
            counts = objects[kind.KIND]
            assert counts["found"] == rows == counts["taken"] + counts["dropped"], kind
            assert counts["present"] == 0, kind
    assert all(drop.name and drop.reason for drop in report.drops)
    with target.connect() as tx:
        for name, table in _CONTENTS:
            count = tx.scalar(sa.select(sa.func.count()).select_from(table))
            assert count == objects[name]["taken"], table.name
        check_laws(tx)
    again = run(source, target).to_dict()["objects"]
    for name, counts in objects.items():
        assert again[name] == {**counts, "taken": 0, "present": counts["taken"]}, name
    return report


def check_laws(tx: sa.Connection) -> None:
    """Assert what holds for the rows of each cloud, beside the constraints of the schema."""
    handles, arqs, own = schema.attach_handles, schema.arqs, schema.deployables
    owned = tx.execute(
        sa.select(arqs.c.uuid, arqs.c.hostname, arqs.c.device_rp_uuid, own.c.host, own.c.rp_uuid)
        .join(handles, handles.c.arq_id == arqs.c.id)
        .join(own, own.c.id == handles.c.deployable_id)
        .where(arqs.c.state == "Bound", arqs.c.instance_uuid.is_not(None))
    ).all()
    assert len(owned) == tx.scalar(sa.select(sa.func.count()).select_from(arqs))
    assert all(row[1:3] == row[3:] for row in owned)
    places = tx.execute(
        sa.select(own.c.host, handles.c.address).join(own, own.c.id == handles.c.deployable_id)
    ).all()
    assert len(places) == len(set(places)), "no function of a host is offered twice"
    providers = set(tx.scalars(sa.select(schema.providers.c.uuid)))
    assert providers == set(tx.scalars(sa.select(own.c.rp_uuid)))
    assert set(tx.scalars(sa.select(schema.devices.c.status))) <= import_plan.STATUSES


def empty(target: sa.Engine) -> None:
    with target.begin() as tx:
        tx.execute(sa.update(schema.attach_handles).values(arq_id=None))
        for table in reversed(schema.metadata.sorted_tables):
            tx.execute(sa.delete(table))


def test_sound_database_is_taken_as_it_is(source: sa.Engine, sqlite_engine: sa.Engine) -> None:
    report = check(source, sqlite_engine)
    (drop,) = report.drops
    assert (drop.kind, "its state is Initial" in drop.reason) == (import_plan.ARQ, True)
    assert report.taken == {
        **{import_plan.PROFILE: 2, import_plan.DEVICE: 4, import_plan.CONTROL_PATH: 4},
        **{import_plan.DEPLOYABLE: 4, import_plan.ATTRIBUTE: 12, import_plan.HANDLE: 8},
        import_plan.ARQ: 4,
    }


def check_after(source: sa.Engine, target: sa.Engine, damages: Iterable[Damage]) -> None:
    former.fill(source)
    empty(target)
    for found in damages:
        former.damage(source, found)
    try:
        check(source, target)
    except Exception as exc:
        raise AssertionError(f"after {damages}") from exc


def test_each_row_of_a_randomly_damaged_database_is_taken_or_dropped(
    source: sa.Engine, engine: sa.Engine
) -> None:
    generator = random.Random(32)
    for _ in range(tiers.scale(24)):
        kinds = generator.sample(former.KINDS, generator.randint(1, 12))
        check_after(source, engine, [replace(kind, row=generator.randrange(12)) for kind in kinds])


@pytest.mark.matrix
def test_each_kind_of_damage_is_taken_or_dropped(
    source: sa.Engine, sqlite_engine: sa.Engine
) -> None:
    kinds = [replace(kind, row=number) for number, kind in enumerate(former.KINDS)]
    random.Random(32).shuffle(kinds)
    assert len(kinds) > 400
    for start in range(0, len(kinds), 6):
        check_after(source, sqlite_engine, kinds[start : start + 6])


def reasons(source: sa.Engine, target: sa.Engine, *damages: Damage) -> Counter[tuple[str, str]]:
    """Damage a database; return why objects of the kinds are dropped, without those that were."""
    for found in damages:
        former.damage(source, found)
    drops = [(drop.kind, drop.reason) for drop in check(source, target).drops]
    return Counter(drop for drop in drops if "its state is Initial" not in drop[1])


def test_second_request_of_a_handle_is_dropped(source: sa.Engine, sqlite_engine: sa.Engine) -> None:
    shift = Damage("extended_accelerator_requests", 1, former.SHIFT, "attach_handle_id")
    ((kind, reason),) = reasons(source, sqlite_engine, shift)
    assert kind == import_plan.ARQ
    assert "its attach handle" in reason
    assert "is that of accelerator request" in reason


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            Damage("deployables", 2, former.SHIFT, "rp_uuid"),
            {
                import_plan.DEPLOYABLE: "is that of deployable",
                import_plan.HANDLE: "its deployable",
                import_plan.ATTRIBUTE: "its deployable",
                import_plan.ARQ: "its attach handle",
            },
        ),
        (
            Damage("device_profiles", 0, former.SHIFT, "name"),
            {import_plan.PROFILE: "its name is that of device profile"},
        ),
        (
            Damage("devices", 0, "null", "hostname"),
            {
                import_plan.DEVICE: "its host is NULL, expected a text",
                import_plan.CONTROL_PATH: "its device, row 1, does not exist or is malformed",
                import_plan.DEPLOYABLE: "its device, row 1, does not exist or is malformed",
                import_plan.HANDLE: "its deployable",
                import_plan.ATTRIBUTE: "its deployable",
                import_plan.ARQ: "its attach handle",
            },
        ),
        (
            Damage("devices", 1, "text", "status"),
            {
                import_plan.DEVICE: "its status 'nonsense' is unknown",
                import_plan.CONTROL_PATH: "its device",
                import_plan.DEPLOYABLE: "its device",
                import_plan.HANDLE: "its deployable",
                import_plan.ATTRIBUTE: "its deployable",
                import_plan.ARQ: "its attach handle",
            },
        ),
        (
            Damage("deployables", 0, former.DELETE),
            {
                import_plan.HANDLE: "its deployable, row 1, does not exist",
                import_plan.ATTRIBUTE: "its deployable, row 1, does not exist",
                import_plan.ARQ: "its attach handle",
            },
        ),
        (Damage("devices", 0, "deep", "std_board_info"), {}),
    ],
)
def test_damage_is_named(
    source: sa.Engine, sqlite_engine: sa.Engine, found: Damage, expected: dict[str, str]
) -> None:
    given = dict(reasons(source, sqlite_engine, found))
    assert {kind for kind, _ in given} == set(expected)
    for kind, reason in given:
        assert expected[kind] in reason


def test_servers_of_dropped_devices_are_named(
    source: sa.Engine, sqlite_engine: sa.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    former.damage(source, Damage("devices", 1, "text", "status"))
    former.damage(source, Damage("deployables", 0, former.DELETE))
    report = run(source, sqlite_engine)
    found = report.to_dict()["servers_of_unknown_devices"]
    assert {use["address"] for use in found} == {"0000:3b:00.0", "0000:3c:00.0"}
    dbsync_import._print_table(report, dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(
        "servers whose devices are not known: stop or shelve them before the agents start"
    )
    assert lines[start + 1 :] == [
        f"host {use['host']}, device {use['address']}, server {use['instance']} "
        f"(request {use['arq']})"
        for use in found
    ]


def test_rows_that_the_target_refuses_name_their_host(
    source: sa.Engine, sqlite_engine: sa.Engine
) -> None:
    run(source, sqlite_engine)
    former.damage(source, Damage("devices", 0, former.DELETE))
    former.damage(source, Damage("devices", 1, "text", "hostname"))
    with pytest.raises(Conflict, match="host nonsense"):
        run(source, sqlite_engine)
