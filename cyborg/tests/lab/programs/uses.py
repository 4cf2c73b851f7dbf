# SPDX-License-Identifier: Apache-2.0
"""Use a drive, a network card and a device as hosts do, and print why each is not offered.

For each use: the reason, and the reason after the use has ended, which is null if it is offered.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute, netns

from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.host_use import open_nodes
from cyborg.tests.fixtures.hosts import disk_contents
from cyborg.tests.fixtures.machine.processes import wait_until

BUS = Path("/sys/bus/pci")
DISK = Path("/dev/nvme0n1")
# Program that has a node open, as a child of init: processes of the agent do not count.
HOLD = """
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
descriptor = os.open(sys.argv[1], os.O_RDWR)
open("/run/held", "w").write(str(os.getpid()))
os.read(int(sys.argv[2]), 1)
"""


def find_function(class_code: str) -> str:
    """Return the address of the function with a class code."""
    (found,) = (p.parent.name for p in BUS.glob("devices/*/class") if class_code in p.read_text())
    return found


def find_reason(address: str) -> str | None:
    """Return why a function is not offered, for an agent that starts now; None if it is."""
    driver = GenericDriver("g", {"devices": [f"address={address}"], "check_iommu": False})
    (device,) = driver.discover()
    reason = device.vendor_board_info.get(NOT_OFFERED)
    # The name of the program depends on the installation.
    return reason and reason.replace("python3", "python")


def write(*parts: disk_contents.Part) -> None:
    """Write to the drive."""
    with open(DISK, "r+b") as disk:
        for offset, content in parts:
            disk.seek(offset)
            disk.write(content)
        disk.flush()
        os.fsync(disk)


def wipe() -> None:
    """Erase everything that a case wrote."""
    write((0, bytes(2 << 20)), (disk_contents.SIZE - (1 << 20), bytes(1 << 20)))


@contextmanager
def held(node: str) -> Iterator[None]:
    """Let another process have a node open."""
    reader, writer = os.pipe()
    Path("/run/held").unlink(missing_ok=True)
    command = [sys.executable, "-c", HOLD, node, str(reader)]
    subprocess.run(command, check=True, pass_fds=[reader])
    wait_until("the node is open", lambda: Path("/run/held").exists() and _read_pid())
    process = Path("/proc") / _read_pid()
    try:
        yield
    finally:
        os.write(writer, b"x")
        wait_until(
            "the process has ended", lambda: not (process / "fd").exists() or not _opens(process)
        )
        os.close(reader)
        os.close(writer)


def _read_pid() -> str:
    return Path("/run/held").read_text()


def _opens(process: Path) -> bool:
    try:
        return bool(os.listdir(process / "fd"))
    except OSError:
        return False


def bind(address: str, driver: str) -> None:
    """Bind a function to a driver."""
    folder = BUS / "devices" / address
    if (folder / "driver").exists():
        (folder / "driver/unbind").write_text(address)
    (folder / "driver_override").write_text(driver)
    (BUS / "drivers_probe").write_text(address)
    assert (folder / "driver").resolve().name == driver


def use_drive(results: dict[str, Any]) -> None:
    """Write each kind of content to the drive, mount it, and have it open."""
    address = find_function("0x010802")
    results["nothing on the drive"] = [find_reason(address), None]
    for kind, parts in disk_contents.CONTENTS.items():
        write(*parts)
        reason = find_reason(address)
        wipe()
        results[kind] = [reason, find_reason(address)]
    for program, kind in (("mkfs.ext4", "a file system (ext4)"), ("mkswap", "data (swap)")):
        subprocess.run([program, DISK], check=True, capture_output=True)
        reason = find_reason(address)
        if program == "mkswap":
            subprocess.run(["swapon", DISK], check=True)
            results["active swap"] = [find_reason(address), None]
            subprocess.run(["swapoff", DISK], check=True)
        wipe()
        results[kind] = [reason, find_reason(address)]
    with held(str(DISK)):
        reason = find_reason(address)
    results["a raw disk of another process"] = [reason, find_reason(address)]


def use_card(results: dict[str, Any]) -> None:
    """Give the network card routes, addresses, masters and another namespace."""
    address = find_function("0x020000")
    subprocess.run(["modprobe", "-a", "e1000e", "vrf", "bridge", "dummy", "macvlan"], check=True)
    wait_until("the interface is there", lambda: list((BUS / "devices" / address).glob("net/*")))
    (name,) = os.listdir(BUS / "devices" / address / "net")
    with IPRoute() as ip:
        (card,) = ip.link_lookup(ifname=name)

        def look(case: str, begin: Callable[[], object], end: Callable[[], object]) -> None:
            begin()
            reason = find_reason(address)
            end()
            ip.flush_addr(index=card)
            ip.link("set", index=card, state="down")
            results[case] = [(reason or "").replace(name, "eth0") or None, find_reason(address)]

        def route(**values: Any) -> Callable[[], object]:
            def begin() -> None:
                ip.link("set", index=card, state="up")
                ip.route("add", **values)

            return begin

        def add_master(kind: str, **values: Any) -> Callable[[], object]:
            def begin() -> None:
                ip.link("add", ifname="upper0", kind=kind, **values)
                ip.link("set", index=card, master=ip.link_lookup(ifname="upper0")[0], state="up")

            return begin

        def remove_master() -> None:
            ip.link("del", index=ip.link_lookup(ifname="upper0")[0])

        nothing: Callable[[], object] = lambda: None  # noqa: E731
        look("up without address", lambda: ip.link("set", index=card, state="up"), nothing)
        look(
            "an address",
            lambda: ip.addr("add", index=card, address="192.0.2.1", prefixlen=24),
            nothing,
        )
        look("a default route", route(dst="0.0.0.0/0", scope="link", oif=card), nothing)
        look(
            "a route of a policy table",
            route(dst="0.0.0.0/0", scope="link", oif=card, table=100),
            nothing,
        )
        ip.link("add", ifname="dummy1", kind="dummy")
        (dummy,) = ip.link_lookup(ifname="dummy1")
        ip.link("set", index=dummy, state="up")
        hops = [{"oif": dummy, "hops": 0}, {"oif": card, "hops": 0}]
        look(
            "the second hop of a route",
            route(dst="198.51.100.0/24", multipath=hops),
            lambda: ip.route("del", dst="198.51.100.0/24"),
        )
        look("a VRF", add_master("vrf", vrf_table=7), remove_master)
        look("a bridge", add_master("bridge"), remove_master)

        def add_macvlan() -> None:
            ip.link("set", index=card, state="up")
            ip.link("add", ifname="upper0", kind="macvlan", link=card)
            (upper,) = ip.link_lookup(ifname="upper0")
            ip.addr("add", index=upper, address="192.0.2.1", prefixlen=24)

        look("a macvlan with an address", add_macvlan, remove_master)
        netns.create("container")
        ip.link("set", index=card, net_ns_fd="container")
        reason = find_reason(address)
        netns.remove("container")
        wait_until("the interface is back", lambda: list((BUS / "devices" / address).glob("net/*")))
        results["another namespace"] = [reason, find_reason(address)]


def use_device(results: dict[str, Any]) -> None:
    """Drive a device from user space."""
    address = find_function("0x00ff00")
    subprocess.run(["modprobe", "-a", "vfio-pci", "uio_pci_generic"], check=True)
    results["nothing has the device"] = [find_reason(address), None]
    bind(address, "vfio-pci")
    group = (BUS / "devices" / address / "iommu_group").resolve().name
    with held(f"/dev/vfio/{group}"):
        reason = find_reason(address)
    results["a VFIO group"] = [
        (reason or "").replace(f"/{group} ", "/N ") or None,
        find_reason(address),
    ]
    bind(address, "uio_pci_generic")
    reason = find_reason(address)
    bind(address, "vfio-pci")
    results["uio_pci_generic"] = [reason, find_reason(address)]


def main() -> None:
    """Print the results."""
    subprocess.run(["modprobe", "nvme"], check=True)
    open_nodes.MAX_AGE = 0.0
    wait_until("the disk is there", DISK.exists)
    results: dict[str, Any] = {}
    use_drive(results)
    use_card(results)
    use_device(results)
    print("RESULT " + json.dumps(results))  # noqa: T201


main()
