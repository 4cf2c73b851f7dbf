# SPDX-License-Identifier: Apache-2.0
"""The structures of the binding, and what the double of the library refuses."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from cyborg.drivers.gpu.fabric import library, partitions
from cyborg.testing.fabric_manager import FabricManagerDouble, Programs

pytestmark = [pytest.mark.requires("compiler"), pytest.mark.slow]

# By the name in nv_fm_types.h.
STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "fmConnectParams_v1": library.ConnectParamsV1,
    "fmConnectParams_v2": library.ConnectParamsV2,
    "fmPciDevice_t": library.PciDevice,
    "fmFabricPartitionGpuInfo_t": library.GpuInfo,
    "fmFabricPartitionInfo_t": library.PartitionInfo,
    "fmFabricPartitionList_t": library.PartitionList,
    "fmActivatedFabricPartitionList_t": library.ActivatedList,
}


class Session:
    """The double in this process, connected to a Fabric Manager."""

    def __init__(self, built: ctypes.CDLL, address: str) -> None:
        self.built, self.address, self.handle = built, address, ctypes.c_void_p()

    def connect(
        self, kind: type[Any] = library.ConnectParamsV2, version: int = 0, **more: int
    ) -> int:
        size = ctypes.sizeof(kind)
        layout = 2 if kind is library.ConnectParamsV2 else 1
        params = kind(version or size | layout << 24, self.address.encode(), 1000, 1, **more)
        return int(self.built.fmConnect(ctypes.byref(params), ctypes.byref(self.handle)))

    def list(self, version: int) -> int:
        found = library.PartitionList(version=version)
        return int(self.built.fmGetSupportedFabricPartitions(self.handle, ctypes.byref(found)))


@pytest.fixture
def session(programs: Programs, double: FabricManagerDouble) -> Iterator[Session]:
    built = ctypes.CDLL(str(programs.library))
    yield Session(built, double.address)
    built.fmLibShutdown()


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_has_the_size_of_the_c_type(session: Session, name: str) -> None:
    assert ctypes.sizeof(STRUCTURES[name]) == session.built.size_of(name.encode()) > 0


def test_partition_list_has_the_version_that_fmpm_prints() -> None:
    # 16909068 is the "version" in the output of fmpm -l on an HGX, which a public repository keeps
    # (spec of Prog::LearnGpuPartitions of ubicloud/ubicloud).
    assert ctypes.sizeof(library.PartitionList) | 1 << 24 == 16909068


def test_limits_of_program_and_package_are_the_same() -> None:
    assert library.MAX_PARTITIONS == partitions.MAX_PARTITIONS
    assert library.MAX_GPUS == partitions.MAX_GPUS


def test_library_without_initialization_refuses(session: Session) -> None:
    assert session.connect(addressType=2) == -4
    assert session.list(0) == -6
    assert session.built.fmLibShutdown() == -4


def test_library_second_initialization_is_refused(session: Session) -> None:
    assert session.built.fmLibInit() == 0
    assert session.built.fmLibInit() == -7


def test_library_other_versions_are_refused(session: Session) -> None:
    session.built.fmLibInit()
    size = ctypes.sizeof(library.ConnectParamsV2)
    assert session.connect(version=size | 3 << 24, addressType=2) == -6
    assert session.connect(version=size - 4 | 2 << 24, addressType=2) == -6
    assert session.connect(library.ConnectParamsV1) == 0
    assert session.connect(addressType=2) == 0
    size = ctypes.sizeof(library.PartitionList)
    assert session.list(size | 2 << 24) == -6
    assert session.list(size - 128 | 1 << 24) == -6
    assert session.list(size | 1 << 24) == 0


def test_library_invalid_handle_is_refused(session: Session) -> None:
    session.built.fmLibInit()
    assert session.list(ctypes.sizeof(library.PartitionList) | 1 << 24) == -1
