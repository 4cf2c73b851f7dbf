# SPDX-License-Identifier: Apache-2.0
"""The commands that show device sets, with the real API on a host with an HGX baseboard."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cyborg
from cyborg.cli import app
from cyborg.core.inventory.device_set import SetKind
from cyborg.db import schema
from cyborg.tests.fixtures.cli.golden import compare
from cyborg.tests.fixtures.clouds.api import ApiEnv
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.device_sets.host import SetHost, gpu_address
from cyborg.tests.fixtures.device_sets.saved import make_set_host
from cyborg.tests.unit.api.conftest import api
from cyborg.tests.unit.cli.common.test_rest import serving

__all__ = ["api", "node", "placement_adapter"]

Run = Callable[..., str]

GOLDEN = Path(__file__).parent / "golden"
PICTURE = Path(cyborg.__file__).parents[1] / "doc" / "source" / "admin" / "topology-sets.svg"


@pytest.fixture
def host(api: ApiEnv, node: Node) -> SetHost:
    """Return a host with one allocated pair."""
    host = make_set_host(api.engine, node, kind=SetKind.PCIE, wanted={"4": 1, "2": 1, "1": 2})
    name = next(name for name, size in host.offered().items() if size == 2)
    host.bind(name, instance="6f1c9c0e-5d5b-4c53-9d2f-1f4f6d3a7b10", project_id="p1")
    host.publish()
    return host


@pytest.fixture
def run(api: ApiEnv, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    with serving(lambda request: request.get_response(api.app)) as url:

        def call(*words: str) -> str:
            connection = ["--os-auth-type", "none", "--os-endpoint", url]
            assert app.main([*connection, *words]) == 0, capsys.readouterr()
            return capsys.readouterr().out

        yield call


def test_device_set_list_has_offer_owner_and_reason(host: SetHost, run: Run) -> None:
    listed = {row["Set"]: row for row in json.loads(run("device-set-list", "-f", "json"))}
    assert listed.keys() == {f"hgx:{name}" for name in host.family}
    (name,) = (name for name, offer in host.offers().items() if offer == "allocated")
    pair, whole = listed[f"hgx:{name}"], listed["hgx:0"]
    assert pair["Devices"] == [gpu_address(unit) for unit in sorted(host.family[name])]
    assert (pair["Host"], pair["Size"], pair["Kind"]) == (host.node.name, 2, "pcie")
    assert (pair["Offer"], pair["Reason"]) == ("allocated", None)
    assert pair["Owner"] == pair["Instance"] == "6f1c9c0e-5d5b-4c53-9d2f-1f4f6d3a7b10"
    assert pair["Project"] == "p1"
    assert (whole["Offer"], whole["Owner"]) == ("withheld", None)
    assert f"is in hgx:{name}, which is allocated" in whole["Reason"]


def test_device_set_list_has_the_reason_of_a_gpu_in_mig_mode(
    api: ApiEnv, node: Node, run: Run
) -> None:
    host = make_set_host(api.engine, node, kind=SetKind.PCIE)
    reason = f"device {gpu_address('01')} is in MIG mode, in which it has no NVLink"
    host.withhold("01", reason)
    listed = json.loads(run("device-set-list", "-f", "json"))
    absent = f"{gpu_address('01')} (absent)"
    found = {row["Set"]: row for row in listed if absent in row["Devices"]}
    assert len(found) == len([units for units in host.family.values() if "01" in units])
    assert {(row["Offer"], row["Reason"]) for row in found.values()} == {("withheld", reason)}


def test_device_set_list_selects_by_offer_and_device(host: SetHost, run: Run) -> None:
    def names(*options: str) -> set[str]:
        found = json.loads(run("device-set-list", *options, "-f", "json"))
        return {row["Set"].removeprefix("hgx:") for row in found}

    offers = host.offers()
    assert names("--offer", "offered") == {n for n, offer in offers.items() if offer == "offered"}
    both = names("--offer", "offered", "--offer", "allocated", "--host", host.node.name)
    assert both == set(host.offered())
    (device,) = rows.read(host.engine, schema.devices, address=gpu_address("01"))
    containing = {name for name, units in host.family.items() if "01" in units}
    assert names("--device", device["uuid"][:8]) == containing


@pytest.mark.matrix
def test_device_set_list_has_all_pages(api: ApiEnv, host: SetHost, run: Run) -> None:
    api.conf.set_override("max_limit", 4, group="api")
    listed = json.loads(
        run("device-set-list", "--offer", "withheld", "--offer", "offered", "-f", "json")
    )
    assert len(listed) == len(host.family) - 1


@pytest.mark.matrix
def test_device_set_list_fits_80_columns(
    host: SetHost, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("device-set-list").splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == len(host.family) + 4


def test_absent_member_is_marked(host: SetHost, run: Run) -> None:
    host.report(without=["08"])
    (row,) = [
        row for row in json.loads(run("device-set-list", "-f", "json")) if row["Set"] == "hgx:0"
    ]
    assert row["Devices"][-1] == f"{gpu_address('08')} (absent)"


def test_describe_shows_sets_of_host_and_device(host: SetHost, run: Run) -> None:
    def related(text: str) -> Any:
        return json.loads(run("describe", text, "-f", "json"))["related"]["device_sets"]["rows"]

    assert len(related(host.node.name)) == len(host.family)
    containing = [name for name, units in host.family.items() if "01" in units]
    assert len(related(f"{host.node.name}/{gpu_address('01')}")) == len(containing)


@pytest.mark.matrix
def test_describe_finds_a_set_by_host_and_name(host: SetHost, run: Run) -> None:
    found = json.loads(run("describe", f"{host.node.name}/hgx:0", "-f", "json"))
    assert (found["kind"], found["object"]["device_set"]["size"]) == ("deployable", 8)
    shown = run("describe", f"{host.node.name}/hgx:0")
    assert "Set size" in shown


@pytest.mark.matrix
def test_topology_shows_sets_that_are_not_withheld(host: SetHost, run: Run) -> None:
    lines = run("topology", "--host", host.node.name).splitlines()
    offers = {name: offer for name, offer in host.offers().items() if offer != "withheld"}
    for name, offer in offers.items():
        # Once below the source, and once for each of its devices.
        assert sum(f"hgx:{name} {offer}" in line for line in lines) == len(host.family[name]) + 1
    (owned,) = (line for line in lines if "of project p1: " in line and "hgx" in line)
    assert "instance 6f1c9c0e-5d5b-4c53-9d2f-1f4f6d3a7b10" in owned


def test_topology_of_a_host_with_sets_is_stable(host: SetHost, run: Run, tmp_path: Path) -> None:
    # The name of the host is a random one.
    words = ("topology", "--host", host.node.name)
    compare(GOLDEN / "topology-sets.txt", run(*words).replace(host.node.name, "compute-1"))
    picture = tmp_path / "topology.svg"
    run(*words, "--svg", str(picture))
    compare(PICTURE, picture.read_text().replace(host.node.name, "compute-1"))
