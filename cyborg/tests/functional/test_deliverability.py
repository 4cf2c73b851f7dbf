# SPDX-License-Identifier: Apache-2.0
"""A device that Nova cannot attach, in the whole service: shown, reserved in full, not bound."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborg.cli import app
from cyborg.core import naming
from cyborg.standalone.stack import StandaloneStack
from cyborg.testing.sysfs_tree import SysfsTree
from cyborg.tests.fixtures.clouds.standalone import HOST, running
from cyborg.tests.fixtures.machine.processes import wait_until

CARD = "0000:3d:00.0"
PROVIDER = naming.provider_uuid(HOST, CARD)
QAT = "CUSTOM_QAT"
VERSION = {"OpenStack-API-Version": "accelerator 2.5"}


class Env:
    """A stack whose host has one card and no IOMMU at first."""

    def __init__(self, stack: StandaloneStack, tree: SysfsTree) -> None:
        self.stack, self.tree = stack, tree

    def call(self, method: str, path: str, **more: Any) -> requests.Response:
        headers = VERSION | {"X-Service-Token": "any"}
        url = f"{self.stack.endpoint}{path}"
        return requests.request(method, url, headers=headers, timeout=60, **more)

    def device(self) -> dict[str, Any]:
        (device,) = self.call("GET", f"/v2/devices?address={CARD}").json()["devices"]
        return dict(device)

    def inventory(self) -> tuple[int, int] | None:
        """Return the total and the reserved number of cards in Placement, None without any."""
        answer = self.stack.placement.get(f"/resource_providers/{PROVIDER}/inventories").json()
        body = answer.get("inventories", {}).get(QAT)
        return None if body is None else (body["total"], body["reserved"])

    def bind(self) -> dict[str, Any]:
        """Bind a new ARQ to the card as Nova does; return the ARQ or the error."""
        created = self.call("POST", "/v2/accelerator_requests", json={"device_profile_name": "q"})
        request = created.json()["arqs"][0]["uuid"]
        values = {"hostname": HOST, "device_rp_uuid": PROVIDER, "instance_uuid": str(uuid.uuid4())}
        patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]
        answer = self.call("PATCH", "/v2/accelerator_requests", json={request: patch})
        if answer.status_code != 202:
            return {"state": answer.status_code, "text": answer.text}
        return dict(self.call("GET", f"/v2/accelerator_requests/{request}").json())


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    folder: Path = tmp_path_factory.mktemp("deliverability")
    tree = SysfsTree(folder / "sys", iommu=False)
    tree.add_function(CARD)
    with running(
        folder,
        agent={"enabled_drivers": "fake,generic"},
        sysfs_root=tree.root,
        generic={"devices": "vendor=8086"},
    ) as stack:
        new_env = Env(stack, tree)
        profile = {"name": "q", "groups": [{f"resources:{QAT}": "1"}]}
        assert new_env.call("POST", "/v2/device_profiles", json=[profile]).status_code == 201
        wait_until("the card is in Placement", new_env.inventory)
        yield new_env


def test_undeliverable_device_is_shown_reserved_and_not_bound(
    env: Env, capsys: pytest.CaptureFixture[str]
) -> None:
    device = env.device()
    assert device["deliverable"] is False
    assert device["undeliverable_reason"].startswith("the host has no IOMMU: enable VT-d or AMD-Vi")
    assert device["state_reasons"] == ["undeliverable"]
    assert device["topology"] == {"pci_root": "0000:00", "pci_path": CARD}
    assert env.inventory() == (1, 1)
    candidates = env.stack.placement.get(f"/allocation_candidates?resources={QAT}:1").json()
    assert candidates["allocation_requests"] == []
    refused = env.bind()
    assert refused["state"] == 409
    assert "device cannot be attached to an instance" in refused["text"]
    fakes = env.call("GET", "/v2/devices?deliverable=true").json()["devices"]
    assert {fake["backend"] for fake in fakes} == {"fake"}, "the check is not for other drivers"

    connection = ["--os-auth-type", "none", "--os-endpoint", env.stack.endpoint]
    assert app.main([*connection, "device-show", device["uuid"], "-f", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["Schedulable"] == "no: undeliverable"
    assert shown["Undeliverable reason"] == device["undeliverable_reason"]
    assert app.main([*connection, "audit", "-f", "json"]) == 0, capsys.readouterr()


def test_device_is_offered_when_the_remedy_is_applied(env: Env) -> None:
    env.tree.load_vfio(disable_denylist=True)
    group = env.tree.root / "kernel/iommu_groups/5"
    group.mkdir(parents=True)
    (env.tree.bus / CARD / "iommu_group").symlink_to("../../../kernel/iommu_groups/5")
    wait_until("Placement offers the card", lambda: env.inventory() == (1, 0))
    device = env.device()
    assert (device["deliverable"], device["undeliverable_reason"]) == (True, None)
    assert device["topology"]["iommu_group"] == "5"
    assert env.bind()["state"] == "Bound"
