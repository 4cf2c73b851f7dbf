# SPDX-License-Identifier: Apache-2.0
"""Servers with Neutron ports that have a device profile: real Nova and Neutron.

The tests follow ``doc/source/admin/neutron_ports.rst``.
``cyborg/tests/fixtures/nova/neutron_cloud.py`` says what this cloud does not show.
"""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from cyborg.tests.fixtures.clouds.nova_cloud import MICROVERSION
from cyborg.tests.fixtures.machine import tutorial
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.transcript import parse
from cyborg.tests.fixtures.nova.neutron_cloud import CARDS, NeutronCloud, neutron_cloud
from cyborg.tests.fixtures.nova.servers import MEMBER, PATIENCE, Servers

__all__ = ["neutron_cloud"]

pytestmark = [
    pytest.mark.services,
    pytest.mark.requires("nova"),
    pytest.mark.requires("neutron"),
    pytest.mark.long,
    # Five databases, and fourteen daemons, on a machine that may be busy with other tests.
    pytest.mark.timeout(3600),
]

REFUSED = "Feature not supported with Ports that have accelerators."


@pytest.fixture
def servers(neutron_cloud: NeutronCloud) -> Iterator[Servers]:
    """Yield the servers of a project; delete those that a failed test leaves."""
    created = Servers(neutron_cloud)
    yield created
    created.delete_all()


@pytest.fixture(scope="module")
def network(neutron_cloud: NeutronCloud) -> str:
    """Return the uuid of a network on physnet1."""
    return neutron_cloud.create_network("physnet1")


def make_profile(cloud: NeutronCloud, resource_class: str, **traits: str) -> str:
    """Create a device profile for ports; return its name."""
    name = f"port-{uuid4().hex[:8]}"
    group = {f"resources:{resource_class}": "1", "accel:attach_target": "port"}
    group |= {f"trait:{trait}": required for trait, required in traits.items()}
    answer = cloud.call("admin", "POST", "/v2/device_profiles", [{"name": name, "groups": [group]}])
    assert answer.status_code == 201, answer.text
    return name


def make_nic_profile(cloud: NeutronCloud, physical: str) -> str:
    """Create a device profile for a virtual function on a physical network; return its name."""
    traits = (f"CUSTOM_PHYSNET_{physical.upper()}", "CUSTOM_NIC_VF")
    return make_profile(cloud, "CUSTOM_NIC", **dict.fromkeys(traits, "required"))


def address_of(cloud: NeutronCloud, server: str, port: str, physical: str) -> str:
    """Return the address of the function of a port; its ARQ, Neutron and the guest must agree."""
    answer = cloud.call("admin", "GET", f"/v2/accelerator_requests?instance={server}")
    (arq,) = [a for a in answer.json()["arqs"] if "physical_network" in a["attach_handle_info"]]
    info = arq["attach_handle_info"]
    address = f"{info['domain']}:{info['bus']}:{info['device']}.{info['function']}"
    shown = cloud.show_port(port)
    assert shown["binding:profile"] == {
        "arq_uuid": arq["uuid"],
        "pci_slot": address,
        "physical_network": physical,
    }
    assert shown["binding:vif_type"] == "hw_veb"
    assert (shown["binding:host_id"], shown["device_id"]) == (arq["hostname"], server)
    assert cloud.nova.guests.ports(server) == {port: address}
    return address


def is_unbound(cloud: NeutronCloud, port: str) -> bool:
    """Return whether a port has no server and no device."""
    shown = cloud.show_port(port)
    keys = ("device_id", "binding:profile", "binding:vif_type", "binding:host_id")
    return [shown[key] for key in keys] == ["", {}, "unbound", ""]


def used_functions(cloud: NeutronCloud) -> list[str]:
    """Return the uuids of the virtual functions that are not free."""
    answer = cloud.call("admin", "GET", "/v2/accelerators?resource_class=CUSTOM_NIC")
    found = answer.json()["accelerators"]
    assert found
    return [row["uuid"] for row in found if row["state"] != "free"]


def wait_until_free(cloud: NeutronCloud) -> None:
    """Wait until no server has a virtual function."""
    wait_until("all functions are free", lambda: not used_functions(cloud), PATIENCE)


def test_each_port_has_a_function_until_its_server_is_deleted(
    servers: Servers, neutron_cloud: NeutronCloud, network: str
) -> None:
    cloud, flavor = neutron_cloud, servers.make_flavor(None)
    profile = make_nic_profile(cloud, "physnet1")
    # Neutron lets users create such ports.
    ports = [cloud.create_port(MEMBER, network, profile) for _ in range(3)]
    booted = [servers.request(flavor, port) for port in ports[:2]]
    for server in booted:
        servers.wait_for_status(server, "ACTIVE")
    addresses = [address_of(cloud, *pair, "physnet1") for pair in zip(booted, ports, strict=False)]
    assert len(set(addresses)) == len(set(used_functions(cloud))) == 2
    assert all(address.startswith(CARDS["physnet1"]) for address in addresses)
    path = f"/servers/{booted[0]}/os-interface"
    nova = cloud.compute(MEMBER)
    attach = nova.post(path, json={"interfaceAttachment": {"port_id": ports[2]}})
    for answer in (attach, nova.delete(f"{path}/{ports[0]}")):
        assert (answer.status_code, answer.json()["badRequest"]["message"]) == (400, REFUSED)
    assert address_of(cloud, booted[0], ports[0], "physnet1") == addresses[0]
    for server in booted:
        servers.delete(server)
    wait_until_free(cloud)
    assert all(is_unbound(cloud, port) for port in ports)


def test_server_with_profiles_of_flavor_and_port_has_both_devices(
    servers: Servers, neutron_cloud: NeutronCloud, network: str
) -> None:
    """After a stop and start, Nova passes the device of the port to the hypervisor twice."""
    cloud, flavor = neutron_cloud, servers.make_flavor(servers.make_profile())
    port = cloud.create_port(MEMBER, network, make_nic_profile(cloud, "physnet1"))
    server = servers.boot(flavor, port)
    address = address_of(cloud, server, port, "physnet1")
    found = servers.devices(server)
    assert (len(found.listed), found.allocated, found.used) == (2, 1, 1)
    (fpga,) = found.composed
    assert fpga in found.listed
    servers.act(server, "os-stop")
    servers.wait_for_status(server, "SHUTOFF")
    assert cloud.nova.guests.ports(server) == {}
    servers.act(server, "os-start")
    servers.wait_for_status(server, "ACTIVE")
    assert address_of(cloud, server, port, "physnet1") == address
    assert servers.devices(server) == found._replace(composed=found.listed)
    servers.delete(server)
    wait_until_free(cloud)
    assert is_unbound(cloud, port)


def test_device_without_a_physical_network_is_refused_with_the_reason(
    servers: Servers, neutron_cloud: NeutronCloud, network: str
) -> None:
    cloud, profile = neutron_cloud, make_profile(neutron_cloud, "FPGA")
    port = cloud.create_port(MEMBER, network, profile)
    server = servers.request(servers.make_flavor(None), port)
    wait_until(
        "the server is in ERROR", lambda: servers.show(server)["status"] == "ERROR", PATIENCE
    )
    fault = servers.show(server)["fault"]["message"]
    assert fault.startswith("Failed to bind accelerator requests"), fault
    logs = "".join(cloud.daemons[name].log.read_text() for name in cloud.conductors)
    reason = f"no physical_network, which accel:attach_target=port of device profile {profile}"
    assert reason in logs
    found = servers.devices(server)
    assert (found.listed, found.used) == ([], 0)
    assert is_unbound(cloud, port)


def test_device_on_another_network_than_that_of_the_port_is_not_refused(
    servers: Servers, neutron_cloud: NeutronCloud, network: str
) -> None:
    """No service compares both: the profile must require the trait of the right network."""
    cloud = neutron_cloud
    port = cloud.create_port(MEMBER, network, make_nic_profile(cloud, "physnet2"))
    server = servers.boot(servers.make_flavor(None), port)
    address = address_of(cloud, server, port, "physnet2")
    assert address.startswith(CARDS["physnet2"])
    servers.delete(server)
    wait_until_free(cloud)


def test_page_matches_output(neutron_cloud: NeutronCloud) -> None:
    for name in ("admin", MEMBER):
        variables = neutron_cloud.keystone.environment(name)
        variables["OS_COMPUTE_API_VERSION"] = MICROVERSION
        tutorial.write_openrc(neutron_cloud.folder, name, variables)
    page = tutorial.PAGE.with_name("neutron_ports.rst")
    tutorial.execute_steps(neutron_cloud.folder, parse(page.read_text()), page.name)
