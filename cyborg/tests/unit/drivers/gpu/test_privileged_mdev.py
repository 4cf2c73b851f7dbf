# SPDX-License-Identifier: Apache-2.0
"""The privileged functions for mediated devices: what they refuse, they do not write."""

import os
from pathlib import Path

import pytest

from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.privileged import files, gpu
from cyborg.tests.unit.drivers.gpu.simulated_gpu import SimulatedKernel

UUID = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedKernel:
    tree = SimulatedKernel(tmp_path)
    tree.add_parent("mtty", 24, {"mtty-1": 1, "mtty-2": 2})
    tree.add_parent("other", 1, {"mtty-1": 1})
    tree.redirect(monkeypatch)
    return tree


@pytest.mark.parametrize("act", [gpu.create, gpu.remove])
@pytest.mark.parametrize(
    ("parent", "type_", "device"),
    [
        ("..", "mtty-2", UUID),
        ("", "mtty-2", UUID),
        ("mtty/../mtty", "mtty-2", UUID),
        ("mtty\n", "mtty-2", UUID),
        ("mtty", "..", UUID),
        ("mtty", "mtty-2/..", UUID),
        ("mtty", "mtty-2\n", UUID),
        ("mtty", "mtty-2", f"{UUID}\n"),
        ("mtty", "mtty-2", UUID.upper()),
        ("mtty", "mtty-2", f"{{{UUID}}}"),
        ("mtty", "mtty-2", UUID.replace("-", "")),
        ("mtty", "mtty-2", "../../x"),
        ("mtty", "mtty-2", ""),
        ("mtty", "mtty-2", None),
        (None, "mtty-2", UUID),
    ],
)
def test_malformed_argument_is_invalid(
    kernel: SimulatedKernel, act: object, parent: str, type_: str, device: str
) -> None:
    assert callable(act)
    with pytest.raises(Invalid):
        act(parent, type_, device)
    assert kernel.writes == []


def writes(kernel: SimulatedKernel) -> list[str]:
    return [Path(path).name for path, _ in kernel.writes]


def test_create_replaces_existing_device_and_remove_is_idempotent(kernel: SimulatedKernel) -> None:
    """An existing device can have the data of the last server that used the slot."""
    gpu.create("mtty", "mtty-2", UUID)
    gpu.create("mtty", "mtty-2", UUID)
    assert kernel.devices() == [UUID]
    gpu.remove("mtty", "mtty-2", UUID)
    gpu.remove("mtty", "mtty-2", UUID)
    assert kernel.devices() == []
    assert writes(kernel) == ["create", "remove", "create", "remove"]


def test_create_keeps_device_of_a_process(kernel: SimulatedKernel, tmp_path: Path) -> None:
    """The job of a running server is repeated after a failure of the agent."""
    gpu.create("mtty", "mtty-2", UUID)
    (tmp_path / "dev/vfio/41").mkdir(parents=True)
    gpu.create("mtty", "mtty-2", UUID)
    assert writes(kernel) == ["create"]


@pytest.mark.parametrize(
    "entry", ["class/vfio/41", f"bus/mdev/devices/{UUID}/vfio-dev/vfio0"], ids=["group", "device"]
)
def test_remove_device_of_vfio_without_its_node_is_refused(
    kernel: SimulatedKernel, tmp_path: Path, entry: str
) -> None:
    """An agent in a container without /dev/vfio cannot find out the use."""
    gpu.create("mtty", "mtty-2", UUID)
    (kernel.root / entry).mkdir(parents=True)
    with pytest.raises(DriverFailed, match=r"vfio/41 is missing; the agent, also in a container"):
        gpu.remove("mtty", "mtty-2", UUID)
    gpu.create("mtty", "mtty-2", UUID)
    assert writes(kernel) == ["create"]
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/41").touch()
    gpu.remove("mtty", "mtty-2", UUID)
    assert kernel.devices() == []


@pytest.mark.parametrize("place", [("mtty", "mtty-1"), ("other", "mtty-1")])
def test_uuid_of_another_device_is_refused(kernel: SimulatedKernel, place: tuple[str, str]) -> None:
    gpu.create("mtty", "mtty-2", UUID)
    expected = rf"is a device of mtty, type mtty-2; expected {place[0]}, type {place[1]}"
    with pytest.raises(DriverFailed, match=expected):
        gpu.create(*place, UUID)
    with pytest.raises(DriverFailed, match=expected):
        gpu.remove(*place, UUID)
    assert kernel.devices() == [UUID]


@pytest.mark.parametrize("place", [("mtty", "mtty-9"), ("absent", "mtty-1")])
def test_create_missing_type_or_parent_fails(
    kernel: SimulatedKernel, place: tuple[str, str]
) -> None:
    with pytest.raises(DriverFailed, match=f"{place[0]} has no type {place[1]}"):
        gpu.create(*place, UUID)
    assert kernel.writes == []


def test_create_by_another_process_at_the_same_time_succeeds(
    kernel: SimulatedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, text: str) -> None:
        kernel.write(path, text)
        kernel.write(path, text)  # EEXIST

    monkeypatch.setattr(gpu, "_write", write)
    gpu.create("mtty", "mtty-2", UUID)
    assert kernel.devices() == [UUID]


def test_remove_device_of_a_process_is_refused(kernel: SimulatedKernel, tmp_path: Path) -> None:
    """The kernel would wait for the process; a group that cannot be opened is in use."""
    gpu.create("mtty", "mtty-2", UUID)
    (tmp_path / "dev/vfio/41").mkdir(parents=True)  # a folder cannot be opened to write
    with pytest.raises(DriverFailed, match="may still be used by a process"):
        gpu.remove("mtty", "mtty-2", UUID)
    assert kernel.devices() == [UUID]
    (tmp_path / "dev/vfio/41").rmdir()
    (tmp_path / "dev/vfio/41").touch()
    gpu.remove("mtty", "mtty-2", UUID)
    assert kernel.devices() == []


def test_remove_that_the_kernel_refuses_fails_with_the_reason(
    kernel: SimulatedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise OSError(16, os.strerror(16))

    gpu.create("mtty", "mtty-2", UUID)
    monkeypatch.setattr(gpu, "_write", refuse)
    with pytest.raises(DriverFailed, match="could not be removed: Device or resource busy"):
        gpu.remove("mtty", "mtty-2", UUID)


def test_write_creates_no_file(tmp_path: Path) -> None:
    (tmp_path / "attribute").touch()
    # The fixture replaces the function in other tests.
    files.write(tmp_path / "attribute", "1")
    assert (tmp_path / "attribute").read_text() == "1"
    with pytest.raises(FileNotFoundError):
        files.write(tmp_path / "absent", "1")
    assert not (tmp_path / "absent").exists()
