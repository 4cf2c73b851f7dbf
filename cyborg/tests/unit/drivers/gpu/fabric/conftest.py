# SPDX-License-Identifier: Apache-2.0
"""The doubles of Fabric Manager's library and of fmpm, built with cc."""

from pathlib import Path

import pytest

from cyborg.drivers.gpu.fabric.requests import FabricRequests
from cyborg.testing.fabric_manager import FabricManagerDouble, Programs, build
from cyborg.tests.fixtures.machine import prerequisites


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    prerequisites.require("compiler")
    return build(tmp_path_factory.mktemp("fabric"))


@pytest.fixture
def double(tmp_path: Path) -> FabricManagerDouble:
    return FabricManagerDouble(tmp_path / "fabric_manager")


@pytest.fixture
def sdk(programs: Programs, double: FabricManagerDouble) -> FabricRequests:
    """Requests by the library; fmpm is not installed."""
    return FabricRequests(double.address, library=str(programs.library), command="/missing/fmpm")


@pytest.fixture
def fmpm(programs: Programs, double: FabricManagerDouble) -> FabricRequests:
    """Requests by fmpm; the library is not installed."""
    return FabricRequests(double.address, library="libmissing.so", command=str(programs.fmpm))
