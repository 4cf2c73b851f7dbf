# SPDX-License-Identifier: Apache-2.0
"""The capture of a simulated HGX host: its format, and its replay with device sets."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.capture import model
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.core.inventory.device import Device
from cyborg.core.inventory.device_set import Activation
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.device_sets.driver import DeviceSetDriver
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.gpu.fabric.partitions import Partition
from cyborg.drivers.replay.fabric import SimulatedFabric, dump_partitions, parse_partitions
from cyborg.drivers.replay.host import ReplayedHost
from cyborg.drivers.replay.recorder import load_capture
from cyborg.testing import captures
from cyborg.tests.fixtures.device_sets.families import H100

FILE = captures.FOLDER / "hosts/hgx-h100.jsonl"
PAIR, FOUR, OTHER_PAIR = 3, 1, 4  # partitions; the pairs are parts of the four
GPU_OPTIONS = {"devices": ["vendor=10de,class=0302"], "reset": "if_possible"}


@pytest.fixture(scope="module")
def capture() -> model.Capture:
    return load_capture(FILE)


@pytest.fixture
def host(capture: model.Capture) -> Iterator[ReplayedHost]:
    host = ReplayedHost(capture)
    yield host
    host.close()


@pytest.fixture
def gpus(host: ReplayedHost) -> Sequence[Device]:
    return host.create_driver(GpuDriver, "gpus", GPU_OPTIONS).discover()


@pytest.fixture
def source(host: ReplayedHost, gpus: Sequence[Device]) -> DeviceSetDriver:
    options = {"kind": "fabric", "members": ["gpus"]}
    source = DeviceSetDriver("hgx", options, host.sysfs_root)
    source.read_devices = lambda backend: gpus
    source.fabric = host.fabric
    return source


def item(partition: int) -> WorkItem:
    """Return the work item of the set of a partition."""
    return WorkItem("hgx", "hgx", f"hgx:{partition}", "")


def test_capture_is_marked_as_simulated(capture: model.Capture) -> None:
    assert capture.source.startswith("Simulated: ")
    assert capture.source.endswith("No card was read.")


def test_capture_has_what_sets_need(capture: model.Capture) -> None:
    assert sorted(facts["module"] for facts in capture.nvml.values()) == list(range(1, 9))
    found = {str(p.id): {f"{module:02}" for module in p.modules} for p in parse_partitions(capture)}
    assert found == H100
    text = "".join(model.dump(capture))
    assert model.parse(text) == capture
    assert '"fabric"' not in "".join(model.dump(replace(capture, fabric={})))


def test_replay_shows_gpus_and_the_sets_of_each_partition(
    gpus: Sequence[Device], source: DeviceSetDriver
) -> None:
    assert len(gpus) == 8
    assert all(gpu.deliverable for gpu in gpus)
    modules = {gpu.address: f"{int(gpu.topology['module_id']):02}" for gpu in gpus}
    (device,) = source.discover()
    sets = {part.address: part.device_set for part in device.deployables}
    assert {
        name.removeprefix("hgx:"): {modules[member.device] for member in found.members}
        for name, found in sets.items()
        if found is not None and found.obstacle is None
    } == H100
    traits = {part.address: part.traits for part in device.deployables}
    assert {"CUSTOM_SET_FABRIC", "CUSTOM_NVLINK_25000_MBPS"} <= traits["hgx:0"]
    (measured,) = source.measure([device]).values()
    assert measured.reason is None


def test_replay_activates_one_partition_of_a_gpu(source: DeviceSetDriver) -> None:
    source.discover()
    for _ in range(2):
        source.prepare(item(FOUR), "6f1c9c0e-5d5b-4c53-9d2f-1f4f6d3a7b10")
    assert source.read_activations()[f"hgx:{FOUR}"] is Activation.OWN
    with pytest.raises(DriverFailed, match=f"partition {FOUR} is active and has one of its GPUs"):
        source.prepare(item(PAIR), None)
    source.release(item(FOUR))
    source.release(item(FOUR))
    assert set(source.read_activations().values()) == {Activation.INACTIVE}
    for pair in (PAIR, OTHER_PAIR):
        source.prepare(item(pair), None)
    active = {name for name, a in source.read_activations().items() if a is Activation.OWN}
    assert active == {f"hgx:{PAIR}", f"hgx:{OTHER_PAIR}"}


def test_active_partition_of_a_capture_is_that_of_another_program() -> None:
    fabric = SimulatedFabric([Partition(7, (1, 2), is_active=True)])
    state = fabric.read()
    assert state.activation(state.partitions[0]) is Activation.FOREIGN
    with pytest.raises(DriverFailed, match="has no partition 8"):
        fabric.activate(8)
    with pytest.raises(DriverFailed, match="has 2 GPUs, found 1 virtual functions"):
        fabric.activate(7, ["0000:1b:00.4"])


@pytest.mark.parametrize(
    ("fabric", "message"),
    [
        ({"partition": []}, "KeyError"),
        ({"partitions": [{"id": "one", "modules": [1]}]}, "fabric: "),
        ({"partitions": 3}, "TypeError"),
        (dump_partitions([Partition(1, (1,)), Partition(1, (2,))]), "partition 1 is listed twice"),
        (dump_partitions(Partition(n, (1,)) for n in range(65)), "more than 64 partitions"),
    ],
)
def test_malformed_fabric_is_refused(
    capture: model.Capture, fabric: dict[str, Any], message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        ReplayedHost(replace(capture, fabric=fabric))


def test_merged_captures_have_one_fabric(capture: model.Capture) -> None:
    both = model.merge("both", [capture, captures.load("nvme")])
    assert both.fabric == capture.fabric
    with pytest.raises(Invalid, match="more than one of the captures has a fabric"):
        model.merge("twice", [capture, capture])


def test_replay_without_a_fabric_says_how_to_capture_it(tmp_path: Path) -> None:
    source = DeviceSetDriver("hgx", {"kind": "fabric", "members": ["gpus"]}, tmp_path)
    source.fabric = None
    source.read_devices = lambda backend: []
    with pytest.raises(DriverFailed, match="its capture was made without --fabric"):
        source.discover()
