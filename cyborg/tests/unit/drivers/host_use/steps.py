# SPDX-License-Identifier: Apache-2.0
"""What the uses of functions by a host are made of: functions, steps and their values."""

from collections.abc import Callable
from dataclasses import dataclass

from cyborg.testing.machine import HostTree

# The function that the host uses; its interface is eth0, or its disk is nvme0n1 or sda.
A = "0000:01:00.0"

Step = Callable[[HostTree], object]
FOLDER = f"pci0000:01/{A}"


@dataclass(frozen=True, slots=True)
class Use:
    """A use: ``add`` creates the function, unused; ``begin`` and ``end`` are those of the use.

    ``reason`` is what operators read. ``end`` is None for what a function is.
    """

    name: str
    reason: str
    add: Step
    begin: Step
    end: Step | None


def make_function(vendor: str, product: str, class_code: str, driver: str | None = None) -> Step:
    """Return the step that adds a function."""
    return lambda host: host.add_function(
        A, vendor, product, class_code, kernel_driver=driver, parent="pci0000:01"
    )


def add_nic(host: HostTree) -> None:
    """Add a network card; its interface is down."""
    make_function("8086", "1572", "020000", "i40e")(host)
    host.add_interface("eth0", A)
    set_up(host, "eth0", False)


def add_drive(host: HostTree) -> None:
    """Add an empty NVMe drive."""
    make_function("144d", "a80a", "010802", "nvme")(host)
    host.add_disk("nvme0n1", f"{FOLDER}/nvme/nvme0")


def add_hba(host: HostTree) -> None:
    """Add a host bus adapter with an empty disk."""
    make_function("1000", "0097", "010700", "mpt3sas")(host)
    host.add_disk("sda", f"{FOLDER}/host0/target0:0:0/0:0:0:0/block")


def set_up(host: HostTree, name: str, up: bool) -> None:
    """Set an interface up or down."""
    (host.root / "class/net" / name / "flags").write_text("0x1003\n" if up else "0x1002\n")


def write(path: str, text: str) -> Step:
    """Return the step that writes a file of sysfs."""

    def write(host: HostTree) -> None:
        file = host.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    return write


def file_use(name: str, reason: str, add: Step, path: str, on: str, off: str) -> Use:
    """Return a use that the contents of a file show."""
    return Use(name, reason, add, write(path, on), write(path, off))
