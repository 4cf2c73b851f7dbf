# SPDX-License-Identifier: Apache-2.0
"""A simulated kernel with FPGA cards."""

from pathlib import Path

import pytest

from cyborg.tests.unit.drivers.fpga.simulated_fpga import SimulatedKernel


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedKernel:
    found = SimulatedKernel(tmp_path)
    found.redirect(monkeypatch)
    return found
