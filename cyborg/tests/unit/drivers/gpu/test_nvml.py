# SPDX-License-Identifier: Apache-2.0
"""Facts of NVML: the real binding ``nvidia-ml-py`` on a simulated library, and their use."""

import concurrent.futures
import ctypes
import importlib
import json
import queue
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cyborg.agent.state_file import MemoryFile
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Device
from cyborg.drivers.base import VolatileMemory
from cyborg.drivers.gpu.card_locks import locked_if_free
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.gpu.facts import FactsReader
from cyborg.drivers.gpu.mig import is_enabled
from cyborg.drivers.kernel import nvml
from cyborg.drivers.kernel.nvml import GpuFacts, NvmlLibrary, short_name
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.sysfs import PciFunction
from cyborg.testing.sysfs_tree import SysfsTree

CARD, OLD, AMD = "0000:3d:00.0", "0000:5e:00.0", "0000:6e:00.0"
UUID = "GPU-00000001-0000-0000-0000-000000000000"


def test_read_returns_the_facts_of_a_gpu(library: ctypes.CDLL) -> None:
    assert NvmlLibrary().read(CARD) == GpuFacts(
        uuid=UUID,
        memory=48305799168,
        vbios="94.02.5C.00.01",
        ecc="enabled",
        mig="disabled",
        max_vgpus={"A40-12Q": 4, "A40-24Q": 2},
        nvlinks={OLD: 2},
        nvlink_speed=26562,
        vgpu_names={"561": "A40-12Q", "563": "A40-24Q"},
        vgpu_memory={"A40-12Q": 12 << 30, "A40-24Q": 24 << 30},
        heterogeneous=False,
    )


def test_read_returns_module_id_and_links_to_gpus_only(library: ctypes.CDLL) -> None:
    library.set_bridged(0)
    library.set_module(5)
    found = NvmlLibrary().read(CARD)
    assert found is not None
    assert (found.module, found.nvlinks, found.nvlink_speed) == (5, {}, None)


def test_read_of_a_gpu_in_mig_mode_has_vgpus_of_each_instance(library: ctypes.CDLL) -> None:
    library.set_mig(1)
    found = NvmlLibrary().read(CARD)
    assert found is not None
    assert found.heterogeneous is None
    assert found.vgpus_per_instance == {"A100-1-10C": 1, "A100-2-20C": 1, "A100-7-80C": 2}
    assert found.max_vgpus_of("A100-7-80C") == 0, "no GPU instance exists"
    found = replace(found, mig_instances={"1g.10gb": 3, "7g.80gb": 1})
    limits = [found.max_vgpus_of(name) for name in ("A100-1-10C", "A100-7-80C", "A100-9-90C")]
    assert limits == [3, 2, None]


def test_read_outside_the_mig_mode_has_profiles_if_nvml_describes_them(
    library: ctypes.CDLL,
) -> None:
    library.set_querying(1)
    found = NvmlLibrary().read(CARD)
    assert found is not None
    assert (found.mig, found.mig_instances) == ("disabled", {})
    assert found.mig_profiles == {"1g.10gb": 7, "2g.20gb": 3, "7g.80gb": 1}


def test_read_without_the_right_to_list_instances_has_the_mode(library: ctypes.CDLL) -> None:
    library.set_mig(1)
    complete = NvmlLibrary().read(CARD)
    assert complete is not None
    library.set_unprivileged(1)
    found = NvmlLibrary().read(CARD)
    assert found == replace(complete, mig_instances={})
    assert (is_enabled(complete), is_enabled(found)) == (True, False), "no layouts are offered"
    limits = [facts.max_vgpus_of("A100-1-10C") for facts in (complete, found)]
    assert limits == [0, None], "the driver lists whether it can create one more"


def test_request_mig_mode_changes_the_mode_once(library: ctypes.CDLL) -> None:
    for enable in (True, True, False, False):
        assert nvml.request_mig_mode(CARD, enable=enable) is None
        found = NvmlLibrary().read(CARD)
        assert found is not None
        assert found.in_mig_mode is enable


@pytest.mark.parametrize(
    ("status", "reason"), [(16, nvml.RESET_REQUIRED), (19, "In use by another client")]
)
def test_request_mig_mode_that_stays_pending_says_why(
    library: ctypes.CDLL, status: int, reason: str
) -> None:
    library.set_activation(status)
    assert nvml.request_mig_mode(CARD, enable=True) == reason
    assert library.get_pending() == 1
    found = NvmlLibrary().read(CARD)
    assert found is not None
    assert (found.mig, found.mig_pending) == ("disabled", True)
    assert nvml.request_mig_mode(CARD, enable=False) is None, "the request is withdrawn"
    assert library.get_pending() == 0
    assert nvml.request_mig_mode(CARD, enable=True) == reason
    library.reset_gpu()
    assert nvml.request_mig_mode(CARD, enable=True) is None


def test_request_mig_mode_compares_also_the_pending_mode(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current mode is the requested one, and a reset would switch it."""
    binding = importlib.import_module(nvml.MODULE)
    monkeypatch.setattr(binding, "nvmlDeviceGetMigMode", lambda device: [1, 0])
    assert nvml.request_mig_mode(CARD, enable=True) == nvml.RESET_REQUIRED


def test_read_mig_mode_is_that_of_the_facts(library: ctypes.CDLL) -> None:
    access = NvmlLibrary()
    assert access.read_mig_mode(CARD) == ("disabled", False)
    library.set_activation(16)
    nvml.request_mig_mode(CARD, enable=True)
    assert access.read_mig_mode(CARD) == ("disabled", True)
    library.reset_gpu()
    assert access.read_mig_mode(CARD) == ("enabled", False)
    assert access.read_mig_mode(OLD) is None, "a GPU without MIG"


def test_request_mig_mode_of_a_gpu_with_instances_is_refused(library: ctypes.CDLL) -> None:
    library.set_mig(1)
    nvml.replace_instances(CARD, {"1g.10gb": 2})
    with pytest.raises(DriverFailed, match="has GPU instances: remove them first"):
        nvml.request_mig_mode(CARD, enable=False)
    nvml.replace_instances(CARD, {})
    assert nvml.request_mig_mode(CARD, enable=False) is None


def test_request_mig_mode_that_nvml_refuses_fails(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DriverFailed, match=f"MIG mode of {OLD} cannot be changed to 1: Not"):
        nvml.request_mig_mode(OLD, enable=True)
    monkeypatch.setattr(nvml, "MODULE", "no_such_binding")
    with pytest.raises(DriverFailed, match="nvidia-ml-py is missing"):
        nvml.request_mig_mode(CARD, enable=True)


def test_facts_keep_the_types_of_the_other_mig_mode(library: ctypes.CDLL) -> None:
    """NVML lists the types of the current mode only; the reader remembers the others."""
    memory, bound = VolatileMemory(), card("nvidia")
    for mig in (1, 0):
        library.set_mig(mig)
        reader = FactsReader(NvmlLibrary().read)
        reader.keeps_types = True
        found = reader.read(bound, memory)
    assert {"A40-12Q", "A100-1-10C"} <= found.max_vgpus.keys()
    assert found.vgpu_profiles["A100-1-10C"] == "1g.10gb"
    assert (found.mig, found.mig_instances) == ("disabled", {})
    assert found.max_vgpus_of("A100-1-10C") == 0, "not outside the MIG mode"
    assert "A100-1-10C" not in FactsReader(NvmlLibrary().read).read(bound, memory).max_vgpus


def test_set_heterogeneous_is_read_back(library: ctypes.CDLL) -> None:
    for enable in (True, True, False):
        nvml.set_heterogeneous(CARD, enable=enable)
        found = NvmlLibrary().read(CARD)
        assert found is not None
        assert found.heterogeneous is enable


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("set_vgpus", 1), "cannot be changed to 1: In use by another client"),
        (("set_mig", 1), "cannot be changed to 1"),
        (("set_ignoring", 1), "is 0 after a change to 1"),
    ],
    ids=["a vGPU exists", "MIG mode", "no effect"],
)
def test_set_heterogeneous_that_nvml_refuses_fails(
    library: ctypes.CDLL, change: tuple[str, int], expected: str
) -> None:
    getattr(library, change[0])(change[1])
    with pytest.raises(DriverFailed, match=f"the heterogeneous mode of {CARD} {expected}"):
        nvml.set_heterogeneous(CARD, enable=True)


def test_set_heterogeneous_without_binding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "MODULE", "no_such_binding")
    with pytest.raises(DriverFailed, match="nvidia-ml-py is missing"):
        nvml.set_heterogeneous(CARD, enable=True)


def test_read_leaves_out_what_a_gpu_does_not_support(library: ctypes.CDLL) -> None:
    found = NvmlLibrary().read(OLD)
    assert found is not None
    assert found.memory == 48305799168
    assert (found.vbios, found.ecc, found.mig, found.max_vgpus) == (None, None, None, {})
    assert (found.nvlinks, found.nvlink_speed) == ({CARD: 2}, 25781), "the common speed"


def test_read_of_a_gpu_whose_vgpus_need_ecc_to_be_off_has_the_other_facts(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is healthy, and offered as a whole."""
    binding, complete = importlib.import_module(nvml.MODULE), NvmlLibrary().read(CARD)
    assert complete is not None

    def refuse(device: object) -> None:
        raise binding.NVMLError(binding.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED)

    monkeypatch.setattr(binding, "nvmlDeviceGetSupportedVgpus", refuse)
    found = NvmlLibrary().read(CARD)
    assert found == replace(complete, max_vgpus={}, vgpu_names={}, vgpu_memory={})


@pytest.mark.parametrize("mig", [0, 1])
def test_read_of_a_gpu_that_is_lost_meanwhile_returns_nothing(
    library: ctypes.CDLL, mig: int
) -> None:
    """What it does not answer would look as if the GPU did not support it."""
    library.set_mig(mig)
    source, complete = NvmlLibrary(), NvmlLibrary().read(CARD)
    count = next(n for n in range(1, 1000) if (library.set_lost(n), source.read(CARD))[1])
    assert count > 40, "calls of a complete reading"
    assert source.read(CARD) == complete


def test_facts_of_a_gpu_that_is_lost_stay(library: ctypes.CDLL, tmp_path: Path) -> None:
    tree, memory = SysfsTree(tmp_path / "sys"), VolatileMemory()
    tree.add_function(CARD, "10de", "2235", "030200", kernel_driver="nvidia")
    library.set_mig(1)
    access = replace(HostAccess.of(tree.root), nvml=NvmlLibrary().read)
    for lost in (0, 1, 5):
        library.set_lost(lost)
        driver = GpuDriver("gpus", {"devices": ["class=03"]}, tree.root, access)
        driver.memory = memory
        (found,) = driver.discover()
        assert (found.serial, found.std_board_info["mig"]) == (UUID, "enabled")
        assert not found.deployables
    library.set_lost(0)
    library.set_mig(0)
    (found,) = driver.discover()
    assert found.std_board_info["mig"] == "disabled", "it is tried again"


def test_card_that_hangs_does_not_hang_the_jobs_of_others(
    library: ctypes.CDLL,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    binding = importlib.import_module(nvml.MODULE)
    find, hangs, may_continue = (
        binding.nvmlDeviceGetHandleByPciBusId,
        threading.Event(),
        threading.Event(),
    )

    def hang(address: bytes) -> object:
        if address.decode() == CARD:
            hangs.set()
            assert may_continue.wait(60)
        return find(address)

    monkeypatch.setattr(binding, "nvmlDeviceGetHandleByPciBusId", hang)
    monkeypatch.setattr(nvml, "LOCK_TIMEOUT", 0.01)
    tree, source = SysfsTree(tmp_path / "sys"), NvmlLibrary()
    for address in (CARD, OLD):
        tree.add_function(address, "10de", "2235", "030200", kernel_driver="nvidia")
    access = replace(HostAccess.of(tree.root), nvml=source.read, mig_mode=source.read_mig_mode)
    driver = GpuDriver("gpus", {"devices": ["class=03"]}, tree.root, access)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        hanging = pool.submit(driver.check_unused, CARD)
        assert hangs.wait(60)
        try:
            pool.submit(driver.check_unused, OLD).result(10)
            with locked_if_free(OLD) as acquired:
                assert acquired
            monkeypatch.setattr(nvml, "LOCK_TIMEOUT", 60.0)
            assert source.read(OLD) is None, "it does not wait again"
        finally:
            may_continue.set()
        hanging.result(60)
    assert source.read(OLD) is not None
    assert [record.message for record in caplog.records] == [
        "Cannot read NVML, the facts about the GPU are unknown: the reading of another GPU does "
        "not end"
    ]


def test_reading_waits_for_several_others_that_end(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a single one that lasts too long means that a card hangs."""
    binding, source = importlib.import_module(nvml.MODULE), NvmlLibrary()
    initialise, seconds = binding.nvmlInit, 0.0
    begun, turns = queue.Queue[None](), queue.Queue[None]()

    def wait_for_turn() -> None:
        begun.put(None)
        turns.get(timeout=10)
        initialise()

    monkeypatch.setattr(binding, "nvmlInit", wait_for_turn)
    monkeypatch.setattr(nvml, "LOCK_TIMEOUT", 0.02)
    monkeypatch.setattr(nvml, "_clock", lambda: seconds)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        readings = {pool.submit(source.read, CARD) for _ in range(4)}
        for _ in range(3):
            begun.get(timeout=10)
            done, _ = concurrent.futures.wait(readings, timeout=0.05)  # more than LOCK_TIMEOUT
            assert not done
            seconds += 0.01
            turns.put(None)
            done, readings = concurrent.futures.wait(
                readings, timeout=10, return_when=concurrent.futures.FIRST_COMPLETED
            )
            assert all(reading.result() for reading in done)
        begun.get(timeout=10)
        seconds += 0.02
        assert source.read(CARD) is None
        turns.put(None)
        assert all(reading.result() for reading in readings)


def test_read_error_is_logged_once(library: ctypes.CDLL, caplog: pytest.LogCaptureFixture) -> None:
    source = NvmlLibrary()
    assert source.read("0000:77:00.0") is None
    assert source.read("0000:77:00.0") is None
    library.set_broken(1)
    assert source.read(CARD) is None
    assert [record.message for record in caplog.records] == [
        "Cannot read NVML, the facts about the GPU are unknown: Not Found",
        "Cannot read NVML, the facts about the GPU are unknown: Driver Not Loaded",
    ]


def test_read_without_binding_returns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "MODULE", "no_such_binding")
    assert NvmlLibrary().read(CARD) is None
    assert not NvmlLibrary().is_installed()


def test_binding_is_installed_also_if_nvml_fails(library: ctypes.CDLL) -> None:
    library.set_broken(1)
    assert NvmlLibrary().is_installed()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NVIDIA A40-12Q", "A40-12Q"), ("GRID A100-1-5C", "A100-1-5C"), ("A40-1", "A40-1"), ("", "")],
)
def test_short_name_leaves_out_the_product_line(name: str, expected: str) -> None:
    assert short_name(name) == expected


class Source:
    """A source with one answer, which counts its readings."""

    def __init__(self, facts: GpuFacts | None) -> None:
        self.facts = facts
        self.count = 0

    def read(self, address: str) -> GpuFacts | None:
        self.count += 1
        return self.facts


def card(driver: str | None, vendor: str = "10de") -> PciFunction:
    return PciFunction(CARD, vendor, "2235", "030200", kernel_driver=driver)


def test_facts_are_read_once_while_bound() -> None:
    source, memory = Source(GpuFacts(uuid="one", max_vgpus={"A40-12Q": 4})), VolatileMemory()
    reader = FactsReader(source.read)
    for _ in range(3):
        assert reader.read(card("nvidia"), memory).uuid == "one"
    assert source.count == 1
    assert reader.read(card("vfio-pci"), memory).max_vgpus == {"A40-12Q": 4}
    source.facts = GpuFacts(uuid="two")
    assert reader.read(card("nvidia"), memory).uuid == "two"
    assert source.count == 2


def test_facts_that_cannot_be_read_are_tried_again() -> None:
    source, memory = Source(None), VolatileMemory()
    reader = FactsReader(source.read)
    assert reader.read(card("nvidia"), memory) == GpuFacts()
    source.facts = GpuFacts(uuid="one")
    assert reader.read(card("nvidia"), memory).uuid == "one"


def test_facts_of_a_gpu_in_use_survive_a_restart(tmp_path: Path) -> None:
    facts = GpuFacts(
        uuid="one",
        memory=8,
        ecc="enabled",
        mig="enabled",
        max_vgpus={"A40-12Q": 4},
        mig_profiles={"1g.10gb": 7},
        mig_instances={"1g.10gb": 2},
        vgpu_profiles={"A100-1-10C": "1g.10gb"},
    )
    FactsReader(Source(facts).read).read(card("nvidia"), MemoryFile(tmp_path / "m").of("gpus"))
    source = Source(None)
    found = FactsReader(source.read).read(card("vfio-pci"), MemoryFile(tmp_path / "m").of("gpus"))
    assert found == facts
    assert source.count == 0


def test_facts_keep_links_to_gpus_in_use(tmp_path: Path) -> None:
    memory, hidden = VolatileMemory(), {OLD}
    source = Source(GpuFacts(uuid="one", module=3, nvlinks={OLD: 4, AMD: 4}, nvlink_speed=9))
    for _ in range(2):
        FactsReader(source.read).read(card("nvidia"), memory)
        # A restarted agent knows the links while servers use both GPUs.
        found = FactsReader(source.read).read(card("vfio-pci"), memory)
        assert (found.module, found.nvlinks) == (3, {OLD: 4, AMD: 4})
        assert found.nvlink_speed == 9
    # The GPU returns first: the link to the other one is down as seen from here.
    source.facts = GpuFacts(uuid="one")
    reader = FactsReader(source.read, lambda address: address not in hidden)
    found = reader.read(card("nvidia"), memory)
    assert (found.nvlinks, found.nvlink_speed) == ({OLD: 4}, 9)
    hidden.clear()
    reader.forget(CARD)
    found = reader.read(card("nvidia"), memory)
    assert (found.nvlinks, found.nvlink_speed) == ({}, None)
    # Another card in the slot has none of the links.
    hidden.add(OLD)
    source.facts = GpuFacts(uuid="two")
    assert FactsReader(source.read, lambda a: False).read(card("nvidia"), memory).nvlinks == {}


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"memory": "much"})])
def test_facts_of_another_release_are_ignored(text: str) -> None:
    memory = VolatileMemory()
    memory.put(f"gpu {CARD} 2235", text)
    assert FactsReader(Source(None).read).read(card("vfio-pci"), memory) == GpuFacts()


def test_facts_of_other_vendors_are_not_read() -> None:
    source = Source(GpuFacts(uuid="one"))
    assert FactsReader(source.read).read(card("nvidia", "1002"), VolatileMemory()) == GpuFacts()
    assert source.count == 0


def test_discover_shows_the_facts_of_a_card(library: ctypes.CDLL, tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path / "sys")
    tree.add_function(CARD, "10de", "2235", "030200", kernel_driver="nvidia")
    tree.add_function(AMD, "1002", "73bf", "030000")
    access = replace(HostAccess.of(tree.root), nvml=NvmlLibrary().read)
    driver = GpuDriver("gpus", {"devices": ["class=03"]}, tree.root, access)
    found: dict[str, Device] = {device.address: device for device in driver.discover()}
    assert found[CARD].serial == UUID
    assert found[CARD].topology["firmware_version"] == "94.02.5C.00.01"
    info = found[CARD].std_board_info
    assert (info["memory_bytes"], info["ecc"], info["mig"]) == (
        "48305799168",
        "enabled",
        "disabled",
    )
    place = found[CARD].topology
    assert (place["nvlink_peers"], place["nvlink_links"]) == (OLD, "2")
    assert "module_id" not in place
    assert not {"nvlink_peers", "nvlink_links", "module_id"} & found[AMD].topology.keys()
    assert found[AMD].serial is None
    assert "memory_bytes" not in found[AMD].std_board_info
    before = ctypes.c_int.in_dll(library, "reads").value
    assert driver.discover() == list(found.values())
    assert ctypes.c_int.in_dll(library, "reads").value == before
