# SPDX-License-Identifier: Apache-2.0
"""vGPUs without mediated devices: what the driver offers, prepares and releases.

The host is simulated; only the write to an attribute is replaced.
"""

from pathlib import Path

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import NOT_OFFERED, HandleType
from cyborg.drivers.base import VolatileMemory
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.gpu.vgpu_records import VgpuRecords
from cyborg.drivers.pci.access import HostAccess
from cyborg.testing.vgpu_host import SimulatedVgpuHost, VgpuType
from cyborg.tests.unit.drivers.full_memory import FullMemory
from cyborg.tests.unit.drivers.gpu.simulated_vgpus import (
    CARD,
    LARGE,
    SMALL,
    WHOLE,
    discover,
    item,
    make_driver,
    make_host,
    offered,
)

VFS = [f"0000:41:00.{n}" for n in range(1, 8)] + ["0000:41:01.0"]
RULE = f"address={CARD},type=NVIDIA H200X-70C,traits=CUSTOM_FAST"
EITHER = f"address={CARD},type=H200X-35C|H200X-70C"
PART = f"{CARD}-H200X-70C"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedVgpuHost:
    found = make_host(tmp_path)
    found.redirect(monkeypatch.setattr)
    return found


def create_foreign(host: SimulatedVgpuHost, function: str, type_: VgpuType) -> None:
    host.write_attribute(host.bus / function / "nvidia/current_vgpu_type", str(type_.id))


def test_discover_card_offers_as_many_functions_as_vgpus_fit(host: SimulatedVgpuHost) -> None:
    for function in VFS:
        (host.bus / function / "reset").unlink()  # not needed: the vGPU is created again
    driver = make_driver(host, RULE)
    device = discover(driver)
    assert device.deliverable
    assert driver.remarks == ()
    (part,) = device.deployables
    assert (part.address, part.resource_class) == (PART, "VGPU")
    assert {"CUSTOM_FAST", "CUSTOM_VGPU_H200X_70C"} <= part.traits
    assert "CUSTOM_GPU_VF" not in part.traits
    assert [(h.address, h.type) for h in part.handles] == [(f, HandleType.VFIO) for f in VFS[:2]]
    assert part.handles[0].info == {
        "domain": "0000",
        "bus": "41",
        "device": "00",
        "function": "1",
        "vgpu_type": "H200X-70C",
        "delivery": "agent",
    }


def test_discover_card_without_virtual_functions_is_offered_as_a_whole(
    host: SimulatedVgpuHost,
) -> None:
    driver = make_driver(host, RULE, devices=["address=*"], reset="never")
    host.manage_sriov(CARD, enable=False)
    (part,) = discover(driver).deployables
    assert (part.resource_class, [h.type for h in part.handles]) == ("PGPU", [HandleType.PCI])
    (remark,) = (text for text in driver.remarks if "vgpu" in text.lower())
    assert "matches no card with virtual functions for vGPUs: enable SR-IOV" in remark
    host.manage_sriov(CARD, enable=True)
    assert {h.type for d in discover(driver).deployables for h in d.handles} == {HandleType.VFIO}
    assert driver.remarks == ()


def test_discover_vgpu_functions_without_a_rule_are_not_deliverable(
    host: SimulatedVgpuHost,
) -> None:
    device = discover(make_driver(host, devices=["address=*,functions=vf"]))
    assert not device.deliverable
    assert "select its card by vgpu_types" in str(device.undeliverable_reason)
    assert list(make_driver(host, devices=["address=*"]).discover()) == []


def test_discover_vgpu_of_a_server_is_not_offered_by_another_driver(
    host: SimulatedVgpuHost,
) -> None:
    """Neither the function nor, without its virtual functions, the card."""
    create_foreign(host, VFS[0], LARGE)
    driver = GenericDriver("all", {"devices": ["address=*,functions=vf"]}, host.root)
    (device,) = driver.discover()
    assert VFS[0] in device.vendor_board_info[NOT_OFFERED]
    with pytest.raises(DriverFailed, match=rf"its virtual function {VFS[0]} is a vGPU"):
        driver.check_unused(CARD)


def test_discover_handles_stay_while_they_are_used(host: SimulatedVgpuHost) -> None:
    driver = make_driver(host, RULE)
    before = offered(driver)
    assert before == {PART: VFS[:2]}
    for handle in reversed(before[PART]):
        driver.prepare(item(handle), None)
        assert offered(driver) == before
    for handle in before[PART]:
        driver.release(item(handle))
        assert offered(driver) == before


@pytest.mark.parametrize(
    ("rule", "nvml", "expected"),
    [
        ("", True, 2),
        (",max_per_card=1", True, 1),
        (",max_per_card=3", False, 3),
        ("", False, 1),
    ],
    ids=["NVML", "rule overrides NVML", "rule", "nothing known: one after another"],
)
def test_discover_number_of_handles_is_limited(
    host: SimulatedVgpuHost, rule: str, nvml: bool, expected: int
) -> None:
    driver = make_driver(host, f"{RULE}{rule}", nvml=nvml)
    assert offered(driver) == {PART: VFS[:expected]}
    unknown = [text for text in driver.remarks if "set max_per_card" in text]
    assert bool(unknown) == (not nvml and not rule)


def test_discover_without_limit_offers_one_more_after_each_vgpu(host: SimulatedVgpuHost) -> None:
    driver = make_driver(host, RULE, nvml=False)
    driver.prepare(item(VFS[0]), None)
    assert offered(driver) == {PART: VFS[:2]}
    driver.prepare(item(VFS[1]), None)
    assert offered(driver) == {PART: VFS[:2]}, "the list of creatable types is empty"


def test_discover_foreign_vgpu_is_shown_and_its_function_not_offered(
    host: SimulatedVgpuHost,
) -> None:
    create_foreign(host, VFS[0], LARGE)
    driver = make_driver(host, RULE)
    assert offered(driver) == {PART: [VFS[1]]}
    reason = discover(driver).vendor_board_info[NOT_OFFERED]
    assert reason == f"{VFS[0]}: it has a vGPU of type H200X-70C that this service did not create"
    with pytest.raises(DriverFailed, match="did not create"):
        driver.prepare(item(VFS[0]), None)
    driver.release(item(VFS[0]))
    assert host.current(VFS[0]) == LARGE.name, "a vGPU of another program is not removed"


def test_discover_foreign_vgpu_of_another_size_leaves_no_handle(host: SimulatedVgpuHost) -> None:
    """Without the heterogeneous mode, a card has vGPUs of one framebuffer size."""
    create_foreign(host, VFS[3], SMALL)
    device = discover(make_driver(host, RULE))
    assert device.deployables == ()
    reason = device.vendor_board_info[NOT_OFFERED]
    assert reason.endswith(
        "no vGPU of type H200X-70C can be created now; creatable types: NVIDIA H200X-35C"
    )


def test_discover_foreign_vgpu_on_a_full_card_is_named_by_nvml(host: SimulatedVgpuHost) -> None:
    create_foreign(host, VFS[0], WHOLE)
    device = discover(make_driver(host, RULE))
    assert device.deployables == ()
    assert "a vGPU of type H200X-141C" in device.vendor_board_info[NOT_OFFERED]
    device = discover(make_driver(host, RULE, nvml=False))
    assert "a vGPU of type number 1428" in device.vendor_board_info[NOT_OFFERED]


def test_discover_vgpus_of_other_sizes_take_their_share(host: SimulatedVgpuHost) -> None:
    host.set_heterogeneous(CARD, enable=True)
    create_foreign(host, VFS[0], LARGE)
    found = offered(make_driver(host, f"address={CARD},type=H200X-35C"))
    assert found == {f"{CARD}-H200X-35C": VFS[1:3]}, "four fit, and the large one takes two"


def test_discover_rule_with_types_keeps_the_type_in_use(host: SimulatedVgpuHost) -> None:
    driver = make_driver(host, EITHER)
    assert list(offered(driver)) == [f"{CARD}-H200X-35C"]
    create_foreign(host, VFS[7], LARGE)
    assert offered(driver) == {PART: VFS[:1]}, "the first type cannot be created"
    driver.prepare(item(VFS[0]), None)
    host.write_attribute(host.bus / VFS[7] / "nvidia/current_vgpu_type", "0")
    assert offered(driver) == {PART: VFS[:2]}


def test_discover_vgpu_of_a_type_without_rule_is_not_offered_and_released(
    host: SimulatedVgpuHost,
) -> None:
    memory = VolatileMemory()
    make_driver(host, RULE, memory=memory).prepare(item(VFS[0]), None)
    driver = make_driver(host, f"address={CARD},type=H200X-35C", memory=memory)
    device = discover(driver)
    assert device.deployables == ()
    assert "which is not enabled any more" in device.vendor_board_info[NOT_OFFERED]
    driver.release(item(VFS[0]))
    assert offered(driver) == {f"{CARD}-H200X-35C": VFS[:4]}


def test_discover_function_without_vfio_device_is_not_offered(host: SimulatedVgpuHost) -> None:
    (host.bus / VFS[0] / "vfio-dev/vfio0").rmdir()
    driver = make_driver(host, RULE)
    assert offered(driver) == {PART: VFS[1:3]}
    assert "is not registered with VFIO" in discover(driver).vendor_board_info[NOT_OFFERED]


def test_discover_functions_without_iommu_are_not_deliverable(tmp_path: Path) -> None:
    host = make_host(tmp_path)
    for function in host.cards[CARD].functions:
        (host.bus / function / "iommu_group").unlink()
    device = discover(make_driver(host, RULE))
    assert not device.deliverable
    assert "the IOMMU does not cover this function" in str(device.undeliverable_reason)


def test_prepare_creates_the_type_by_name_and_release_removes_it(host: SimulatedVgpuHost) -> None:
    driver = make_driver(host, f"{RULE},vgpu_params=disable_vnc=1|frame_rate_limiter=0")
    for _ in range(2):
        driver.prepare(item(VFS[1]), "server")
        assert host.current(VFS[1]) == LARGE.name
        text = (host.bus / VFS[1] / "nvidia/vgpu_params").read_text()
        assert text == "disable_vnc=1, frame_rate_limiter=0\n"
    driver.sanitise(item(VFS[1]))  # not a reset of the function
    for _ in range(2):
        driver.release(item(VFS[1]))
        assert host.current(VFS[1]) == ""
    types = [text for path, text in host.writes if path == f"{VFS[1]}/current_vgpu_type"]
    assert types == ["1420", "0", "1420", "0"], "an unused vGPU can have data of its last user"


def test_prepare_and_release_survive_a_restart_of_the_agent(host: SimulatedVgpuHost) -> None:
    memory = VolatileMemory()
    make_driver(host, RULE, memory=memory).prepare(item(VFS[0]), None)
    make_driver(host, RULE, memory=memory).prepare(item(VFS[0]), None)
    make_driver(host, RULE, memory=memory).release(item(VFS[0]))
    assert host.current(VFS[0]) == ""


def test_without_a_record_no_vgpu_is_created(host: SimulatedVgpuHost) -> None:
    memory = FullMemory()
    driver = make_driver(host, RULE, memory=memory)
    with pytest.raises(DriverFailed, match=f"{CARD} cannot be recorded: free space in the state"):
        driver.prepare(item(VFS[0]), None)
    assert host.current(VFS[0]) == ""
    create_foreign(host, VFS[0], LARGE)  # it is that of another program
    memory.is_full = False
    driver.release(item(VFS[0]))
    assert host.current(VFS[0]) == LARGE.name


def test_record_of_a_function_that_is_stored_in_part_has_no_effect(host: SimulatedVgpuHost) -> None:
    """The functions of a card are stored before the type of one: no type is without its card."""
    stored: list[str] = []

    class FillingMemory(VolatileMemory):
        def put(self, key: str, text: str | None) -> bool:
            stored.append(key)
            super().put(key, text)
            return key != f"vgpu {VFS[0]}"

    memory = FillingMemory()
    records = VgpuRecords(lambda: memory)
    records.add_prepared(CARD, VFS[1], "H200X-70C")
    with pytest.raises(DriverFailed, match=f"{VFS[0]} cannot be recorded"):
        records.add_prepared(CARD, VFS[0], "H200X-70C")
    assert records.prepared_of(CARD) == {VFS[1]: "H200X-70C"}
    assert stored[:2] == [f"vgpu functions {CARD}", f"vgpu {VFS[1]}"]
    records.remove_prepared(CARD, VFS[1])
    assert records.prepared_of(CARD) == {}


def test_release_is_repeated_until_it_is_recorded(host: SimulatedVgpuHost) -> None:
    memory = FullMemory()
    memory.is_full = False
    driver = make_driver(host, RULE, memory=memory)
    driver.prepare(item(VFS[0]), None)
    memory.is_full = True
    for _ in range(2):
        with pytest.raises(DriverFailed, match="cannot be recorded"):
            driver.release(item(VFS[0]))
        assert host.current(VFS[0]) == ""
    memory.is_full = False
    driver.release(item(VFS[0]))


def test_recreate_prepared_vgpu_that_another_program_removed(host: SimulatedVgpuHost) -> None:
    memory = VolatileMemory()
    driver = make_driver(host, f"{RULE},vgpu_params=disable_vnc=1", memory=memory)
    driver.prepare(item(VFS[0]), None)
    host.writes.clear()
    driver.recreate(VFS[0])
    driver.recreate(VFS[1])  # not prepared
    assert host.writes == []
    host.write_attribute(host.bus / VFS[0] / "nvidia/current_vgpu_type", "0")
    make_driver(host, f"{RULE},vgpu_params=disable_vnc=1", memory=memory).recreate(VFS[0])
    assert host.current(VFS[0]) == LARGE.name
    assert (host.bus / VFS[0] / "nvidia/vgpu_params").read_text() == "disable_vnc=1\n"
    driver.release(item(VFS[0]))
    driver.recreate(VFS[0])  # of a server that was deleted meanwhile
    assert host.current(VFS[0]) == ""


def test_recreate_vgpu_that_cannot_be_created_fails(host: SimulatedVgpuHost) -> None:
    driver = make_driver(host, RULE)
    driver.prepare(item(VFS[0]), None)
    host.write_attribute(host.bus / VFS[0] / "nvidia/current_vgpu_type", "0")
    host.give_to_domain(VFS[0], "guest1")
    with pytest.raises(DriverFailed, match="used by the domain guest1 of libvirt"):
        driver.recreate(VFS[0])
    host.manage_sriov(CARD, enable=False)
    with pytest.raises(DriverFailed, match="is no virtual function any more: enable SR-IOV"):
        driver.recreate(VFS[0])


def test_prepare_after_the_type_of_another_size_replaces_it(host: SimulatedVgpuHost) -> None:
    driver = make_driver(host, EITHER)
    driver.prepare(item(VFS[0]), None)
    driver.prepare(item(VFS[0], "H200X-35C"), None)
    assert host.current(VFS[0]) == SMALL.name


def test_prepare_of_a_function_that_a_guest_has_is_refused(host: SimulatedVgpuHost) -> None:
    driver = make_driver(host, RULE)
    driver.prepare(item(VFS[0]), None)
    host.open_function(VFS[0])
    with pytest.raises(DriverFailed, match="may still be used by a process"):
        driver.prepare(item(VFS[0]), None)
    assert host.current(VFS[0]) == LARGE.name


def test_release_of_a_function_that_a_guest_has_is_refused_until_it_is_closed(
    host: SimulatedVgpuHost,
) -> None:
    driver = make_driver(host, RULE)
    driver.prepare(item(VFS[0]), None)
    host.open_function(VFS[0])
    with pytest.raises(DriverFailed, match="may still be used by a process"):
        driver.release(item(VFS[0]))
    assert host.current(VFS[0]) == LARGE.name
    host.close_function(VFS[0])
    driver.release(item(VFS[0]))
    assert host.current(VFS[0]) == ""


def test_prepare_of_a_function_of_a_domain_is_refused(host: SimulatedVgpuHost) -> None:
    driver = make_driver(host, RULE)
    host.give_to_domain(VFS[0], "legacy")
    with pytest.raises(DriverFailed, match="it is used by the domain legacy of libvirt"):
        driver.prepare(item(VFS[0]), None)
    assert host.writes == []


def test_prepare_type_that_does_not_fit_fails_with_the_creatable_types(
    host: SimulatedVgpuHost,
) -> None:
    create_foreign(host, VFS[7], SMALL)
    driver = make_driver(host, RULE)
    with pytest.raises(DriverFailed, match="creatable types: NVIDIA H200X-35C"):
        driver.prepare(item(VFS[0]), None)
    driver.release(item(VFS[0]))
    assert host.current(VFS[0]) == ""


def test_prepare_after_a_boot_needs_sriov(host: SimulatedVgpuHost) -> None:
    driver = make_driver(host, RULE)
    driver.prepare(item(VFS[0]), None)
    host.reboot()
    with pytest.raises(DriverFailed, match="enable SR-IOV with sriov-manage"):
        driver.prepare(item(VFS[0]), None)
    host.manage_sriov(CARD, enable=True)
    driver.prepare(item(VFS[0]), None)
    assert host.current(VFS[0]) == LARGE.name
    host.reboot()
    driver.release(item(VFS[0]))  # a function that no longer exists


@pytest.mark.parametrize("type_", ["H200X-35C", "H200X-999C"])
def test_prepare_type_without_rule_is_refused(host: SimulatedVgpuHost, type_: str) -> None:
    with pytest.raises(
        DriverFailed, match=f"no rule of vgpu_types enables vGPUs of {CARD}-{type_}"
    ):
        make_driver(host, RULE).prepare(item(VFS[0], type_), None)
    assert host.writes == []


@pytest.mark.parametrize("attribute", ["current_vgpu_type", "vgpu_params"])
def test_prepare_that_the_kernel_driver_refuses_leaves_no_vgpu(
    host: SimulatedVgpuHost, attribute: str
) -> None:
    driver = make_driver(host, f"{RULE},vgpu_params=disable_vnc=1")
    host.failing = {attribute}
    with pytest.raises(
        DriverFailed, match=f"refused .* for nvidia/{attribute}: Input/output error"
    ):
        driver.prepare(item(VFS[0]), None)
    assert host.current(VFS[0]) == ""


def test_change_on_another_host_is_refused(host: SimulatedVgpuHost) -> None:
    """A replayed capture has addresses of another host."""
    access = HostAccess.of(host.root)
    with pytest.raises(DriverFailed, match="not a device of this host"):
        access.create_vgpu(VFS[0], LARGE.name, "")
    with pytest.raises(DriverFailed, match="not a device of this host"):
        access.remove_vgpu(VFS[0])
    access.remove_vgpu("0000:77:00.1")


def test_memory_has_the_type_of_prepared_functions_only(host: SimulatedVgpuHost) -> None:
    driver = make_driver(host, RULE)
    driver.prepare(item(VFS[0]), None)
    assert driver.memory.get(f"vgpu {VFS[0]}") == "H200X-70C"
    driver.release(item(VFS[0]))
    assert driver.memory.get(f"vgpu {VFS[0]}") is None
