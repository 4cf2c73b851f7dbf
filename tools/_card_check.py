# SPDX-License-Identifier: Apache-2.0
"""Check what the drivers say about the cards of this machine, or of captures; see tools/card-check.

It changes no device. On a machine it discovers with every installed driver, opens the device nodes
of unused cards for a moment to see that the use check finds that, measures the health, reads NVML,
captures the machine, and compares the replay of the capture with the discovery.
"""

import argparse
import json
import os
import platform
import secrets
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from cyborg.core.capture.model import Capture
from cyborg.core.capture.scrub import Scrubber
from cyborg.core.drivers.registry import Support
from cyborg.core.errors import CyborgError
from cyborg.core.inventory.device import NOT_OFFERED, Device
from cyborg.core.inventory.device_state import Measurement
from cyborg.drivers.base import Driver, MeasureInterface
from cyborg.drivers.host_use import processes
from cyborg.drivers.host_use.check import used_functions
from cyborg.drivers.host_use.open_nodes import MAX_AGE
from cyborg.drivers.host_use.processes import ProcessReader
from cyborg.drivers.kernel.nvml import NvmlLibrary, is_known
from cyborg.drivers.replay.host import ReplayedHost
from cyborg.drivers.replay.recorder import (
    load_capture,
    options_for_capture,
    record_host,
    save_capture,
)
from cyborg.drivers.sysfs import LOCAL_ROOT, Sysfs

GROUP = "cyborg.accelerator.driver"
# Program that has a device node open until its input ends.
OPEN = "import os, sys; os.open(sys.argv[1], os.O_RDONLY); print(flush=True); sys.stdin.read()"
WAIT = 30.0  # seconds for this program


@dataclass
class Report:
    """The report so far: the devices by driver, and the problems."""

    devices: dict[str, list[Device]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def title(self, text: str) -> None:
        """Begin a part of the report."""
        print(f"\n== {text}", flush=True)

    def problem(self, text: str) -> None:
        """Add a problem, and print it."""
        self.problems.append(text)
        print(f"PROBLEM {text}", flush=True)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of PCI devices, and of those that a driver offers."""
        found = [device for devices in self.devices.values() for device in devices]
        offered = {device.address for device in found if reason_of(device) is None}
        return len({device.address for device in found}), len(offered)


def installed_drivers() -> dict[str, type[Driver]]:
    """Return the installed drivers of real devices, by name."""
    found = {entry.name: entry.load() for entry in metadata.entry_points(group=GROUP)}
    return {
        name: driver
        for name, driver in sorted(found.items())
        if driver.SUPPORT_LEVEL is not Support.REFERENCE
    }


def reason_of(device: Device) -> str | None:
    """Return why a device is not offered; None if it is."""
    if any(deployable.handles for deployable in device.deployables) and device.deliverable:
        return None
    return device.vendor_board_info.get(NOT_OFFERED) or device.undeliverable_reason or "no reason"


def discover(report: Report, name: str, driver: Driver) -> None:
    """Discover with a driver; print its devices, its remarks and their health."""
    begin = time.monotonic()
    measured: Mapping[str, Measurement] = {}
    try:
        devices = list(driver.discover())
        if isinstance(driver, MeasureInterface):
            measured = driver.measure(devices)
    except (CyborgError, OSError) as exc:
        report.problem(f"driver {name}: {type(exc).__name__}: {exc}")
        return
    report.devices[name] = devices
    print(f"{name}: {len(devices)} devices, {time.monotonic() - begin:.2f} s")
    for device in devices:
        counts: Counter[str] = Counter()
        for deployable in device.deployables:
            counts[deployable.resource_class] += len(deployable.handles)
        classes = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
        measurement = measured.get(device.address) or Measurement(
            device.health, device.health_reason
        )
        print(f"  {device.address}  {device.type.value}  {device.vendor}  {device.model}")
        reason = reason_of(device)
        print(f"    offered: {classes}" if reason is None else f"    not offered: {reason}")
        traits = sorted({trait for part in device.deployables for trait in part.traits})
        print(f"    traits: {' '.join(traits) or '-'}")
        print(f"    NUMA node {device.numa_node}, health {measurement.health.value}", end="")
        print(f": {measurement.reason}" if measurement.reason else "")
    for remark in getattr(driver, "remarks", ()):
        print(f"  remark: {remark}")


def print_uses(report: Report, sysfs_root: Path) -> None:
    """Print the PCI functions that the host uses."""
    report.title("Functions that the host uses")
    functions = {f.address: f for f in Sysfs(sysfs_root).pci_functions()}
    for address, reason in sorted(used_functions(sysfs_root).items()):
        function = functions.get(address)
        ids = f"{function.vendor}:{function.product}" if function else "?"
        print(f"  {address} {ids}  {reason}")
    print(f"{len(functions)} functions")


def check_open_nodes(report: Report) -> None:
    """Open each device node of an unused function: the function must be used while it is open."""
    report.title("Device nodes that a process has open")
    facts = processes.read(LOCAL_ROOT)
    print(f"open now: {json.dumps(dict(facts.programs), sort_keys=True)}")
    if facts.error is not None:
        report.problem(facts.error)
        return
    reader = ProcessReader(Sysfs(LOCAL_ROOT), facts)
    for node in reader.nodes():
        before = used_functions(LOCAL_ROOT)
        addresses = [address for address in reader.functions_of(node) if address not in before]
        # A manager of InfiniBand has an issm node open: the port would say so to its switch.
        if not addresses or not Path(node).exists() or "issm" in node:
            continue
        with subprocess.Popen(
            [sys.executable, "-c", OPEN, node], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            select.select([process.stdout], [], [], WAIT)
            time.sleep(MAX_AGE)  # of what an earlier use check has read
            during = used_functions(LOCAL_ROOT)
            process.communicate(timeout=WAIT)
        time.sleep(MAX_AGE)
        after = used_functions(LOCAL_ROOT)
        for address in addresses:
            print(f"  {address} {node}: while open: {during.get(address)}")
            if address not in during or address in after:
                report.problem(f"{address}: {node}, open {during.get(address)}, closed {after}")


def read_nvml(report: Report) -> None:
    """Print what NVML says about each GPU that it knows."""
    report.title("NVML")
    known = [function for function in Sysfs(LOCAL_ROOT).pci_functions() if is_known(function)]
    for function in known:
        facts = NvmlLibrary().read(function.address)
        if facts is None:
            report.problem(f"{function.address}: NVML does not answer, or nvidia-ml-py is missing")
        else:
            print(f"  {function.address} {json.dumps(facts.to_dict(), sort_keys=True)}")
    print(f"{len(known)} GPUs")


def compare_replay(report: Report, capture: Capture, drivers: Mapping[str, type[Driver]]) -> None:
    """Compare what the drivers find in the replay of a capture with what they found here."""
    host = ReplayedHost(capture)
    try:
        for name, devices in report.devices.items():
            options = options_for_capture(drivers[name], Sysfs(host.sysfs_root))
            replayed = host.create_driver(drivers[name], name, options).discover()
            for here, there in zip(as_json(devices), as_json(replayed), strict=False):
                for key in sorted(here):
                    if here[key] != there.get(key):
                        report.problem(f"{name} {here['address']}: {key} differs in the replay")
                        print(f"  here {here[key]}\n  there {there.get(key)}")
            if len(devices) != len(replayed):
                report.problem(f"{name}: {len(devices)} devices here, {len(replayed)} replayed")
    finally:
        host.close()


def as_json(devices: Sequence[Device]) -> list[dict[str, Any]]:
    """Return devices as a message has them."""
    found: list[dict[str, Any]] = json.loads(json.dumps([device.to_dict() for device in devices]))
    return found


def check_machine(report: Report, output: Path | None) -> None:
    """Check this machine; write its capture, without values that identify it, to ``output``."""
    drivers = installed_drivers()
    sysfs = Sysfs(LOCAL_ROOT)
    report.title("Discovery")
    for name, driver in drivers.items():
        discover(report, name, driver(name, options_for_capture(driver, sysfs)))
    print_uses(report, LOCAL_ROOT)
    check_open_nodes(report)
    read_nvml(report)
    report.title("Capture")
    capture, errors = record_host(list(drivers.values()), "tools/card-check")
    for error in errors:
        report.problem(error)
    print(f"{len(capture.folders)} folders, {len(capture.unreadable)} unreadable files")
    compare_replay(report, capture, drivers)
    if output is not None:
        size = save_capture(Scrubber(secrets.token_bytes(32)).scrub(capture), output)
        print(f"{output}: {size} bytes, scrubbed")


def check_captures(report: Report, paths: Sequence[Path]) -> None:
    """Check captures: discovery, health and use check of their replay."""
    drivers = installed_drivers()
    for path in paths:
        report.title(str(path))
        host = ReplayedHost(load_capture(path))
        try:
            for name, driver in drivers.items():
                options = options_for_capture(driver, Sysfs(host.sysfs_root))
                part = Report(problems=report.problems)
                discover(part, name, host.create_driver(driver, name, options))
                key = f"{path.stem} {name}"
                report.devices[key] = part.devices.get(name, [])
            print_uses(report, host.sysfs_root)
        finally:
            host.close()


def lines_of_machine() -> Iterator[str]:
    """Yield facts about this machine that explain a result."""
    yield f"kernel {platform.release()}, Python {platform.python_version()}, user {os.geteuid()}"
    yield f"cyborg {metadata.version('cyborg')}"
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        yield driver.read_text().splitlines()[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; return 1 if it has a problem."""
    parser = argparse.ArgumentParser(prog="tools/card-check", description=__doc__)
    parser.add_argument("captures", nargs="*", type=Path, help="captures instead of this machine")
    parser.add_argument("--output", type=Path, help="file for the capture of this machine")
    args = parser.parse_args(argv)
    begin = time.monotonic()
    report = Report()
    report.title("Machine")
    for line in lines_of_machine():
        print(line)
    try:
        if args.captures:
            check_captures(report, args.captures)
        else:
            check_machine(report, args.output)
    except (CyborgError, OSError) as exc:
        report.problem(f"{type(exc).__name__}: {exc}")
    found, offered = report.counts()
    print(
        f"\ncard-check: {found} devices, {offered} offered, {len(report.problems)} problems, "
        f"{time.monotonic() - begin:.0f} s"
    )
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
