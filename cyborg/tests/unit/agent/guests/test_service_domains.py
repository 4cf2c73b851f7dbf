# SPDX-License-Identifier: Apache-2.0
"""A whole agent whose libvirt has a domain with a device, and a conductor that answers late."""

from pathlib import Path
from typing import Any

import pytest

from cyborg.agent import service as services
from cyborg.agent.backends.factory import options_of
from cyborg.agent.guests import function_users
from cyborg.agent.service import AgentService
from cyborg.core.errors import Unavailable
from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.host_use import domains
from cyborg.testing.machine import HostTree
from cyborg.tests.fixtures.bus.broker import Bus
from cyborg.tests.fixtures.machine.processes import wait_until

URI = "test:///default"
CARD = "0000:0c:00.0"
DOMAIN = """
<domain type='test'><name>guest1</name><memory>1024</memory><os><type>hvm</type></os><devices>
<hostdev mode='subsystem' type='pci'><source><address bus='0x0c' slot='0' function='0'/></source>
</hostdev></devices></domain>"""


class Conductor:
    """A conductor that answers nothing at first, and then only who owns functions."""

    is_up = False

    def find_function_owners(self, host: str, functions: list[Any]) -> Any:
        """Return that nothing owns them."""
        if not self.is_up:
            raise Unavailable("no conductor listens")
        return {"owners": [None] * len(functions)}

    def __getattr__(self, name: str) -> Any:
        def fail(*args: Any, **more: Any) -> Any:
            raise Unavailable("no conductor listens")

        return fail


@pytest.fixture
def domain(connection: Any) -> Any:
    return connection.defineXML(DOMAIN)


@pytest.mark.requires("libvirt_python")
def test_agent_withholds_the_device_of_a_domain_when_the_conductor_answers(
    memory_bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, domain: Any
) -> None:
    tree = HostTree(tmp_path)
    tree.add_function(CARD, "8086", "1572", "020000", kernel_driver="vfio-pci")
    for module in (services, domains):
        monkeypatch.setattr(module, "LOCAL_ROOT", tree.root)
    monkeypatch.setattr(function_users, "FIRST_RETRY", 0.05)
    conf, conductor = memory_bus.conf, Conductor()
    conf.register_opts(options_of(GenericDriver), group="generic")
    for group, name, value in (
        ("agent", "enabled_drivers", ["generic"]),
        ("agent", "watch_uevents", False),
        ("agent", "discovery_interval", 3600.0),
        ("generic", "devices", ["class=02"]),
        ("libvirt", "connection_uri", URI),
    ):
        conf.set_override(name, value, group=group)
    conf.set_override("state_path", str(tmp_path / "state"))
    agent = AgentService(
        conf,
        conductor,  # type: ignore[arg-type]
        memory_bus.transport,
        tree.root,
    )

    def find_reasons() -> list[str | None]:
        (backend,) = agent._registry
        return [d.vendor_board_info.get(NOT_OFFERED) for d in backend.snapshot.devices]

    agent.start()
    try:
        wait_until("the first discovery", find_reasons)
        assert find_reasons() == [None]
        conductor.is_up = True
        expected = ["it is used by the domain guest1 of libvirt"]
        wait_until("the discovery after the answer", lambda: find_reasons() == expected)
    finally:
        agent.stop()
