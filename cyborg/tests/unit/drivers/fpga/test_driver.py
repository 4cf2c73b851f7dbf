# SPDX-License-Identifier: Apache-2.0
"""Discovery by the fpga driver, and its work on handles; the lab runs it on a real kernel."""

import json
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.state_file import MemoryFile
from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.core.inventory.device import Ability, Deployable, Device, DeviceType, Health
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Memory
from cyborg.drivers.fpga import cards
from cyborg.drivers.fpga.cards import FAMILIES
from cyborg.drivers.fpga.driver import FpgaDriver
from cyborg.drivers.fpga.loader import Record, RecordStore
from cyborg.testing.conformance.kit import Outcome, run_rules
from cyborg.testing.machine import HostTree
from cyborg.tests.fixtures.hosts.directory_images import DirectoryImages
from cyborg.tests.unit.drivers.fpga.simulated_fpga import (
    INTERFACE,
    MANAGEMENT,
    OLD_FUNCTION,
    PAC,
    PLAIN,
    USER,
    SimulatedFpgaDriver,
    SimulatedKernel,
)

RULES = ("vendor=1234,type=FPGA", "address=*")
IMAGE = "11111111-1111-4111-8111-111111111111"


@pytest.fixture
def images(tmp_path: Path) -> DirectoryImages:
    store = DirectoryImages(tmp_path / "images")
    store.add(IMAGE, b"bits", region_id=INTERFACE)
    return store


def memory_of(kernel: SimulatedKernel) -> Memory:
    """Return the memory of the driver as an agent of this host has it after a restart."""
    return MemoryFile(kernel.root.parent / "memory.json").of("fpga")


def make_driver(
    kernel: SimulatedKernel, images: DirectoryImages | None = None, **options: Any
) -> FpgaDriver:
    driver = SimulatedFpgaDriver("fpgas", {"devices": RULES, **options}, kernel.root)
    driver.memory = memory_of(kernel)
    if images is not None:
        driver.images = images
    return driver


def discover(driver: FpgaDriver) -> dict[str, Device]:
    return {device.address: device for device in driver.discover()}


def only_deployable(driver: FpgaDriver, address: str = PLAIN) -> Deployable:
    (deployable,) = discover(driver)[address].deployables
    return deployable


def item(card: str = PLAIN, handle: str | None = None, **accel: str) -> WorkItem:
    return WorkItem("fpgas", card, card, card if handle is None else handle, accel)


def test_discover_card_of_rule_has_region_and_manager(kernel: SimulatedKernel) -> None:
    kernel.add_plain_card()
    device = discover(make_driver(kernel))[PLAIN]
    assert device.type is DeviceType.FPGA
    (deployable,) = device.deployables
    assert (deployable.address, deployable.resource_class) == (PLAIN, "FPGA")
    assert [handle.address for handle in deployable.handles] == [PLAIN]
    assert {
        f"CUSTOM_FPGA_REGION_{INTERFACE.upper()}",
        "CUSTOM_PCI_VENDOR_1234",
        "CUSTOM_PCI_PRODUCT_1234_11E8",
    } <= deployable.traits
    assert deployable.attributes["fpga_region"] == "region0"
    assert deployable.attributes["fpga_manager"] == "fpga0"
    assert deployable.attributes["region_id"] == INTERFACE
    assert deployable.bitstream_id is None


def test_discover_card_without_type_in_its_rule_is_not_offered(kernel: SimulatedKernel) -> None:
    kernel.add_plain_card()
    assert discover(make_driver(kernel, devices=("address=*",))) == {}


@pytest.mark.parametrize(("vendor", "product"), sorted(FAMILIES))
def test_discover_knows_each_id(tmp_path: Path, vendor: str, product: str) -> None:
    tree = HostTree(tmp_path)
    tree.add_function(PAC, vendor, product, "120000")
    (device,) = FpgaDriver("f", {"devices": ("address=*",)}, tree.root).discover()
    family = FAMILIES[vendor, product]
    assert device.std_board_info["family"] == family.name
    # That of an N3000 only manages the card.
    expected = set() if product == "0b30" else {"FPGA"}
    assert {d.resource_class for d in device.deployables} == expected


def test_discover_dfl_card_shows_function_and_static_region(kernel: SimulatedKernel) -> None:
    kernel.add_dfl_card()
    device = discover(make_driver(kernel))[PAC]
    assert device.std_board_info["static_region_id"] == "0x23000110010310"
    assert device.std_board_info["static_region_metadata"] == "0x177402141"
    assert device.std_board_info["ports"] == "1"
    assert device.numa_node == 1
    (deployable,) = device.deployables
    assert {
        f"CUSTOM_FPGA_REGION_{INTERFACE.upper()}",
        f"CUSTOM_FPGA_FUNCTION_{OLD_FUNCTION.upper()}",
        "CUSTOM_FPGA_INTEL_PAC_ARRIA_10",
        "CUSTOM_NUMA_NODE_1",
    } <= deployable.traits
    assert deployable.attributes["fpga_region"] == "region1"


def test_discover_dfl_card_with_virtual_functions_has_deployable_for_each_port(
    kernel: SimulatedKernel,
) -> None:
    kernel.add_dfl_card(ports=2, virtual=2)
    found = discover(make_driver(kernel))[PAC].deployables
    assert [(d.address, [h.address for h in d.handles]) for d in found] == [
        (PAC, ["0000:5e:00.1"]),
        (f"{PAC}-region1", ["0000:5e:00.2"]),
    ]
    assert [d.attributes["function_id"] for d in found] == [OLD_FUNCTION, OLD_FUNCTION]


def test_discover_dfl_card_with_two_ports_as_a_whole_has_one_deployable(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_dfl_card(ports=2)
    driver = make_driver(kernel, images)
    deployable = only_deployable(driver, PAC)
    assert [handle.address for handle in deployable.handles] == [PAC]
    assert "region_id" not in deployable.attributes
    with pytest.raises(DriverFailed, match="offered as a whole and has 2 regions"):
        driver.program(item(PAC, ""), IMAGE)


def test_discover_alveo_offers_its_user_function(kernel: SimulatedKernel) -> None:
    kernel.add_alveo()
    found = discover(make_driver(kernel))
    assert list(found) == [USER]
    assert found[USER].std_board_info["management_function"] == MANAGEMENT
    assert found[USER].std_board_info["family"] == "Alveo U200"
    assert "CUSTOM_FPGA_ALVEO_U200" in found[USER].deployables[0].traits


def test_discover_keeps_regions_of_card_in_a_server(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    driver.prepare(item(bitstream_id=IMAGE), "instance")
    before = only_deployable(driver)
    kernel.unbind(PLAIN)
    after = only_deployable(driver)
    assert after.traits == before.traits
    assert after.bitstream_id == before.bitstream_id == IMAGE


def test_measure_manager_in_error_is_unhealthy(kernel: SimulatedKernel) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel)
    devices = driver.discover()
    assert driver.measure(devices)[PLAIN].health is Health.OK
    (kernel.root / "class/fpga_manager/fpga0/state").write_text("write error\n")
    measured = driver.measure(devices)[PLAIN]
    assert measured.health is Health.UNHEALTHY
    assert measured.reason == "the FPGA manager fpga0 is in the state 'write error'"


def test_measure_shows_the_reasons_of_all_failed_regions(
    kernel: SimulatedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel)
    devices = driver.discover()
    regions = (
        cards.Region("a", fme="dfl-fme.0", port=0, in_reset=True),
        cards.Region("b", fme="dfl-fme.0", port=1, in_reset=True),
    )
    monkeypatch.setattr(cards, "read_regions", lambda *_: {PLAIN: cards.CardRegions(regions)})
    reason = driver.measure(devices)[PLAIN].reason or ""
    assert [f"port {number} of dfl-fme.0 is in reset" in reason for number in (0, 1)] == [True] * 2


def test_abilities_are_prepare_program_and_measure(kernel: SimulatedKernel) -> None:
    abilities = make_driver(kernel).abilities
    assert abilities == {Ability.PREPARES, Ability.PROGRAMS, Ability.MEASURES}


@pytest.mark.parametrize(
    ("option", "value"),
    [("programmer", "jtag"), ("program_timeout", 9.0), ("program_timeout", 3601.0)],
)
def test_option_out_of_range_is_misconfigured(tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(Misconfigured, match=option):
        FpgaDriver("fpgas", {option: value}, tmp_path)


def test_prepare_without_image_writes_nothing(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card()
    make_driver(kernel, images).prepare(item(), None)
    assert kernel.writes == []


def test_prepare_function_of_the_host_is_refused(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card()
    kernel.add_disk("vda", f"pci0000:00/{PLAIN}")
    kernel.mount("vda", "/")
    with pytest.raises(DriverFailed, match="cannot be given to a server: vda holds the root file"):
        make_driver(kernel, images).prepare(item(bitstream_id=IMAGE), None)
    assert kernel.writes == []


@pytest.mark.parametrize(
    "accel",
    [
        {"bitstream_id": "../../etc/passwd"},
        {"bitstream_id": f"{IMAGE}\n"},
        {"bitstream_id": ""},
        {"function_id": "../x"},
        {"bitstream_id": IMAGE, "function_id": OLD_FUNCTION},
    ],
)
def test_prepare_malformed_image_is_refused(
    kernel: SimulatedKernel, images: DirectoryImages, accel: dict[str, str]
) -> None:
    kernel.add_plain_card()
    with pytest.raises(DriverFailed):
        make_driver(kernel, images).prepare(item(**accel), None)
    assert (kernel.writes, images.opened) == ([], [])


def test_release_of_whole_card_forgets_its_image(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    """A server with the physical function can have loaded another image."""
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    driver.prepare(item(bitstream_id=IMAGE), None)
    assert only_deployable(driver).bitstream_id == IMAGE
    for _ in range(2):
        driver.release(item(bitstream_id=IMAGE))
    assert only_deployable(driver).bitstream_id is None
    driver.prepare(item(bitstream_id=IMAGE), None)
    assert len(kernel.writes) == 2


def test_release_after_failed_prepare_keeps_the_image(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    """No server had the card: a later failure can restore the image."""
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    driver.program(item(handle=""), IMAGE)
    absent = item(bitstream_id="22222222-2222-4222-8222-222222222222")
    with pytest.raises(DriverFailed, match="does not exist"):
        driver.prepare(absent, "instance")
    make_driver(kernel, images).release(absent)
    assert only_deployable(driver).bitstream_id == IMAGE


def test_release_forgets_image_that_the_profile_did_not_name(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    driver.program(item(handle=""), IMAGE)
    driver.prepare(item(), "instance")
    assert only_deployable(driver).bitstream_id == IMAGE
    again = make_driver(kernel, images)
    again.release(item())
    assert only_deployable(again).bitstream_id is None


def test_release_of_virtual_function_keeps_the_image(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_dfl_card(ports=1, virtual=1)
    driver = make_driver(kernel, images)
    driver.prepare(item(PAC, "0000:5e:00.1"), "instance")
    store = RecordStore(lambda: memory_of(kernel))
    assert store.get(PAC, 0) is None
    record = Record(IMAGE, None, "boot", 1, None)
    RecordStore(lambda: driver.memory).put(PAC, 0, record)
    driver.prepare(item(PAC, "0000:5e:00.1"), "instance")
    driver.release(item(PAC, "0000:5e:00.1"))
    assert store.get(PAC, 0) == record


def test_control_of_another_sysfs_refuses(kernel: SimulatedKernel, images: DirectoryImages) -> None:
    kernel.add_plain_card()
    driver = FpgaDriver("fpgas", {"devices": RULES}, kernel.root)
    driver.images = images
    with pytest.raises(DriverFailed, match="not a device of this host"):
        driver.program(item(handle=""), IMAGE)
    assert kernel.writes == []


@pytest.mark.slow
def test_driver_passes_all_rules(
    kernel: SimulatedKernel, images: DirectoryImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.add_plain_card()
    kernel.add_dfl_card(ports=2, virtual=2)
    kernel.add_alveo()
    monkeypatch.setattr(SimulatedFpgaDriver, "images", images)
    results = run_rules(
        SimulatedFpgaDriver,
        {"devices": RULES},
        sysfs_root=kernel.root,
        work=True,
        image=IMAGE,
        entry_point="fpga",
    )
    outcomes = {result.rule.name: (result.outcome, result.reason) for result in results}
    failed = (Outcome.FAILED, Outcome.BLOCKED)
    assert {name: found for name, found in outcomes.items() if found[0] in failed} == {}
    assert outcomes["programmed_image_is_discovered"][0] is Outcome.PASSED
    assert outcomes["prepare_is_idempotent"][0] is Outcome.PASSED


def test_card_with_more_virtual_functions_than_regions_cannot_be_programmed(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    """Several servers have the card: an image would replace the function of all of them."""
    kernel.add_plain_card()
    (kernel.bus / PLAIN / "sriov_totalvfs").write_text("4\n")
    kernel.enable_virtual_functions(PLAIN, 2, "11e9", "00ff00")
    with pytest.raises(DriverFailed, match=r"2 virtual functions for 1 region\(s\)"):
        make_driver(kernel, images).program(item(handle=""), IMAGE)
    assert kernel.writes == []


def test_program_card_of_a_domain_is_refused(kernel: SimulatedKernel) -> None:
    kernel.add_plain_card()
    path = kernel.root.parent / "proc/libvirt_domains.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"users": {PLAIN: "guest1"}}))
    with pytest.raises(DriverFailed, match="it is used by the domain guest1 of libvirt"):
        make_driver(kernel).program(WorkItem("fpgas", PLAIN, PLAIN), IMAGE)
