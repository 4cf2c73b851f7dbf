# SPDX-License-Identifier: Apache-2.0
from typing import Any
from uuid import uuid4

import pytest

from cyborg.core.inventory.device_set import SetKind
from cyborg.db import schema
from cyborg.tests.fixtures.clouds.api import ApiEnv
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.device_sets.host import SetHost, gpu_address
from cyborg.tests.fixtures.device_sets.saved import make_set_host

__all__ = ["node", "placement_adapter"]


@pytest.fixture
def host(api: ApiEnv, node: Node) -> SetHost:
    return make_set_host(api.engine, node, kind=SetKind.PCIE, wanted={"4": 1, "2": 1, "1": 2})


def find_set(api: ApiEnv, host: SetHost, name: str) -> Any:
    (deployable,) = api.get(f"/v2/deployables?rp_uuid={host.provider(name)}")["deployables"]
    return deployable["device_set"]


def find_sets(api: ApiEnv, *offers: str) -> set[str]:
    query = "&".join(f"offer={offer}" for offer in offers)
    found = api.get(f"/v2/deployables?{query}")["deployables"]
    return {deployable["name"].rpartition(":")[2] for deployable in found}


def test_device_set_shows_members_and_reason(api: ApiEnv, host: SetHost) -> None:
    devices = {row["address"]: row for row in api.get("/v2/devices")["devices"]}
    found = find_set(api, host, "0")
    assert [member["device_uuid"] for member in found.pop("members")] == [
        devices[gpu_address(unit)]["uuid"] for unit in sorted(host.family["0"])
    ]
    assert found == {
        "kind": "pcie",
        "size": 8,
        "mode": "disjoint",
        "group": None,
        "wanted": {"4": 1, "2": 1, "1": 2},
        "offer": "withheld",
        "offer_reason": found["offer_reason"],
        "instance_uuid": None,
        "project_id": None,
    }
    assert found["offer_reason"].startswith("is split into hgx:")


def test_allocated_set_shows_owner(api: ApiEnv, host: SetHost) -> None:
    (name,) = (name for name, size in host.offered().items() if size == 2)
    instance = host.bind(name, project_id="p1")
    host.publish()
    found = find_set(api, host, name)
    assert (found["offer"], found["offer_reason"]) == ("allocated", None)
    assert (found["instance_uuid"], found["project_id"]) == (instance, "p1")
    accelerators = {row["uuid"]: row for row in api.get("/v2/accelerators")["accelerators"]}
    for member in found["members"]:
        accelerator = accelerators[member["accelerator_uuid"]]
        assert (accelerator["arq_uuid"], accelerator["instance_uuid"]) == (
            member["arq_uuid"],
            instance,
        )
    # The devices of the whole host are partly owned, through another set.
    whole = find_set(api, host, "0")
    assert {member["arq_uuid"] for member in whole["members"]} == {None}
    assert (whole["offer"], whole["instance_uuid"]) == ("withheld", None)


def test_absent_member_has_no_uuids(api: ApiEnv, host: SetHost) -> None:
    host.report(without=["08"])
    found = find_set(api, host, "0")
    (absent,) = (member for member in found["members"] if member["device_uuid"] is None)
    address = gpu_address("08")
    uuids = dict.fromkeys(("device_uuid", "accelerator_uuid", "arq_uuid"))
    assert absent == {"device": address, "deployable": address, "handle": address, **uuids}
    assert found["size"] == 8


def test_new_set_is_withheld(api: ApiEnv, host: SetHost) -> None:
    (row,) = rows.read(api.engine, schema.deployables, address="hgx:0")
    rows.update(api.engine, schema.deployables, row["id"], offer=None, offer_reason=None)
    assert find_set(api, host, "0")["offer"] == "withheld"
    assert "0" in find_sets(api, "withheld")


def test_offer_filter_selects_sets(api: ApiEnv, host: SetHost) -> None:
    offered = set(host.offered())
    assert find_sets(api, "offered") == offered
    assert find_sets(api, "withheld") == host.family.keys() - offered
    assert find_sets(api, "offered", "withheld") == set(host.family)
    assert find_sets(api, "allocated", "withdrawing") == set()


def test_deployables_of_host_are_selected(
    api: ApiEnv, host: SetHost, placement_adapter: Any
) -> None:
    second = SetHost(api.engine, Node(placement_adapter), kind=SetKind.PCIE)
    found = api.get(f"/v2/deployables?host={second.node.name}")["deployables"]
    assert len(found) == len(second.family) + len(second.gpus)
    assert all(deployable["name"].startswith(second.node.name) for deployable in found)


def test_deployables_before_2_6_have_no_device_set(api: ApiEnv, host: SetHost) -> None:
    found = api.get("/v2/deployables", "2.5")["deployables"]
    assert not any("device_set" in deployable for deployable in found)
    for name in ("offer=offered", f"host={uuid4()}"):
        answer = api.call(
            "GET", f"/v2/deployables?{name}", headers={"OpenStack-API-Version": "accelerator 2.5"}
        )
        assert answer.status_int == 400


def test_page_with_sets_takes_one_more_statement(api: ApiEnv, host: SetHost) -> None:
    def count(query: str) -> int:
        with count_statements(api.engine) as statements:
            api.get(f"/v2/deployables?{query}")
        return len(statements)

    gpu = rows.read(api.engine, schema.deployables, address=gpu_address("01"))[0]["rp_uuid"]
    assert count("offer=offered") == count("offer=withheld") == count(f"rp_uuid={gpu}") + 1


def test_largest_request_of_a_host_is_its_largest_offered_set(api: ApiEnv, host: SetHost) -> None:
    def largest() -> int:
        (row,) = api.get(f"/v2/hosts?hostname={host.node.name}")["hosts"]
        (found,) = row["resource_classes"]
        return int(found["largest_free"])

    assert largest() == 4
    host.bind(next(name for name, size in host.offered().items() if size == 4))
    host.publish()
    assert largest() == max(
        size for name, size in host.offered().items() if host.offers()[name] == "offered"
    )


def test_source_shows_the_use_of_its_members(api: ApiEnv, host: SetHost) -> None:
    def read() -> Any:
        return {row["address"]: row["use"] for row in api.get("/v2/devices")["devices"]}

    none = {"cordoned": 0, "dirty": 0, "draining": 0}
    # Each GPU is a member of four sets, and counts once.
    assert read()["hgx"] == {"total": 8, "free": 8, "owned": 0, **none}
    (name,) = (name for name, size in host.offered().items() if size == 2)
    host.bind(name)
    host.report(without=["08"])
    found = read()
    source = found.pop("hgx")
    assert source == {"total": 7, "free": 5, "owned": 2, **none}
    assert source == {use: sum(gpu[use] for gpu in found.values()) for use in source}
