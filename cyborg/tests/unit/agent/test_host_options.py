# SPDX-License-Identifier: Apache-2.0
"""Options that only the host's configuration file may set, not RPC or saved state."""

import json
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.drivers.desired_state import DesiredStatus
from cyborg.core.inventory.report import BackendStatus
from cyborg.tests.fixtures.hosts.reconciler_host import ConductorDouble, StartHost, section

PATHS = ("journal", "gate", "sick", "absent", "divided")


@pytest.mark.slow
@pytest.mark.parametrize("option", PATHS)
def test_host_only_option_over_rpc_fails_without_file_access(
    start_host: StartHost, conductor: ConductorDouble, tmp_path: Path, option: str
) -> None:
    host, target = start_host(), tmp_path / "target"
    config: dict[str, Any] = {"setup": "ok", option: str(target)}
    outcome = host.reconcile_to(conductor.set_desired("f1", **config))["f1"]
    assert outcome == (
        f"config: {option}: can only be set in the configuration file of the host, in the section "
        "of the backend"
    )
    assert host.names() == []
    assert not target.exists()


@pytest.mark.slow
def test_host_only_option_in_saved_state_fails_at_start(
    start_host: StartHost, conductor: ConductorDouble, tmp_path: Path
) -> None:
    host, target = start_host(), tmp_path / "target"
    host.reconcile_to(conductor.set_desired("f1", setup="ok"))
    host.stop()
    state = json.loads(host.path.read_text())["data"]
    for key in ("desired", "applied"):
        state["backends"][0][key]["config"] |= {"journal": str(target)}
    host.path.write_text(json.dumps(state))
    (tmp_path / "boot_id").write_text("boot-2")  # so that it would be set up again
    restarted = start_host()
    (backend,) = restarted.registry
    backend.rediscover()
    assert backend.driver.options == {}, "it stands in for a driver that cannot be made"
    assert not target.exists()
    assert restarted.reconcile_to(conductor.set_desired("f1", setup="ok")) == {"f1": None}, (
        "the API repairs it"
    )


@pytest.mark.slow
def test_host_only_option_in_config_file_survives_changes(
    start_host: StartHost, conductor: ConductorDouble, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    host = start_host(section("f1", journal=journal))
    assert host.reconcile_to(conductor.set_desired("f1", setup="ok")) == {"f1": None}
    assert host.driver("f1").options["journal"] == str(journal)
    assert journal.exists()


@pytest.mark.slow
def test_reference_driver_without_permission_fails(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    host = start_host(allow_reference=False)
    error = host.reconcile_to(conductor.set_desired("f1"))["f1"]
    assert str(error).startswith("backend f1: driver fake is a reference driver; set [agent]")
    assert host.names() == []
    assert host.reconcile_to(conductor.set_desired("fake"))["fake"], (
        "the driver's own name is no leave"
    )
    assert host.reconcile_to(conductor.set_desired("g", driver="generic"))["g"] is None
    host = start_host("[agent]\nallow_reference_drivers = true\n", allow_reference=False)
    assert host.reconcile_to(conductor.set_desired("f2", address="0000:20:00.0"))["f2"] is None


@pytest.mark.slow
def test_reference_driver_in_config_file_can_be_changed(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    text = "[agent]\nenabled_drivers = fake\n[late]\ndriver = fake\naddress = 0000:30:00.0\n"
    host = start_host(text, allow_reference=False)
    assert host.reconcile_to(conductor.set_desired("fake", num_devices=2)) == {"fake": None}
    assert host.reconcile_to(conductor.set_desired("late"))["late"] is None
    assert host.reconcile_to(conductor.set_desired("fake", DesiredStatus.ABSENT))["fake"] is None
    assert host.reconcile_to(conductor.set_desired("fake"))["fake"] is None


@pytest.mark.slow
def test_reference_driver_permission_removed_fails_after_restart(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    host = start_host()
    host.reconcile_to(conductor.set_desired("f1"))
    restarted = start_host(allow_reference=False)
    (backend,) = restarted.registry
    states: list[BackendStatus] = []
    backend.rediscover(lambda state: states.append(state.status))
    while not states:
        pass
    assert states == [BackendStatus.ERROR]
    assert "is a reference driver" in str(backend.snapshot.state.error)
