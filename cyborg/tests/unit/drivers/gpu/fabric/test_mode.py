# SPDX-License-Identifier: Apache-2.0
"""The mode of Fabric Manager, from its configuration file and from its refusals."""

from pathlib import Path

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.drivers.base import VolatileMemory
from cyborg.drivers.gpu.fabric.manager import FabricManager
from cyborg.drivers.gpu.fabric.mode import (
    FUNCTIONS,
    WHOLE,
    find_config,
    find_mode_obstacles,
    read_mode,
)
from cyborg.drivers.gpu.fabric.requests import FabricRequests
from cyborg.testing.fabric_manager import FabricManagerDouble

PATH = Path("/etc/fm.cfg")


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("# Description: Fabric Manager Operating Mode\nFABRIC_MODE=1\n", 1),
        ("FABRIC_MODE = 2  # vGPU\nFABRIC_MODE_RESTART=1\n", 2),
        ("FABRIC_MODE=1\nFABRIC_MODE=0\n", 0),
        ("#FABRIC_MODE=1\nFABRIC_MODE_RESTART=1\n", None),
        ("FABRIC_MODE=shared\n", None),
        ("\xff\n", None),
    ],
)
def test_read_mode_is_the_last_setting(tmp_path: Path, text: str, mode: int | None) -> None:
    path = tmp_path / "fabricmanager.cfg"
    path.write_text(text, encoding="latin-1")
    assert read_mode(path) == mode


def test_read_mode_without_a_file_is_unknown(tmp_path: Path) -> None:
    assert read_mode(None) is read_mode(tmp_path) is read_mode(tmp_path / "none") is None


@pytest.mark.parametrize("address", ["127.0.0.1:6666", "localhost:6666", "[::1]:6666", "/run/fm"])
def test_find_config_of_a_fabric_manager_on_this_host(address: str) -> None:
    assert find_config(address, str(PATH)) == PATH


@pytest.mark.parametrize("address", ["192.0.2.7:6666", "fm.example.org:6666", "[2001:db8::1]:6666"])
def test_find_config_of_a_service_vm_is_none(address: str) -> None:
    assert find_config(address, str(PATH)) is None


def test_find_mode_obstacles_closes_what_the_mode_does_not_activate() -> None:
    assert find_mode_obstacles(None, None, ()) == {}
    assert find_mode_obstacles(1, PATH, ()) == {
        FUNCTIONS: (
            "Fabric Manager has FABRIC_MODE=1, and needs FABRIC_MODE=2 for virtual functions: set "
            "it in /etc/fm.cfg, and restart nvidia-fabricmanager while no server uses its GPUs"
        )
    }
    assert find_mode_obstacles(2, PATH, ()).keys() == {WHOLE}
    assert find_mode_obstacles(0, PATH, ()).keys() == {WHOLE, FUNCTIONS}
    refused = find_mode_obstacles(None, None, {WHOLE})
    assert refused.keys() == {WHOLE}
    assert "FABRIC_MODE=1 for whole GPUs: set it in fabricmanager.cfg" in refused[WHOLE]


@pytest.mark.requires("compiler")
@pytest.mark.slow
@pytest.mark.parametrize("restart", [True, False])
def test_refused_activation_closes_its_kind_until_fabric_manager_restarts(
    sdk: FabricRequests, double: FabricManagerDouble, restart: bool
) -> None:
    memory = VolatileMemory()
    manager = FabricManager(sdk, lambda: memory)
    assert manager.read().mode_obstacles == {}
    double.set("mode", 2)
    with pytest.raises(DriverFailed, match="is not in the mode"):
        manager.activate(3)
    manager.activate(4, ["0000:01:00.4", "0000:02:00.4"])
    assert manager.read().mode_obstacles.keys() == {WHOLE}
    double.set("mode", 1)
    double.stop()
    if not restart:
        assert manager.read().problem is not None
    double.start(restart=restart)
    assert manager.read().mode_obstacles == {}
    manager.activate(3)


@pytest.mark.requires("compiler")
@pytest.mark.slow
def test_mode_of_the_file_is_read_each_time(
    sdk: FabricRequests, double: FabricManagerDouble, tmp_path: Path
) -> None:
    memory, path = VolatileMemory(), tmp_path / "fabricmanager.cfg"
    manager = FabricManager(sdk, lambda: memory, config=path)
    path.write_text("FABRIC_MODE=2\n")
    assert manager.read().mode_obstacles.keys() == {WHOLE}
    path.write_text("FABRIC_MODE=1\n")
    assert manager.read().mode_obstacles.keys() == {FUNCTIONS}


@pytest.mark.requires("compiler")
@pytest.mark.slow
def test_refused_activation_has_no_effect_and_another_problem_keeps_the_mode(
    sdk: FabricRequests, double: FabricManagerDouble
) -> None:
    memory = VolatileMemory()
    manager = FabricManager(sdk, lambda: memory)
    double.set("mode", 2)
    with pytest.raises(DriverFailed, match="is not in the mode"):
        manager.activate(3)
    double.set("active", "3")  # by another program
    state = manager.read()
    assert state.own == set()
    assert state.mode_obstacles.keys() == {WHOLE}
    # Not a restart, so that the mode is the same.
    double.set("fail", "fmGetSupportedFabricPartitions -10 1")
    assert manager.read().problem is not None
    assert manager.read().mode_obstacles.keys() == {WHOLE}
