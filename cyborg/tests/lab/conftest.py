# SPDX-License-Identifier: Apache-2.0
"""Skip the lab with a reason where it cannot run, or fail where it is required."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine import guest, prerequisites, tiers
from cyborg.tests.lab.programs.drive import SIZE

FOLDER = Path(__file__).parent
# Two functions of one slot without ACS share an IOMMU group.
SHARED = (
    *("-device", "edu,addr=1a.0,multifunction=on"),
    *("-device", "edu,addr=1a.1"),
)
# Seconds that a test may take. CI has half an hour for all tests of the tier ``all``.
LIMIT = 900
EXTENDED_LIMIT = 3600
DEVICES = (
    *guest.IOMMU,
    *guest.ROOT_PORT,
    *guest.NVME,
    *guest.EDU,
    *guest.EDU_BEHIND_PORT,
    *SHARED,
)


@pytest.fixture(scope="session")
def drive_programs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, str]:
    """Return the output of the programs for the NVMe drive by name.

    The modules of the selected tests name them as ``DRIVE_PROGRAM``.
    """
    # One guest for all: a boot, and the imports of a program, cost more than what most of them do.
    modules = [getattr(item, "module", None) for item in request.session.items]
    names = {getattr(module, "DRIVE_PROGRAM", None) for module in modules} - {None}
    disk = tmp_path_factory.mktemp("drive") / "disk.raw"
    disk.write_bytes(bytes(SIZE))
    return guest.run_programs(sorted(map(str, names)), [*DEVICES, *guest.add_namespace(1, disk)])


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that holds the data of the second namespace of the drive."""
    path = tmp_path_factory.mktemp("disks") / "2.raw"
    path.write_bytes(bytes(16 << 20))
    return path


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Give each test the time that the boot of an emulated host takes on a slow machine."""
    tiers.limit_time(config, items, FOLDER, LIMIT, EXTENDED_LIMIT)


# A hook, not a fixture: a fixture of a test module with the same name would replace it.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip a test on a machine that cannot boot a guest."""
    prerequisites.require("lab")
