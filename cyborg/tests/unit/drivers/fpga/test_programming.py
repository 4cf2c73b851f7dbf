# SPDX-License-Identifier: Apache-2.0
"""Loading of images: what is refused, what fails, and what a region has then."""

import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Health
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.fpga.driver import FpgaDriver
from cyborg.drivers.privileged import fpga
from cyborg.tests.fixtures.hosts.directory_images import DirectoryImages
from cyborg.tests.fixtures.hosts.gbs import make_gbs
from cyborg.tests.unit.drivers.fpga.simulated_fpga import (
    BUSY,
    HALF_WAY,
    INTERFACE,
    MANAGEMENT,
    NEW_FUNCTION,
    OLD_FUNCTION,
    OTHER_INTERFACE,
    PAC,
    PLAIN,
    REFUSED,
    USER,
    SimulatedFpgaDriver,
    SimulatedKernel,
)
from cyborg.tests.unit.drivers.fpga.test_driver import memory_of

RULES = ("vendor=1234,type=FPGA", "address=*")
FIRST, SECOND, THIRD = (f"{n}1111111-1111-4111-8111-111111111111" for n in (1, 2, 3))
FIRMWARE = "class/fpga_manager/fpga0/firmware"


@pytest.fixture
def images(tmp_path: Path) -> DirectoryImages:
    store = DirectoryImages(tmp_path / "images")
    store.add(FIRST, b"first", region_id=INTERFACE, function_id=OLD_FUNCTION)
    store.add(SECOND, b"second", region_id=INTERFACE, function_id=NEW_FUNCTION)
    return store


def make_driver(kernel: SimulatedKernel, images: DirectoryImages, **options: Any) -> FpgaDriver:
    driver = SimulatedFpgaDriver("fpgas", {"devices": RULES, **options}, kernel.root)
    driver.memory = memory_of(kernel)
    driver.images = images
    return driver


def program(driver: FpgaDriver, image: str, card: str = PLAIN, deployable: str = "") -> None:
    driver.program(WorkItem("fpgas", card, deployable or card), image)


def prepare(driver: FpgaDriver, card: str = PLAIN, **accel: str) -> None:
    driver.prepare(WorkItem("fpgas", card, card, card, accel), "instance")


def shown(driver: FpgaDriver, card: str = PLAIN) -> list[str | None]:
    (device,) = [device for device in driver.discover() if device.address == card]
    return [deployable.bitstream_id for deployable in device.deployables]


def test_program_writes_file_name_and_removes_file(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    program(driver, FIRST)
    assert kernel.writes == [(FIRMWARE, f"cyborg-fpga0-{FIRST}.bin")]
    assert list(kernel.firmware.iterdir()) == []
    assert shown(driver) == [FIRST]
    # Another process of the agent.
    assert shown(make_driver(kernel, images)) == [FIRST]


def test_program_is_idempotent(kernel: SimulatedKernel, images: DirectoryImages) -> None:
    kernel.add_plain_card()
    program(make_driver(kernel, images), FIRST)
    program(make_driver(kernel, images), FIRST)
    assert len(kernel.writes) == 1


def test_record_of_another_boot_is_not_trusted(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    program(driver, FIRST)
    kernel.boot("6c1d2a41-0000-4000-8000-000000000002")
    assert shown(driver) == [None]
    program(driver, FIRST)
    assert len(kernel.writes) == 2
    assert shown(driver) == [FIRST]


def test_record_of_another_function_is_not_trusted(
    kernel: SimulatedKernel, images: DirectoryImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.add_dfl_card()
    driver = make_driver(kernel, images)
    driver_with_port(kernel, monkeypatch)
    images.add(THIRD, make_gbs(INTERFACE, NEW_FUNCTION), region_id=INTERFACE)
    program(driver, THIRD, PAC)
    assert shown(driver, PAC) == [THIRD]
    (kernel.root / "class/fpga_region/region0/dfl-port.0/afu_id").write_text(f"{OLD_FUNCTION}\n")
    assert shown(driver, PAC) == [None]


def test_damaged_record_counts_as_unknown(kernel: SimulatedKernel, images: DirectoryImages) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    program(driver, FIRST)
    driver.memory.put(f"images {PLAIN}", "{")
    assert shown(driver) == [None]


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({}, "its property accel:region_id is None"),
        ({"region_id": OTHER_INTERFACE}, f"the interface id of the region is {INTERFACE}"),
        ({"region_id": f"{INTERFACE}\n{INTERFACE}"}, "does not fit the region"),
        ({"region_id": INTERFACE, "vendor_id": "8086"}, "accel:vendor_id is '8086', expected 1234"),
        ({"region_id": INTERFACE, "product_id": "0"}, "accel:product_id is '0', expected 11e8"),
    ],
)
def test_image_that_does_not_fit_is_not_fetched(
    kernel: SimulatedKernel,
    images: DirectoryImages,
    properties: dict[str, str],
    message: str,
) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    program(driver, FIRST)
    images.add(THIRD, b"third", **properties)
    with pytest.raises(DriverFailed, match=message):
        program(driver, THIRD)
    assert images.opened == [FIRST]
    assert len(kernel.writes) == 1
    assert shown(driver) == [FIRST]


@pytest.mark.parametrize(
    "region_id", [f"{OTHER_INTERFACE}, {INTERFACE}", "69528DB6-EB31-577A-8C36-68F9FAA081F6"]
)
def test_image_with_id_in_another_form_fits(
    kernel: SimulatedKernel, images: DirectoryImages, region_id: str
) -> None:
    kernel.add_plain_card()
    images.add(THIRD, b"third", region_id=region_id, vendor_id="0x1234")
    driver = make_driver(kernel, images)
    program(driver, THIRD)
    assert shown(driver) == [THIRD]


def test_region_without_interface_id_needs_image_for_the_model(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card(compat_id=None)
    driver = make_driver(kernel, images)
    with pytest.raises(DriverFailed, match="and the region has none"):
        program(driver, FIRST)
    images.add(THIRD, b"third", vendor_id="1234")
    with pytest.raises(DriverFailed, match="accel:product_id is None, expected 11e8"):
        program(driver, THIRD)
    assert kernel.writes == []
    images.add(THIRD, b"third", vendor_id="1234", product_id="11e8")
    program(driver, THIRD)
    assert shown(driver) == [THIRD]


def test_busy_manager_leaves_region_unchanged(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    program(driver, FIRST)
    images.add(THIRD, BUSY, region_id=INTERFACE)
    with pytest.raises(DriverFailed, match=r"busy.*; the region is unchanged"):
        program(driver, THIRD)
    assert images.opened == [FIRST, THIRD]
    assert shown(driver) == [FIRST]


def test_refused_image_is_replaced_by_the_previous_one(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    """The kernel has switched the bridges off: ``fpga_region_program_fpga`` leaves them off."""
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    program(driver, FIRST)
    images.add(THIRD, REFUSED, region_id=INTERFACE)
    with pytest.raises(DriverFailed, match=r"'write init error'; the previous image"):
        program(driver, THIRD)
    assert images.opened == [FIRST, THIRD, FIRST]
    assert shown(driver) == [FIRST]


def test_failure_half_way_restores_previous_image(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    program(driver, FIRST)
    images.add(THIRD, HALF_WAY, region_id=INTERFACE)
    with pytest.raises(DriverFailed) as caught:
        program(driver, THIRD)
    assert caught.value.message == (
        f"image {THIRD} could not be loaded into {PLAIN}: the FPGA manager fpga0 refused the "
        "image: Input/output error; its state is 'write error'; the previous image "
        f"{FIRST} was restored"
    )
    assert [name[13:21] for _, name in kernel.writes] == [FIRST[:8], THIRD[:8], FIRST[:8]]
    assert shown(driver) == [FIRST]


def test_failure_half_way_without_known_image_says_so(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    images.add(THIRD, HALF_WAY, region_id=INTERFACE)
    with pytest.raises(DriverFailed, match="previous image is not known, so it was not restored"):
        program(driver, THIRD)
    assert shown(driver) == [None]


def test_failure_to_restore_is_part_of_the_error(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    program(driver, FIRST)
    images.add(THIRD, HALF_WAY, region_id=INTERFACE)
    images.add(FIRST, HALF_WAY, region_id=INTERFACE)
    with pytest.raises(DriverFailed, match=f"previous image {FIRST} could not be restored: the F"):
        program(driver, THIRD)
    assert shown(driver) == [None]


def test_previous_image_that_was_deleted_is_part_of_the_error(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    program(driver, FIRST)
    images.add(THIRD, HALF_WAY, region_id=INTERFACE)
    images.remove(FIRST)
    message = f"previous image {FIRST} could not be restored: image {FIRST} does not exist"
    with pytest.raises(DriverFailed, match=f"'write error'; the {message}"):
        program(driver, THIRD)
    assert shown(driver) == [None]


def test_card_that_disappears_is_an_error(
    kernel: SimulatedKernel, images: DirectoryImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    program(driver, FIRST)
    monkeypatch.setattr(fpga, "_write", lambda path, text: kernel.unbind(PLAIN))
    with pytest.raises(DriverFailed, match="fpga0 does not operate: its state is None"):
        program(driver, SECOND)
    assert shown(driver) == [None]


def test_kernel_without_the_attribute_is_named(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card(firmware=False)
    with pytest.raises(DriverFailed, match="fpga0 has no attribute firmware"):
        program(make_driver(kernel, images), FIRST)
    assert images.opened == []


def test_prepare_searches_image_with_the_function(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card()
    driver = make_driver(kernel, images)
    prepare(driver, function_id="331DB30C-9885-41EA-9081-F88B8F655CAA")
    assert shown(driver) == [SECOND]
    images.remove(SECOND)  # not needed: the region has it
    prepare(driver, function_id=NEW_FUNCTION)
    assert len(kernel.writes) == 1
    (deployable,) = driver.discover()[0].deployables
    assert f"CUSTOM_FPGA_FUNCTION_{NEW_FUNCTION.upper()}" in deployable.traits


def test_prepare_function_without_image_is_refused(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card()
    with pytest.raises(DriverFailed, match="0 images have the properties"):
        prepare(make_driver(kernel, images), function_id="0" * 32)
    assert kernel.writes == []


def test_card_in_a_server_cannot_be_programmed(
    kernel: SimulatedKernel, images: DirectoryImages
) -> None:
    kernel.add_plain_card()
    kernel.unbind(PLAIN)
    with pytest.raises(DriverFailed, match="no FPGA region: it is bound to the kernel driver vfio"):
        program(make_driver(kernel, images), FIRST)


@pytest.mark.parametrize("deployable", [f"{PLAIN}-region1", f"{PLAIN}-region-1", PAC, "..", ""])
def test_unknown_deployable_or_card_is_refused(
    kernel: SimulatedKernel, images: DirectoryImages, deployable: str
) -> None:
    kernel.add_dfl_card(ports=2, virtual=2)
    with pytest.raises(DriverFailed):
        make_driver(kernel, images).program(WorkItem("fpgas", PLAIN, deployable), FIRST)


def test_one_image_at_a_time_is_loaded_into_a_card(
    kernel: SimulatedKernel, images: DirectoryImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.add_plain_card()
    started, proceed, active = threading.Event(), threading.Event(), list[int]()

    def write(path: Path, text: str) -> None:
        active.append(1)
        assert len(active) == 1
        started.set()
        assert proceed.wait(120)
        kernel.write_attribute(path, text)
        active.pop()

    monkeypatch.setattr(fpga, "_write", write)
    drivers = [make_driver(kernel, images), make_driver(kernel, images)]
    threads = [
        threading.Thread(target=program, args=(driver, image))
        for driver, image in zip(drivers, (FIRST, SECOND), strict=True)
    ]
    for thread in threads:
        thread.start()
    assert started.wait(120)
    proceed.set()
    for thread in threads:
        thread.join(120)
    assert len(kernel.writes) == 2


def driver_with_port(
    kernel: SimulatedKernel, monkeypatch: pytest.MonkeyPatch, error: OSError | None = None
) -> list[tuple[int, int, bytes]]:
    """Let the ioctl set the function of the port; return its port, size and content."""
    calls: list[tuple[int, int, bytes]] = []

    def ioctl(descriptor: int, request: int, argument: bytes) -> None:
        import ctypes

        assert request == 0xB680
        argsz, flags, port, size, address = struct.unpack("=IIIIQ", argument)
        assert (argsz, flags) == (24, 0)
        calls.append((port, size, ctypes.string_at(address, size)))
        if error is not None:
            raise error
        for folder in (kernel.root / "class/fpga_region").glob(f"*/dfl-port.{port}"):
            (folder / "afu_id").write_text(f"{NEW_FUNCTION}\n")

    monkeypatch.setattr(fpga, "_ioctl", ioctl)
    node = kernel.dev / "dfl-fme.0"
    node.touch()
    number = node.stat().st_rdev  # 0: a regular file
    (kernel.root / "bus/platform/devices/dfl-fme.0/dev").write_text(f"{number}:{number}\n")
    return calls


def test_dfl_loads_raw_image_into_the_port_of_the_region(
    kernel: SimulatedKernel, images: DirectoryImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.add_dfl_card(ports=2, virtual=2)
    calls = driver_with_port(kernel, monkeypatch)
    properties = {"region_id": INTERFACE, "function_id": NEW_FUNCTION}
    images.add(THIRD, make_gbs(INTERFACE, NEW_FUNCTION, b"x" * 5001), **properties)
    driver = make_driver(kernel, images)
    program(driver, THIRD, PAC, f"{PAC}-region1")
    assert calls == [(1, 5001, b"x" * 5001)]
    assert shown(driver, PAC) == [None, THIRD]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (make_gbs(OTHER_INTERFACE, NEW_FUNCTION), f"is for the interface id {OTHER_INTERFACE}"),
        (b"bits", "is not a GBS file"),
        (make_gbs("..", NEW_FUNCTION), "no valid interface-uuid"),
        (make_gbs(INTERFACE, NEW_FUNCTION)[:40], "ends in its metadata"),
        (make_gbs(INTERFACE, NEW_FUNCTION)[:16] + b"\xff" * 8, "has metadata of 4294967295 bytes"),
        (make_gbs(INTERFACE, NEW_FUNCTION)[:16] + b"\2\0\0\0[]", "metadata of the image is malf"),
    ],
)
def test_dfl_file_that_does_not_fit_is_not_loaded(
    kernel: SimulatedKernel,
    images: DirectoryImages,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    message: str,
) -> None:
    kernel.add_dfl_card()
    calls = driver_with_port(kernel, monkeypatch)
    images.add(THIRD, content, region_id=INTERFACE)
    with pytest.raises(DriverFailed, match=f"{message}.*; the region is unchanged"):
        program(make_driver(kernel, images), THIRD, PAC)
    assert calls == []


def test_dfl_region_with_another_function_than_stated_is_an_error(
    kernel: SimulatedKernel, images: DirectoryImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.add_dfl_card()
    driver_with_port(kernel, monkeypatch)
    properties = {"region_id": INTERFACE, "function_id": "f" * 32}
    images.add(THIRD, make_gbs(INTERFACE, NEW_FUNCTION), **properties)
    with pytest.raises(DriverFailed, match=f"has the function {NEW_FUNCTION}, the image states f"):
        program(make_driver(kernel, images), THIRD, PAC)


def test_dfl_error_of_the_hardware_is_shown(
    kernel: SimulatedKernel, images: DirectoryImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.add_dfl_card()
    driver_with_port(kernel, monkeypatch, OSError(5, "Input/output error"))
    (kernel.root / "class/fpga_manager/fpga0/status").write_text("reconfig CRC error\n")
    images.add(THIRD, make_gbs(INTERFACE, NEW_FUNCTION), region_id=INTERFACE)
    with pytest.raises(DriverFailed, match="manager fpga0 shows 'reconfig CRC error'"):
        program(make_driver(kernel, images), THIRD, PAC)


def test_dfl_port_that_stays_in_reset_is_an_error_and_unhealthy(
    kernel: SimulatedKernel, images: DirectoryImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does not enable the bridge of a region after an error; the lab shows it."""
    kernel.add_dfl_card()
    driver_with_port(kernel, monkeypatch)
    images.add(THIRD, make_gbs(INTERFACE, NEW_FUNCTION), region_id=INTERFACE)
    driver = make_driver(kernel, images)
    program(driver, THIRD, PAC)
    (kernel.root / "class/fpga_region/region0/dfl-port.0/afu_id").unlink()
    reason = "port 0 of dfl-fme.0 is in reset, as after a failed reconfiguration: bind the physical"
    with pytest.raises(DriverFailed, match=f"cannot be programmed by dfl: {reason}"):
        program(driver, FIRST, PAC)
    measured = driver.measure(driver.discover())[PAC]
    assert measured.health is Health.UNHEALTHY
    assert (measured.reason or "").startswith(reason)
    (kernel.root / "class/fpga_manager/fpga0/state").write_text("write error\n")
    both = driver.measure(driver.discover())[PAC].reason
    assert both == f"{measured.reason}; the FPGA manager fpga0 is in the state 'write error'"
    assert shown(driver, PAC) == [None]


@pytest.mark.parametrize(
    ("programmer", "card", "arguments"),
    [
        ("auto", USER, ["program", "--device", MANAGEMENT, "--user", "PATH"]),
        ("xbutil", USER, ["program", "--device", USER, "--user", "PATH"]),
        ("fpgasupdate", PAC, ["PATH", PAC]),
        ("fpgaconf", PAC, ["--segment", "0x0", "-B", "0x5e", "-D", "0x0", "-F", "0x0", "PATH"]),
    ],
)
def test_tool_gets_arguments_and_its_error_is_shown(
    kernel: SimulatedKernel,
    images: DirectoryImages,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    programmer: str,
    card: str,
    arguments: list[str],
) -> None:
    kernel.add_alveo()
    kernel.add_dfl_card()
    tool = "xbmgmt" if programmer == "auto" else programmer
    script, output = tmp_path / tool, tmp_path / "arguments"
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {output}\necho broken\nexit 3\n')
    script.chmod(0o755)
    monkeypatch.setattr(fpga, "_TOOL_FOLDERS", (str(tmp_path), "/bin"))
    vendor, product = ("10ee", "5001") if card == USER else ("8086", "09c4")
    properties = {"vendor_id": vendor, "product_id": product}
    content = b"x" if card == USER else make_gbs(INTERFACE, NEW_FUNCTION)
    images.add(THIRD, content, **properties, **({} if card == USER else {"region_id": INTERFACE}))
    driver = make_driver(kernel, images, programmer=programmer)
    with pytest.raises(DriverFailed, match=f"{tool} failed with 3: broken"):
        program(driver, THIRD, card)
    path = str(tmp_path / "images" / THIRD)
    assert output.read_text().splitlines() == [path if a == "PATH" else a for a in arguments]
    script.write_text("#!/bin/sh\nexit 0\n")
    program(driver, THIRD, card)
    assert shown(driver, card) == [THIRD]
