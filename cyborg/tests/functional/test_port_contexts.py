# SPDX-License-Identifier: Apache-2.0
"""A device context as the device profile of a Neutron port, with the calls that Nova sends.

The host is a replayed one with a network card. As Nova does, the calls have no microversion.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

import pytest
import requests

from cyborg.testing import captures
from cyborg.tests.fixtures.hosts.replayed_hosts import ReplayedCloud, running
from cyborg.tests.fixtures.machine.processes import wait_until

HOST = "compute-1"
NETWORK = {"trait:CUSTOM_PHYSNET_PHYSNET1": "required", "trait:CUSTOM_NIC_VF": "required"}


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayedCloud]:
    """Yield a cloud with one host, whose network card has virtual functions."""
    name, classes = "nic", captures.RESOURCE_CLASSES
    with running(
        tmp_path_factory.mktemp("ports"),
        [HOST],
        drivers={name: captures.DRIVERS[name]},
        resource_classes={name: classes[name]},
    ) as found:
        yield found


class Nova:
    """The calls of Nova for a server, some of whose accelerators are those of its ports."""

    def __init__(self, cloud: ReplayedCloud, project: str) -> None:
        self._cloud = cloud
        self._project = project
        self.instance = str(uuid4())
        self._arqs: dict[str, str] = {}  # the provider of each

    def call(self, method: str, path: str, body: Any = None) -> requests.Response:
        """Send a request to the API, with a service token and without a microversion."""
        url = f"{self._cloud.stack.endpoint}/v2/{path}"
        headers = {"X-Service-Token": "any"}
        return requests.request(method, url, json=body, headers=headers, timeout=60)

    def request_groups(self, profile: str, port: str = "") -> dict[str, dict[str, str]]:
        """Return the groups of a device profile by the requester id that Nova gives them."""
        found = self.call("GET", f"device_profiles?name={profile}").json()["device_profiles"]
        (shown,) = found
        return {f"device_profile_{n}{port}": group for n, group in enumerate(shown["groups"])}

    def allocate(self, groups: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """Allocate a candidate of Placement to the server; return the provider of each group."""
        query: dict[str, str] = {"group_policy": "none", "limit": "1"}
        for number, group in enumerate(groups.values()):
            resources = {k[10:]: v for k, v in group.items() if k.startswith("resources:")}
            query[f"resources{number}"] = ",".join(f"{k}:{v}" for k, v in resources.items())
            query[f"required{number}"] = ",".join(k[6:] for k in group if k.startswith("trait:"))
        answer = self._cloud.stack.placement.get(
            f"/allocation_candidates?{urlencode(query)}"
        ).json()
        (candidate,) = answer["allocation_requests"]
        allocation = {
            "allocations": candidate["allocations"],
            "project_id": self._project,
            "user_id": "u",
            "consumer_generation": None,
            "consumer_type": "INSTANCE",
        }
        path = f"/allocations/{self.instance}"
        assert self._cloud.stack.placement.put(path, json=allocation).status_code == 204
        return {name: candidate["mappings"][str(number)][0] for number, name in enumerate(groups)}

    def boot(self, flavor: str | None, ports: Mapping[str, str]) -> requests.Response:
        """Bind the ARQs of a flavor and of ports, profiles by the uuid of the port, in one call."""
        profiles = {**({} if flavor is None else {"": flavor}), **ports}
        groups: dict[str, dict[str, str]] = {}
        for port, profile in profiles.items():
            groups |= self.request_groups(profile, port)
        providers = self.allocate(groups)
        for port, profile in profiles.items():
            body = {"device_profile_name": profile}
            created = self.call("POST", "accelerator_requests", body)
            assert created.status_code == 201, created.text
            for arq in created.json()["arqs"]:
                name = f"device_profile_{arq['device_profile_group_id']}{port}"
                self._arqs[arq["uuid"]] = providers[name]
        patches = {
            arq: [
                {"op": "add", "path": "/hostname", "value": HOST},
                {"op": "add", "path": "/device_rp_uuid", "value": provider},
                {"op": "add", "path": "/instance_uuid", "value": self.instance},
            ]
            for arq, provider in self._arqs.items()
        }
        return self.call("PATCH", "accelerator_requests", patches)

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Return the ARQs that nova-compute reads, by the name of the device profile."""
        path = f"accelerator_requests?instance={self.instance}&bind_state=resolved"
        answer = self.call("GET", path)
        return {arq["device_profile_name"]: arq for arq in answer.json()["arqs"]}

    def delete(self) -> None:
        """Delete the ARQs and the allocation of the server."""
        answer = self.call("DELETE", f"accelerator_requests?instance={self.instance}")
        assert answer.status_code == 204, answer.text
        path = f"/allocations/{self.instance}"
        assert self._cloud.stack.placement.delete(path).status_code == 204


def create_context(cloud: ReplayedCloud, **config: str) -> dict[str, Any]:
    """Create a device context for a virtual function on a network."""
    body = {"groups": [{"resources:CUSTOM_NIC": "1", **NETWORK}], "config_data": config}
    return dict(cloud.call("POST", "device_contexts", json=body))


def states(cloud: ReplayedCloud, *contexts: Mapping[str, Any]) -> list[str]:
    """Return the states of contexts."""
    return [cloud.call("GET", f"device_contexts/{c['uuid']}")["state"] for c in contexts]


def used(cloud: ReplayedCloud) -> list[str]:
    """Return the accelerators that are not free."""
    found = cloud.call("GET", "accelerators?limit=1000")["accelerators"]
    return [row["uuid"] for row in found if row["hostname"] == HOST and row["state"] != "free"]


def test_port_with_a_context_gets_a_function_on_its_network(cloud: ReplayedCloud) -> None:
    context = create_context(cloud, attach_target="port")
    nova, port = Nova(cloud, context["project_id"]), str(uuid4())
    answer = nova.boot(None, {port: context["hidden_profile"]})
    assert answer.status_code == 202, answer.text
    wait_until("the ARQ is bound", lambda: len(nova.resolved()) == 1)
    arq = nova.resolved()[context["hidden_profile"]]
    assert (arq["state"], arq["hostname"], arq["instance_uuid"]) == ("Bound", HOST, nova.instance)
    assert arq["attach_handle_type"] == "PCI"
    info = arq["attach_handle_info"]
    assert info["physical_network"] == "physnet1"
    assert {"domain", "bus", "device", "function"} <= info.keys()
    assert states(cloud, context) == ["bound"]
    assert used(cloud) == [arq["attach_handle_uuid"]]
    nova.delete()
    wait_until("everything is free", lambda: not used(cloud))
    wait_until("the context is unbound", lambda: states(cloud, context) == ["unbound"])
    assert nova.resolved() == {}
    cloud.call("DELETE", f"device_contexts/{context['uuid']}")
    assert nova.call("GET", f"device_profiles?name={context['hidden_profile']}").json() == {
        "device_profiles": []
    }


def test_server_has_one_context_by_its_flavor_and_one_by_its_port(cloud: ReplayedCloud) -> None:
    flavor, of_port = create_context(cloud), create_context(cloud, attach_target="port")
    nova = Nova(cloud, flavor["project_id"])
    answer = nova.boot(flavor["hidden_profile"], {str(uuid4()): of_port["hidden_profile"]})
    assert answer.status_code == 202, answer.text
    wait_until("both ARQs are bound", lambda: len(nova.resolved()) == 2)
    handles = {arq["attach_handle_uuid"] for arq in nova.resolved().values()}
    assert (len(handles), states(cloud, flavor, of_port)) == (2, ["bound", "bound"])
    assert sorted(used(cloud)) == sorted(handles)
    nova.delete()
    wait_until("everything is free", lambda: not used(cloud))
    wait_until(
        "the contexts are unbound",
        lambda: states(cloud, flavor, of_port) == ["unbound", "unbound"],
    )
    for context in (flavor, of_port):
        cloud.call("DELETE", f"device_contexts/{context['uuid']}")


def test_host_itself_uses_a_context_like_that_of_a_port(cloud: ReplayedCloud) -> None:
    context = create_context(cloud, attach_target="host")
    body = {"hostname": HOST, "device_context": context["uuid"]}
    attachment = cloud.call("POST", "attachments", json=body)["uuid"]
    path = f"attachments/{attachment}"
    wait_until("it is attached", lambda: cloud.call("GET", path)["state"] == "attached")
    assert states(cloud, context) == ["bound"]
    assert len(used(cloud)) == 1
    cloud.call("DELETE", path)
    wait_until("everything is free", lambda: not used(cloud))
    wait_until("the context is unbound", lambda: states(cloud, context) == ["unbound"])
    wait_until("it is deleted", lambda: cloud.request("GET", path).status_code == 404)
    cloud.call("DELETE", f"device_contexts/{context['uuid']}")
