# SPDX-License-Identifier: Apache-2.0
"""The gpu driver on a simulated kernel; the lab runs it on a real one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.core.inventory.device import NOT_OFFERED, Ability, Device, HandleType
from cyborg.core.jobs.job import WorkItem
from cyborg.core.naming import handle_uuid
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.gpu.mdev import MAX_SLOTS
from cyborg.drivers.kernel.mdev import read_types
from cyborg.drivers.pci.driver import PciDriver
from cyborg.drivers.privileged import gpu
from cyborg.drivers.sysfs import Sysfs
from cyborg.tests.unit.drivers.gpu.simulated_gpu import SimulatedGpuDriver, SimulatedKernel

CARD, AUDIO, USB, WHOLE = "0000:3d:00.0", "0000:3d:00.1", "0000:3d:00.2", "0000:5e:00.0"
SMALL, LARGE = "nvidia-222", "nvidia-223"
RULE = f"address={CARD},type={SMALL},traits=CUSTOM_FAST"
FOREIGN = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedKernel:
    tree = SimulatedKernel(tmp_path)
    tree.add_function(CARD, "10de", "1eb8", "030200", kernel_driver="nvidia", iommu_group="7")
    tree.add_function(AUDIO, "10de", "10f8", "040300", iommu_group="7")
    tree.add_function(USB, "10de", "1ad8", "0c0330", iommu_group="7")
    tree.add_function(WHOLE, "1002", "73bf", "030000", iommu_group="8")
    tree.add_parent(CARD, 4, {SMALL: 1, LARGE: 4})
    tree.redirect(monkeypatch)
    return tree


def make_driver(kernel: SimulatedKernel, *mdev_types: str, **options: Any) -> GpuDriver:
    driver = SimulatedGpuDriver("gpus", {"mdev_types": mdev_types, **options}, kernel.root)
    driver.host = "compute-1"
    return driver


def discover(driver: PciDriver) -> dict[str, Device]:
    return {device.address: device for device in driver.discover()}


def handles(driver: PciDriver, address: str = CARD) -> list[str]:
    (deployable,) = discover(driver)[address].deployables
    return [handle.address for handle in deployable.handles]


def slot(number: int, type_: str = SMALL) -> str:
    return f"{CARD}/{type_}/{number}"


def item(handle: str, deployable: str = CARD) -> WorkItem:
    return WorkItem("gpus", CARD, deployable, handle)


def uuid_of(handle: str) -> str:
    return handle_uuid("compute-1", CARD, handle)


def create_foreign(kernel: SimulatedKernel, type_: str = SMALL, device: str = FOREIGN) -> None:
    kernel.write(kernel.bus / CARD / "mdev_supported_types" / type_ / "create", device)


def test_discover_whole_cards_as_the_generic_driver(kernel: SimulatedKernel) -> None:
    driver = make_driver(kernel, devices=["address=*"])
    found = discover(driver)
    assert sorted(found) == [CARD, WHOLE]  # neither the audio nor the USB function
    (deployable,) = found[CARD].deployables
    assert deployable.resource_class == "PGPU"
    assert [(h.address, h.type) for h in deployable.handles] == [(CARD, HandleType.PCI)]
    others = found[CARD].std_board_info["other_functions"]
    assert others == f"{AUDIO} (audio), {USB} (USB)"
    assert "other_functions" not in found[WHOLE].std_board_info


def test_discover_card_with_audio_of_the_host_is_not_offered(kernel: SimulatedKernel) -> None:
    kernel.add_function(
        "0000:5e:00.1",
        "1002",
        "ab28",
        "040300",
        kernel_driver="snd_hda_intel",
        iommu_group="8",
    )
    driver = make_driver(kernel, devices=["address=*"])
    found = discover(driver)
    assert found[WHOLE].deployables == ()
    reason = (
        "its audio function 0000:5e:00.1, in the same IOMMU group, is bound to snd_hda_intel; "
        "expected vfio-pci"
    )
    assert found[WHOLE].vendor_board_info == {NOT_OFFERED: reason}
    with pytest.raises(DriverFailed, match=r"0000:5e:00\.1"):
        driver.check_adoption([WHOLE])


@pytest.mark.parametrize(
    ("group", "kernel_driver"), [("9", "snd_hda_intel"), ("8", "vfio-pci"), ("8", None)]
)
def test_discover_card_with_free_audio_is_offered(
    kernel: SimulatedKernel, group: str, kernel_driver: str | None
) -> None:
    kernel.add_function(
        "0000:5e:00.1", "1002", "ab28", "040300", kernel_driver=kernel_driver, iommu_group=group
    )
    found = discover(make_driver(kernel, devices=["address=*"]))
    assert len(found[WHOLE].deployables) == 1


def test_discover_parent_offers_slots_and_never_itself(kernel: SimulatedKernel) -> None:
    driver = make_driver(kernel, RULE, devices=["class=03"])
    found = discover(driver)
    (deployable,) = found[CARD].deployables
    assert (deployable.address, deployable.resource_class) == (CARD, "VGPU")
    assert [h.address for h in deployable.handles] == [slot(n) for n in range(4)]
    assert {h.type for h in deployable.handles} == {HandleType.MDEV}
    assert deployable.handles[0].info == {
        "domain": "0000",
        "bus": "3d",
        "device": "00",
        "function": "0",
        "asked_type": SMALL,
        "vgpu_mark": "None",
    }
    assert {"CUSTOM_FAST", "CUSTOM_MDEV_NVIDIA_222", "CUSTOM_PCI_VENDOR_10DE"} <= deployable.traits
    assert deployable.attributes["mdev_type"] == SMALL
    (whole,) = found[WHOLE].deployables
    assert whole.resource_class == "PGPU"
    assert driver.remarks == ()


def test_discover_card_with_mediated_devices_is_not_offered_as_a_whole(
    kernel: SimulatedKernel,
) -> None:
    """Its rule was removed, or Nova created the devices."""
    make_driver(kernel, RULE).prepare(item(slot(0)), None)
    reason = "it has mediated devices, which servers may use"
    for driver in (
        make_driver(kernel, devices=["class=03"]),
        GenericDriver("g", {"devices": ["class=03"]}, kernel.root),
    ):
        device = discover(driver)[CARD]
        assert device.deployables == ()
        assert not device.deliverable
        assert device.vendor_board_info == {NOT_OFFERED: reason}
        with pytest.raises(DriverFailed, match=reason):
            driver.check_adoption([CARD])
    assert handles(make_driver(kernel, RULE)) == [slot(n) for n in range(4)]
    make_driver(kernel).release(item(slot(0)))
    assert handles(make_driver(kernel, devices=["class=03"])) == [CARD]


def test_discover_card_of_a_virtual_function_with_mediated_devices(
    kernel: SimulatedKernel,
) -> None:
    card = "0000:6e:00.0"
    kernel.add_function(card, "10de", "2235", "030200", totalvfs=16)
    parent, other = kernel.enable_virtual_functions(card, 2, "2235", "030200")
    kernel.add_parent(parent, 1, {SMALL: 1})
    kernel.write(kernel.bus / parent / "mdev_supported_types" / SMALL / "create", FOREIGN)
    driver = make_driver(kernel, devices=["class=03,functions=all"])
    assert handles(driver, card) == [other]
    with pytest.raises(DriverFailed, match=f"its virtual function {parent} has mediated devices"):
        driver.prepare(item(card, card), None)
    driver.prepare(item(other, card), None)


@pytest.mark.parametrize("rules", [(), (RULE,)])
def test_prepare_whole_card_with_mediated_devices_fails(
    kernel: SimulatedKernel, rules: tuple[str, ...]
) -> None:
    """The device was created after the discovery, or after the card was given to a server."""
    driver = make_driver(kernel, *rules, devices=["class=03"])
    driver.prepare(item(CARD), "an instance")
    create_foreign(kernel)
    with pytest.raises(DriverFailed, match=f"{CARD} cannot be given to a server: it has mediated"):
        driver.prepare(item(CARD), "an instance")


def test_prepare_whole_card_that_the_host_uses_since_the_discovery_fails(
    kernel: SimulatedKernel,
) -> None:
    driver = make_driver(kernel, devices=["address=*"])
    driver.discover()
    driver.prepare(item(WHOLE, WHOLE), None)
    kernel.add_function(
        "0000:5e:00.1", "1002", "ab28", "040300", kernel_driver="snd_hda_intel", iommu_group="8"
    )
    with pytest.raises(DriverFailed, match="is bound to snd_hda_intel"):
        driver.prepare(item(WHOLE, WHOLE), None)
    driver.prepare(item(CARD), None)


def test_discover_selected_function_without_types_is_shown_with_the_reason(
    kernel: SimulatedKernel,
) -> None:
    """Before its vGPU driver is loaded, the card must not be offered as a whole."""
    driver = make_driver(kernel, f"address={WHOLE},type={SMALL}", devices=["address=*"])
    device = discover(driver)[WHOLE]
    assert [d.handles for d in device.deployables] == [()]
    reason = f"{WHOLE}: it has no types of mediated devices: its vGPU driver is not loaded"
    assert device.vendor_board_info == {NOT_OFFERED: reason}
    assert driver.remarks == (reason,)


def test_discover_type_that_the_parent_lacks_is_a_remark(kernel: SimulatedKernel) -> None:
    driver = make_driver(kernel, f"address={CARD},type=nvidia-9")
    assert handles(driver) == []
    text = f"{CARD}: it has no type nvidia-9, its types are {SMALL}, {LARGE}"
    assert driver.remarks == (text,)


def test_discover_rule_without_parent_is_a_remark(kernel: SimulatedKernel) -> None:
    driver = make_driver(kernel, f"vendor=8086,type={SMALL}", "parent=mtty,type=mtty-2")
    assert driver.discover() == []
    assert driver.remarks == (
        f"rule 'vendor=8086,type={SMALL}' matches no parent of this host",
        "rule 'parent=mtty,type=mtty-2' matches no parent of this host",
    )


def test_discover_parent_keeps_slots_until_a_domain_runs(kernel: SimulatedKernel) -> None:
    driver = make_driver(kernel, RULE)
    path = kernel.root.parent / "proc/libvirt_domains.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"users": {CARD: "guest1"}}))
    assert handles(driver) == [slot(n) for n in range(4)]
    link = kernel.bus / CARD / "driver"
    link.unlink(missing_ok=True)
    link.symlink_to("../../../bus/pci/drivers/vfio-pci")
    card = discover(driver)[CARD]
    assert card.deployables == ()
    assert "domain guest1" in card.vendor_board_info[NOT_OFFERED]


def test_discover_released_parent_is_not_offered(kernel: SimulatedKernel) -> None:
    assert make_driver(kernel, RULE, release=[CARD]).discover() == []


def test_discover_virtual_functions_are_parents_of_one_card(kernel: SimulatedKernel) -> None:
    kernel.add_function("0000:6e:00.0", "10de", "2235", "030200", totalvfs=16)
    addresses = kernel.enable_virtual_functions("0000:6e:00.0", 3, "2235", "030200")
    for address in addresses[:2]:
        kernel.add_parent(address, 1, {SMALL: 1})
    rules = [f"address={a},type={SMALL}" for a in addresses[:2]]
    driver = make_driver(kernel, *rules, devices=[f"address={addresses[2]},functions=vf"])
    device = discover(driver)["0000:6e:00.0"]
    assert {d.address: [h.address for h in d.handles] for d in device.deployables} == {
        addresses[0]: [f"{addresses[0]}/{SMALL}/0"],
        addresses[1]: [f"{addresses[1]}/{SMALL}/0"],
        "0000:6e:00.0-CUSTOM_GPU_VF": [addresses[2]],
    }


def test_discover_parent_without_pci_function(kernel: SimulatedKernel) -> None:
    kernel.add_parent("mtty", 24, {"mtty-1": 1, "mtty-2": 2})
    driver = make_driver(kernel, "parent=mtty,type=mtty-2,resource_class=CUSTOM_TTY")
    device = discover(driver)["mtty"]
    (deployable,) = device.deployables
    assert (device.vendor, deployable.address) == ("mtty", "mtty")
    assert deployable.resource_class == "CUSTOM_TTY"
    assert [h.address for h in deployable.handles] == [f"mtty/mtty-2/{n}" for n in range(12)]
    assert deployable.handles[0].info == {"parent": "mtty", "asked_type": "mtty-2"}
    assert list(driver.measure(driver.discover())) == []


def test_prepare_creates_the_device_with_the_uuid_of_the_handle(kernel: SimulatedKernel) -> None:
    driver, device = make_driver(kernel, RULE), uuid_of(slot(2))
    create = (f"bus/pci/devices/{CARD}/mdev_supported_types/{SMALL}/create", device)
    driver.prepare(item(slot(2)), "an instance")
    assert kernel.devices() == [device]
    assert kernel.writes == [create]
    driver.prepare(item(slot(2)), "an instance")
    assert kernel.devices() == [device]
    assert kernel.writes == [create, (f"bus/mdev/devices/{device}/remove", "1"), create]
    (kernel.root.parent / "dev/vfio/41").mkdir(parents=True)  # in use: it cannot be opened
    driver.prepare(item(slot(2)), "an instance")
    assert len(kernel.writes) == 3


def test_uuid_differs_between_hosts(kernel: SimulatedKernel) -> None:
    driver, other = make_driver(kernel, RULE), make_driver(kernel, RULE)
    other.host = "compute-2"
    driver.prepare(item(slot(0)), None)
    other.prepare(item(slot(0)), None)
    assert len(kernel.devices()) == 2


def test_number_of_slots_stays_while_devices_are_created(kernel: SimulatedKernel) -> None:
    driver = make_driver(kernel, RULE)
    every = [slot(n) for n in range(4)]
    for number in (3, 1, 0, 2):
        driver.prepare(item(slot(number)), None)
        assert handles(driver) == every
    for number in (0, 3):
        driver.release(item(slot(number)))
        assert handles(driver) == every
    assert kernel.devices() == sorted([uuid_of(slot(1)), uuid_of(slot(2))])


def test_read_types_counts_a_device_created_meanwhile_once(kernel: SimulatedKernel) -> None:
    class ChangingSysfs(Sysfs):
        """A device is created after the first list of devices, before the number is read."""

        def read_int(self, path: str | Path) -> int | None:
            if not kernel.devices():
                create_foreign(kernel)
            return super().read_int(path)

    found = read_types(ChangingSysfs(kernel.root), CARD)[SMALL]
    assert (found.available, set(found.devices)) == (3, {FOREIGN})


def test_plan_slots_is_limited(kernel: SimulatedKernel) -> None:
    """Parents that are no GPUs, such as vfio_ap of s390, report up to 65536 instances."""
    kernel.add_parent("matrix", 65536, {"vfio_ap-passthrough": 1})
    driver = make_driver(kernel, "parent=matrix,type=vfio_ap-passthrough")
    assert len(handles(driver, "matrix")) == MAX_SLOTS


def test_device_of_others_reduces_the_slots_and_keeps_the_used_one(
    kernel: SimulatedKernel,
) -> None:
    driver = make_driver(kernel, RULE)
    driver.prepare(item(slot(3)), None)
    create_foreign(kernel)
    create_foreign(kernel, device=FOREIGN.replace("8", "7"))
    assert handles(driver) == [slot(0), slot(3)]
    (deployable,) = discover(driver)[CARD].deployables
    assert deployable.attributes["mdevs_of_others"] == "2"


def test_device_of_another_type_leaves_no_slot_and_a_remark(kernel: SimulatedKernel) -> None:
    create_foreign(kernel, LARGE)
    driver = make_driver(kernel, RULE)
    assert handles(driver) == []
    assert driver.remarks == (
        f"{CARD}: no device of type {SMALL} can be created; existing devices: "
        f"1 of {LARGE} (1 not created by this service)",
    )


def test_slots_are_the_same_after_a_boot(kernel: SimulatedKernel) -> None:
    driver = make_driver(kernel, RULE)
    driver.prepare(item(slot(1)), None)
    before, existing = handles(driver), kernel.devices()
    kernel.reboot()
    assert kernel.devices() == []
    restarted = make_driver(kernel, RULE)
    assert handles(restarted) == before
    restarted.prepare(item(slot(1)), None)
    assert kernel.devices() == existing


def test_release_removes_only_the_device_of_the_slot(kernel: SimulatedKernel) -> None:
    driver = make_driver(kernel, RULE)
    create_foreign(kernel)
    driver.prepare(item(slot(0)), None)
    driver.release(item(slot(1)))
    driver.release(item(slot(0)))
    driver.release(item(slot(0)))
    driver.release(item(FOREIGN))
    driver.release(item(WHOLE, WHOLE))
    assert kernel.devices() == [FOREIGN]


def test_release_with_unreadable_folder_fails(
    kernel: SimulatedKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the device exists is unknown, so the handle must not become free."""
    driver = make_driver(kernel, RULE)
    driver.prepare(item(slot(0)), None)
    devices = kernel.root / "bus/mdev/devices"
    devices.rename(tmp_path / "moved")
    devices.symlink_to(devices.name)  # ELOOP
    with pytest.raises(DriverFailed, match="cannot be read: Too many levels of symbolic links"):
        driver.release(item(slot(0)))
    monkeypatch.setattr(gpu, "_SYS", tmp_path / "absent")
    with pytest.raises(DriverFailed, match="absent is not the root of a sysfs"):
        driver.release(item(slot(0)))


def test_release_after_another_type_was_enabled(kernel: SimulatedKernel) -> None:
    make_driver(kernel, RULE).prepare(item(slot(0)), None)
    changed = make_driver(kernel, f"address={CARD},type={LARGE}")
    assert handles(changed) == []
    assert changed.remarks == (
        f"{CARD}: no device of type {LARGE} can be created; existing devices: "
        f"1 of {SMALL} (0 not created by this service)",
    )
    changed.release(item(slot(0)))
    assert handles(changed) == [slot(0, LARGE)]


def test_prepare_whole_function_does_nothing(kernel: SimulatedKernel) -> None:
    driver = make_driver(kernel, devices=["address=*"])
    assert Ability.PREPARES in driver.abilities
    driver.prepare(item(WHOLE, WHOLE), None)
    assert kernel.writes == []


@pytest.mark.parametrize(
    ("handle", "deployable", "error"),
    [
        ("nonsense", CARD, "is not a slot"),
        (f"{CARD}/../0", CARD, "is not a slot"),
        (f"{CARD}/{SMALL}/256", CARD, "is not a slot"),
        (f"{CARD}/{SMALL}/00", CARD, "is not a slot"),
        (f"{CARD}/{SMALL}/0\n", CARD, "is not a slot"),
        (f"{CARD}/{SMALL}/0", WHOLE, f"is not a slot of {WHOLE}"),
        (f"{CARD}/nvidia-9/0", CARD, "has no type nvidia-9"),
        (f"{WHOLE}/{SMALL}/0", WHOLE, f"{WHOLE} has no type"),
    ],
)
def test_prepare_unknown_slot_fails(
    kernel: SimulatedKernel, handle: str, deployable: str, error: str
) -> None:
    driver = make_driver(kernel, RULE)
    with pytest.raises(DriverFailed, match=error):
        driver.prepare(item(handle, deployable), None)
    driver.release(item(handle, deployable))
    assert kernel.writes == []


def test_prepare_parent_that_is_given_as_a_whole_is_refused(kernel: SimulatedKernel) -> None:
    kernel.add_function("0000:6e:00.0", "10de", "2235", "030200", kernel_driver="vfio-pci")
    kernel.add_parent("0000:6e:00.0", 1, {SMALL: 1})
    handle = f"0000:6e:00.0/{SMALL}/0"
    driver = make_driver(kernel, f"address=0000:6e:00.0,type={SMALL}")
    with pytest.raises(DriverFailed, match="is bound to vfio-pci"):
        driver.prepare(WorkItem("gpus", "0000:6e:00.0", "0000:6e:00.0", handle), None)
    assert kernel.writes == []


def test_prepare_exhausted_parent_fails_with_the_reason(kernel: SimulatedKernel) -> None:
    create_foreign(kernel, LARGE)
    with pytest.raises(DriverFailed, match=r"No space left on device; available instances: 0"):
        make_driver(kernel, RULE).prepare(item(slot(0)), None)


def test_driver_on_another_sysfs_changes_nothing(kernel: SimulatedKernel) -> None:
    driver = GpuDriver("gpus", {"mdev_types": [RULE]}, kernel.root)
    driver.release(item(slot(0)))
    with pytest.raises(DriverFailed, match="is not a device of this host"):
        driver.prepare(item(slot(0)), None)
    create_foreign(kernel, device=handle_uuid("", CARD, slot(0)))
    with pytest.raises(DriverFailed, match="is not a device of this host"):
        driver.release(item(slot(0)))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("type=nvidia-222", "a key that matches functions"),
        ("type=nvidia-222,functions=all", "a key that matches functions"),
        ("type=nvidia-222,traits=CUSTOM_A", "at least one of vendor"),
        (f"address={CARD}", "the name of a type"),
        (f"address={CARD},type=a/b", "the name of a type"),
        (f"address={CARD},type=a,type=b", "type only once"),
        (f"parent={CARD},type=a", f"address={CARD} for a PCI function"),
        ("parent=../x,type=a", "a name of /sys/class/mdev_bus"),
        ("parent=mtty,vendor=8086,type=a", "only type, resource_class and traits"),
        (f"address={CARD},type=a,action=skip", "no action in a rule"),
        (f"address={CARD},type=a,resource_class=VCPU", "other standard resource classes"),
        (f"address={CARD},type=a,size=3", "key=value with a key of"),
    ],
)
def test_driver_with_invalid_rule_is_misconfigured(
    kernel: SimulatedKernel, rule: str, expected: str
) -> None:
    with pytest.raises(Misconfigured, match=r"\[gpus\] mdev_types: found") as error:
        make_driver(kernel, rule)
    assert expected in error.value.message


def test_parent_needs_no_iommu_and_no_vfio_pci(kernel: SimulatedKernel) -> None:
    """The driver of the parent isolates its mediated devices; a whole card needs an IOMMU."""
    (kernel.root / "bus/pci/drivers/vfio-pci").rmdir()
    shutil.rmtree(kernel.root / "module/vfio_pci")
    host = kernel.root.parent
    for path, text in {
        "proc/sys/kernel/osrelease": "6.1.0\n",
        "lib/modules/6.1.0/modules.dep": "kernel/drivers/vfio/vfio.ko:\n",
    }.items():
        (host / path).parent.mkdir(parents=True, exist_ok=True)
        (host / path).write_text(text)
    devices = discover(make_driver(kernel, RULE, devices=("class=03",)))
    assert devices[CARD].deliverable
    assert sum(len(part.handles) for part in devices[CARD].deployables) == 4
    assert "vfio-pci is neither loaded nor installed" in str(devices[WHOLE].undeliverable_reason)
