# SPDX-License-Identifier: Apache-2.0
"""Load images into two FPGA cards of the kernel, and print what they have after each step.

The arguments are the paths of the modules, in their order.
"""

import json
import os
import struct
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cyborg.agent.state_file import MemoryFile
from cyborg.core.errors import DriverFailed
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.fpga.driver import FpgaDriver
from cyborg.drivers.fpga.images import GBS_MAGIC
from cyborg.drivers.sysfs import Sysfs
from cyborg.tests.fixtures.hosts.directory_images import DirectoryImages
from cyborg.tests.lab.programs import (
    DFL_WORDS,
    FPGA_FUNCTIONS,
    FPGA_IMAGES,
    FPGA_INTERFACE,
    FPGA_OTHER_INTERFACE,
)

PCI = Path("/sys/bus/pci")
FOLDER = Path(tempfile.gettempdir()) / "fpga"


def make_image(function: str, mode: str) -> bytes:
    """Return an image of the lab's card."""
    return bytes.fromhex(function) + mode.encode().ljust(16, b"\0") + os.urandom(8192)


def make_images() -> DirectoryImages:
    """Return the image store."""
    FOLDER.mkdir()
    store = DirectoryImages(FOLDER / "images")
    for name, image in FPGA_IMAGES.items():
        function = FPGA_FUNCTIONS.get(name, "ee" * 16)
        region = FPGA_OTHER_INTERFACE if name == "other" else FPGA_INTERFACE
        store.add(image, make_image(function, name), region_id=region, function_id=function)
    return store


def make_driver(images: DirectoryImages) -> FpgaDriver:
    """Return a driver as after a start of the agent."""
    driver = FpgaDriver("fpga0", {"devices": ["vendor=1234,product=11e8,type=FPGA"]})
    driver.memory, driver.images = MemoryFile(FOLDER / "memory.json").of("fpga"), images
    return driver


def share_firmware() -> None:
    """Let the kernel read firmware of this root: it searches from the root of the boot."""
    Path("/new").symlink_to("/")
    Path("/sys/module/firmware_class/parameters/path").write_text("/new/lib/firmware")


def make_gbs(interface_id: str, word: str) -> bytes:
    """Return a GBS file whose raw image ends with a word, which becomes the function."""
    function = str(uuid.UUID(word * 4))
    image = {
        "interface-uuid": str(uuid.UUID(interface_id)),
        "accelerator-clusters": [{"accelerator-type-uuid": function}],
    }
    metadata = json.dumps({"version": 1, "afu-image": image}).encode()
    raw = os.urandom(4096) + struct.pack("<I", int(word, 16))
    return GBS_MAGIC + struct.pack("<I", len(metadata)) + metadata + raw


def run_dfl() -> dict[str, Any]:
    """Load images into the DFL card; return what it has after each step."""
    images = DirectoryImages(FOLDER / "gbs")
    for name, image in FPGA_IMAGES.items():
        interface = FPGA_OTHER_INTERFACE if name == "other" else FPGA_INTERFACE
        content = make_gbs(interface, DFL_WORDS.get(name, "22222222"))
        images.add(image, content, region_id=FPGA_INTERFACE)
    options = {"devices": ["vendor=1af4,product=1110,type=FPGA"], "programmer": "dfl"}
    driver = FpgaDriver("dfl0", options)
    driver.memory, driver.images = MemoryFile(FOLDER / "memory.json").of("fpga"), images
    (device,) = driver.discover()
    whole = WorkItem("dfl0", device.address, device.address)
    results: dict[str, Any] = {"report": device.to_dict()}
    for name in ("first", "second", "other", "fail", "again"):
        if name == "again":
            bind(device.address, "edudfl")
        error = error_of(
            partial(driver.program, whole, FPGA_IMAGES.get(name, FPGA_IMAGES["first"]))
        )
        ((deployable,),) = [found.deployables for found in driver.discover()]
        (port,) = Path("/sys/class/fpga_region").glob("*/dfl-port.*")
        results[name] = {
            "error": error,
            "image": deployable.bitstream_id,
            "function": deployable.attributes.get("function_id"),
            "port": Sysfs(port).read_text("afu_id"),
            "health": [found.health for found in driver.measure(driver.discover()).values()],
        }
    return results


def state(driver: FpgaDriver) -> dict[str, Any]:
    """Return what the driver shows of the card, and what the kernel does."""
    ((deployable,),) = [device.deployables for device in driver.discover()]
    functions = Path("/sys/class/fpga_region").glob("*/function")
    return {
        "image": deployable.bitstream_id,
        "traits": sorted(trait for trait in deployable.traits if "FPGA" in trait),
        "handles": [handle.address for handle in deployable.handles],
        "loaded": [path.read_text().strip() for path in functions],
        "health": [found.health for found in driver.measure(driver.discover()).values()],
        "files": sorted(path.name for path in Path("/lib/firmware").glob("cyborg-*")),
    }


def error_of(act: Callable[[], None]) -> str:
    """Return the error of a call, empty if it succeeds."""
    try:
        act()
    except DriverFailed as exc:
        return exc.message
    return ""


def bind(address: str, kernel_driver: str) -> None:
    """Bind the card to another kernel driver, as libvirt does."""
    (PCI / "devices" / address / "driver/unbind").write_text(address)
    (PCI / "devices" / address / "driver_override").write_text(kernel_driver)
    (PCI / "drivers_probe").write_text(address)


def main() -> None:
    """Print the results."""
    share_firmware()
    subprocess.run(["modprobe", "vfio-pci"], check=True)
    for module in sys.argv[1:]:
        subprocess.run(["insmod", module], check=True)
    images = make_images()
    driver, results = make_driver(images), dict[str, Any]()
    (device,) = driver.discover()
    card = device.address
    whole = WorkItem("fpga0", card, card)
    results["report"] = device.to_dict()
    results["empty"] = state(driver)
    for name in ("first", "other", "refuse", "fail"):
        error = error_of(partial(driver.program, whole, FPGA_IMAGES[name]))
        results[name] = state(driver) | {"error": error}
    results["restarted"] = state(make_driver(images))
    function = {"function_id": FPGA_FUNCTIONS["second"]}
    handle = WorkItem("fpga0", card, card, card, function)
    for _ in range(2):
        driver.prepare(handle, "instance")
    results["prepared"] = state(driver)
    bind(card, "vfio-pci")
    error = error_of(partial(driver.program, whole, FPGA_IMAGES["first"]))
    results["attached"] = state(driver) | {"error": error}
    bind(card, "edufpga")
    driver.release(handle)
    results["returned"] = state(driver)
    results["opened"] = images.opened
    results["dfl"] = run_dfl()
    print("RESULT " + json.dumps(results))  # noqa: T201


main()
