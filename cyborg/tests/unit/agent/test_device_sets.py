# SPDX-License-Identifier: Apache-2.0
"""An agent with a source of device sets, beside a conductor that only listens."""

from pathlib import Path

import pytest

from cyborg.agent.service import AgentService
from cyborg.core.inventory.report import BackendStatus, Report
from cyborg.rpc.client import make_agent_client
from cyborg.tests.fixtures.bus.broker import Bus
from cyborg.tests.fixtures.hosts.scripted_driver import LONG
from cyborg.tests.unit.agent.report.test_heartbeat import Conductor


def set_sizes(report: Report) -> dict[str, int]:
    """Return the number of members of each set of a report, by its deployable."""
    return {
        part.address: part.device_set.size
        for device in report.devices
        for part in device.deployables
        if part.device_set is not None
    }


@pytest.mark.slow
def test_agent_reports_devices_together_with_their_sets(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "sets.conf").write_text(
        "[DEFAULT]\nhost = compute-1\n[agent]\nenabled_drivers = fake\ndevice_sets = sets\n"
        "[fake]\nnum_devices = 2\nnum_handles = 1\n[sets]\nkind = numa\nmembers = fake\n"
        "sizes = 1\n"
    )
    conductor = Conductor()
    bus.conf.set_override("state_path", str(tmp_path / "state"))
    bus.conf(["--config-file", str(tmp_path / "sets.conf")], project="cyborg")
    with bus.serving("conductor", conductor):
        service = AgentService(bus.conf, bus.conductor(), bus.transport, tmp_path)
        service.start()
        assert service.wait_ready(LONG)
        agent = make_agent_client(bus.transport, bus.conf)
        found: list[Report] = []
        reports: list[Report] = []
        while not found:
            count = len(conductor.calls.calls)
            reports = [body for name, body in conductor.recorded if name == "report"]
            found = [report for report in reports if len(report.devices) == 3]
            if not found:
                conductor.calls.wait_for(count + 1)
        assert len(agent.hardware("compute-1", "device_sets")["hardware"]) == 1
        service.stop()
    for report in reports:
        # Never without the sets: a device that is a member is not offered alone.
        assert len(report.devices) in (0, 3)
        states = {state.name: state for state in report.backends}
        if not report.devices:
            assert states["fake"].status is not BackendStatus.READY
    sizes = set_sizes(found[0])
    assert list(sizes.values()) == [1, 1]
    assert all(address.startswith("sets:1-") for address in sizes)
    assert {state.name: state.driver for state in found[0].backends} == {
        "fake": "fake",
        "sets": "device_sets",
    }
