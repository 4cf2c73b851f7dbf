# SPDX-License-Identifier: Apache-2.0
"""``cyborg-dbsync import`` of databases that releases of OpenStack Cyborg have made.

The Placement is real and has the providers and allocations as the other service left them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_DNS, uuid3, uuid4

import pytest
import sqlalchemy as sa

from cyborg.cmd import dbsync
from cyborg.conductor.placement.verifier import ProviderVerifier
from cyborg.core.inventory.device import AttachHandle, Deployable, Device, DeviceType, HandleType
from cyborg.core.naming import OWNER_TRAIT
from cyborg.db import schema
from cyborg.db.engine import make_engine
from cyborg.tests.fixtures.clouds import reference_cyborg
from cyborg.tests.fixtures.clouds.api import ApiEnv
from cyborg.tests.fixtures.clouds.reference_cyborg import Call, ReferenceCyborg
from cyborg.tests.fixtures.databases import former_profiles, publisher_setup, rows
from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.databases.placement import Node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import Clock
from cyborg.tests.fixtures.hosts.hosts import Host, make_hosts
from cyborg.tests.fixtures.machine.options import make_conf

__all__ = ["placement_adapter"]

pytestmark = [pytest.mark.services, pytest.mark.requires("pip"), pytest.mark.matrix]

HOSTS, CARDS, HANDLES = 40, 5, 4
BOUND = 500
PROFILE = "imported-gpu"
TRAIT, CLASS = "CUSTOM_GPU_T4", "PGPU"
NEWEST = "17.0.0"
OLDER = ("12.0.0", "13.0.0", "14.1.0", "15.0.1", "16.0.1")


class FormerCloud:
    """The rows that the other service has, as calls of its database layer, and what they mean."""

    def __init__(self, hosts: list[str], bound: int) -> None:
        self.hosts = hosts
        self.calls: list[Call] = []
        self.devices: dict[str, list[Device]] = {host: [] for host in hosts}  # as agents report
        self.providers: dict[str, tuple[str, str]] = {}  # uuid to name and host
        self.arqs: dict[str, dict[str, str]] = {}
        groups = [{f"resources:{CLASS}": "1", f"trait:{TRAIT}": "required"}]
        self._call(
            "profile",
            "device_profile_create",
            name=PROFILE,
            profile_json=json.dumps({"groups": groups}),
        )
        left = bound
        for host in hosts:
            for card in range(CARDS):
                left -= self._add_card(host, card, left)

    def _call(self, key: str, method: str, /, **values: Any) -> str:
        values = {"uuid": str(uuid4()), **values}
        self.calls.append((key, method, values))
        return str(values["uuid"])

    def _add_card(self, host: str, card: int, left: int) -> int:
        """Add a card; bind up to ``left`` of its handles. Return the number of bound ones."""
        address = f"0000:{card + 16:02x}:00.0"
        name = f"{host}_{address}"
        # As the other service derives it.
        provider = str(uuid3(NAMESPACE_DNS, name))
        self.providers[provider] = (name, host)
        key = f"{host}-{card}"
        info = {"domain": "0000", "bus": f"{card + 16:02x}", "device": "00", "function": "0"}
        self._call(
            f"device-{key}",
            "device_create",
            type="GPU",
            vendor="10de",
            model="T4",
            hostname=host,
            std_board_info=json.dumps({"product_id": "1eb8", "controller": None}),
            vendor_board_info=json.dumps({"vendor_info": "gpu_vb_info"}),
        )
        self._call(
            f"path-{key}",
            "control_path_create",
            device_id=f"$device-{key}",
            cpid_type="PCI",
            cpid_info=json.dumps(info),
        )
        deployable = f"deployable-{key}"
        self._call(
            deployable,
            "deployable_create",
            device_id=f"$device-{key}",
            name=name,
            num_accelerators=HANDLES,
            rp_uuid=provider,
            driver_name="nvidia",
        )
        for attribute, value in (("rc", CLASS), ("trait0", TRAIT), ("trait1", OWNER_TRAIT)):
            self._call(
                f"{attribute}-{key}",
                "attribute_create",
                deployable_id=f"${deployable}",
                key=attribute,
                value=value,
            )
        self._call(
            f"site-{key}",
            "attribute_create",
            deployable_id=f"${deployable}",
            key="site",
            value="row 7",
        )
        handles = []
        for number in range(HANDLES):
            function = {**info, "function": str(number)}
            bound = number < left and len(self.arqs) < BOUND
            uuid = self._call(
                f"handle-{key}-{number}",
                "attach_handle_create",
                deployable_id=f"${deployable}",
                cpid_id=f"$path-{key}",
                attach_type="PCI",
                attach_info=json.dumps(function),
                in_use=bound,
            )
            place = f"0000:{card + 16:02x}:00.{number}"
            handles.append(AttachHandle(place, HandleType.PCI, function))
            if bound:
                instance = str(uuid4())
                arq = self._call(
                    f"arq-{key}-{number}",
                    "extarq_create",
                    device_profile_id="$profile",
                    device_profile_group_id=0,
                    state="Bound",
                    project_id="project-1",
                    hostname=host,
                    device_rp_uuid=provider,
                    instance_uuid=instance,
                    attach_handle_id=f"$handle-{key}-{number}",
                    deployable_id=f"${deployable}",
                )
                self.arqs[arq] = {"instance": instance, "handle": uuid, "provider": provider}
        self.devices[host].append(
            Device(
                address,
                DeviceType.GPU,
                "10de",
                "T4",
                "gpu",
                deployables=(Deployable(address, CLASS, frozenset({TRAIT}), tuple(handles)),),
            )
        )
        return min(left, HANDLES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reference")


@pytest.fixture(
    scope="module", params=[NEWEST, *(pytest.param(v, marks=pytest.mark.long) for v in OLDER)]
)
def reference(
    request: pytest.FixtureRequest, folder: Path
) -> Iterator[tuple[ReferenceCyborg, str]]:
    """Yield a release of OpenStack Cyborg with an empty database, and its URL."""
    python = reference_cyborg.install(request.param)
    with fresh_database("mysql", folder) as url:
        made = ReferenceCyborg(python, url.partition("?")[0], folder)
        made.upgrade()
        yield made, url


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Any]:
    """Yield a function that runs cyborg-dbsync for an empty database, and an engine of it."""
    with fresh_database("mysql", tmp_path) as url:
        file = tmp_path / "cyborg.conf"
        file.write_text(f"[database]\nconnection = {url}\n")
        engine = make_engine(make_conf(database={"connection": url}))

        def run(*words: str) -> int:
            return dbsync.main(["--config-file", str(file), *words])

        assert run("upgrade") == 0
        yield run, engine
        engine.dispose()


def snapshot(engine: sa.Engine) -> dict[str, list[Any]]:
    """Return all rows of the tables that an import writes."""
    tables = (
        *("device_profiles", "devices", "deployables", "attributes", "attach_handles", "arqs"),
        *("providers", "custody_records"),
    )
    return {name: rows.read(engine, schema.metadata.tables[name]) for name in tables}


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the JSON that the last command has printed."""
    text = capsys.readouterr().out
    return dict(json.loads(text[text.index("{") :]))


@pytest.mark.timeout(1200)
def test_database_is_taken_over_and_nothing_changes_in_placement(
    reference: tuple[ReferenceCyborg, str],
    target: Any,
    placement_adapter: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    former, url = reference
    run, engine = target
    nodes = {node.name: node for node in (Node(placement_adapter) for _ in range(HOSTS))}
    cloud = FormerCloud(list(nodes), BOUND)
    former.fill(cloud.calls)
    generations = publish_as_before(cloud, nodes)
    total = {"device": HOSTS * CARDS, "deployable": HOSTS * CARDS, "device profile": 1}
    total |= {"attach handle": HOSTS * CARDS * HANDLES, "accelerator request": BOUND}
    total |= {"control path": HOSTS * CARDS, "attribute": HOSTS * CARDS * 4}

    empty = snapshot(engine)
    assert run("import", "--from", url, "--dry-run", "-f", "json") == 0
    shown = result(capsys)
    assert {kind: n["taken"] for kind, n in shown["objects"].items()} == total
    assert snapshot(engine) == empty, "a dry run changes nothing"

    assert run("import", "--from", url, "-f", "json") == 0
    report = result(capsys)
    assert report["dropped"] == []
    assert report["objects"] == {
        kind: {"found": n, "taken": n, "present": 0, "dropped": 0} for kind, n in total.items()
    }
    imported = snapshot(engine)

    assert run("import", "--from", url, "-f", "json") == 0
    again = result(capsys)
    assert {kind: n["present"] for kind, n in again["objects"].items()} == total
    assert snapshot(engine) == imported, "a second import changes nothing"

    check_arqs(engine, cloud)
    publisher = publisher_setup.make_publisher(engine, next(iter(nodes.values())).placement)
    hosts = make_hosts(engine)
    for name in nodes:
        Host(name).send(hosts, *cloud.devices[name])
    for _ in range(20):
        publisher.run_once()
    stale = [row for row in rows.read(engine, schema.providers) if row["stale_since"]]
    assert stale == []
    assert read_generations(cloud, nodes) == generations, "nothing changes in Placement"
    after = snapshot(engine)
    for name in ("devices", "deployables", "attach_handles", "arqs"):
        assert [r["uuid"] for r in after[name]] == [r["uuid"] for r in imported[name]]
    assert {r["rp_uuid"] for r in after["deployables"]} == set(cloud.providers)
    assert {r["backend"] for r in after["devices"]} == {"gpu"}, "the reports have adopted them"
    check_arqs(engine, cloud)
    verifier: ProviderVerifier = publisher_setup.make_verifier(
        engine, next(iter(nodes.values())).placement, Clock()
    )
    verifier.run_once()
    assert read_generations(cloud, nodes) == generations


def test_profiles_of_a_release_are_served_with_reference_traits(
    target: Any, placement_adapter: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, engine = target
    calls: list[Call] = [
        (name, "device_profile_create", {"uuid": str(uuid4()), "name": name, "profile_json": text})
        for name, text in former_profiles.make_profiles().items()
    ]
    python = reference_cyborg.install(NEWEST)
    with fresh_database("mysql", tmp_path) as url:
        made = ReferenceCyborg(python, url.partition("?")[0], tmp_path)
        made.upgrade()
        made.fill(calls)
        capsys.readouterr()
        assert run("import", "--from", url) == 0
    shown = capsys.readouterr().out
    for name in former_profiles.CARDS:
        assert f"device profile {name}: no device will have " in shown
    former_profiles.check_served_with_reference_traits(engine, placement_adapter)


def publish_as_before(cloud: FormerCloud, nodes: dict[str, Node]) -> dict[str, int]:
    """Write to Placement what the other service has there; return the generations."""
    placement = next(iter(nodes.values())).placement
    placement.ensure_traits([TRAIT])
    for uuid, (name, host) in cloud.providers.items():
        generation = placement.create(uuid, name, nodes[host].uuid)
        inventory = {"total": HANDLES, "max_unit": HANDLES}
        generation = placement.set_inventories(uuid, generation, {CLASS: inventory})
        placement.set_traits(uuid, generation, [TRAIT, OWNER_TRAIT])
    node = next(iter(nodes.values()))
    for arq in cloud.arqs.values():
        node.allocate(arq["provider"], CLASS, consumer=arq["instance"])
    return read_generations(cloud, nodes)


def read_generations(cloud: FormerCloud, nodes: dict[str, Node]) -> dict[str, int]:
    """Return the generations of all providers: each write changes one."""
    found: dict[str, int] = {}
    for node in nodes.values():
        answer = node.client.get(f"/resource_providers?in_tree={node.uuid}").json()
        found |= {p["uuid"]: p["generation"] for p in answer["resource_providers"]}
    assert set(cloud.providers) < set(found)
    return found


def check_arqs(engine: sa.Engine, cloud: FormerCloud) -> None:
    """Check what Nova gets for each server."""
    conf = make_conf()
    conf.set_override("auth_strategy", "noauth")
    env = ApiEnv(conf, engine)
    for uuid, expected in cloud.arqs.items():
        (arq,) = env.get(f"/v2/accelerator_requests?instance={expected['instance']}")["arqs"]
        assert (arq["uuid"], arq["state"]) == (uuid, "Bound")
        assert arq["device_rp_uuid"] == expected["provider"]
        assert arq["attach_handle_uuid"] == expected["handle"]
        assert arq["attach_handle_type"] == "PCI"
        assert set(arq["attach_handle_info"]) == {"domain", "bus", "device", "function"}


def test_unknown_revision_is_refused_by_name(
    target: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = target
    with fresh_database("mysql", tmp_path) as url:
        other = sa.create_engine(url)
        with other.begin() as tx:
            tx.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32))")
            tx.exec_driver_sql("INSERT INTO alembic_version VALUES ('0123456789ab')")
        other.dispose()
        assert run("import", "--from", url) == 1
    error = capsys.readouterr().err
    assert "has the revision 0123456789ab; an import reads 6c77bd6afea5 (12.0 to 16.0)" in error


def test_database_of_this_service_is_no_source(
    target: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, engine = target
    own = engine.url.render_as_string(hide_password=False)
    assert run("import", "--from", own) == 1
    assert "--from is the database of this service" in capsys.readouterr().err
    with fresh_database("mysql", tmp_path) as url:
        assert run("import", "--from", url) == 1
    assert "it is no database of Cyborg" in capsys.readouterr().err
    closed = "mysql+pymysql://root@127.0.0.1:1/cyborg"
    assert run("import", "--from", closed) == 1
    assert "Can't connect" in capsys.readouterr().err
    assert run("import", "--from", "nonsense") == 1
    assert "--from is no URL of a database" in capsys.readouterr().err


def test_target_without_tables_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cyborg.conf"
    file.write_text(f"[database]\nconnection = sqlite:///{tmp_path}/new.db\n")
    code = dbsync.main(["--config-file", str(file), "import", "--from", "sqlite:///other.db"])
    assert code == 1
    assert "run 'cyborg-dbsync upgrade' first" in capsys.readouterr().err
