# SPDX-License-Identifier: Apache-2.0
"""Resets of PCI functions on simulated hosts; the lab resets a function of a real kernel."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.jobs.executor import execute
from cyborg.core.errors import DriverFailed, Invalid, Misconfigured
from cyborg.core.inventory.device import Ability
from cyborg.core.jobs.job import JobKind, JobSpec, WorkItem
from cyborg.drivers.crypto.driver import CryptoDriver
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.drivers.pci.driver import PciDriver
from cyborg.drivers.pci.reset import ResetPolicy, Resetter
from cyborg.drivers.privileged import CONTEXT, pci
from cyborg.testing.conformance.kit import Outcome, run_rules
from cyborg.testing.machine import HostTree

FREE, CARD, BOUND = "0000:3d:00.0", "0000:3e:00.0", "0000:3f:00.0"
UNTOUCHED, RESET = "\n", "1"


class Host:
    """A simulated host; ``reset`` of a function is a file, so a write can be read."""

    def __init__(self, folder: Path) -> None:
        self.tree = HostTree(folder)
        self.tree.add_function(FREE, iommu_group="1")
        self.tree.add_function(CARD, kernel_driver="vfio-pci", iommu_group="2")
        self.tree.add_function(BOUND, kernel_driver="c6xx", iommu_group="3")
        for address in (FREE, CARD, BOUND):
            (self.tree.bus / address / "reset_method").write_text("flr bus\n")
        self.groups = folder / "dev/vfio"
        self.groups.mkdir(parents=True)
        (self.groups / "2").touch()

    def written(self, address: str) -> str:
        return (self.tree.bus / address / "reset").read_text().rstrip("\n") or "\n"

    def fail_reset(self, address: str) -> None:
        """Let each write fail, as that of a function that does not answer."""
        path = self.tree.bus / address / "reset"
        path.unlink()
        path.symlink_to("/dev/full")

    def disable_methods(self, address: str) -> None:
        (self.tree.bus / address / "reset_method").write_text("\n")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host(tmp_path)
    monkeypatch.setattr(pci, "_SYS", found.tree.root)
    monkeypatch.setattr(pci, "_DEV", tmp_path / "dev")
    monkeypatch.setattr(CONTEXT, "client_mode", False)
    return found


class ResettingDriver(GenericDriver):
    """The generic driver with the privileged function in this process."""

    def __init__(
        self, backend: str, options: Mapping[str, Any], sysfs_root: str | Path = "/sys"
    ) -> None:
        super().__init__(backend, options, sysfs_root)
        self._resetter = Resetter(self, pci.reset)


def make_driver(host: Host, reset: str) -> ResettingDriver:
    return ResettingDriver("cards", {"devices": ["vendor=8086"], "reset": reset}, host.tree.root)


def item(address: str) -> WorkItem:
    return WorkItem("cards", address, address, address)


@pytest.mark.parametrize("driver", [GenericDriver, CryptoDriver, GpuDriver])
def test_abilities_sanitises_only_with_resets(driver: type[PciDriver], host: Host) -> None:
    """The memory of a GPU has data of a server, so its default is to require a reset."""
    root = host.tree.root
    by_default = Ability.SANITISES in driver("cards", {}, root).abilities
    assert by_default is (driver is GpuDriver)
    assert Ability.SANITISES not in driver("cards", {"reset": "never"}, root).abilities
    for reset in ("if_possible", "required"):
        assert Ability.SANITISES in driver("cards", {"reset": reset}, root).abilities


def test_nvme_driver_has_no_option_reset(host: Host) -> None:
    assert "reset" not in {option.name for option in NvmeDriver.OPTIONS}
    assert Ability.SANITISES in NvmeDriver("drives", {}, host.tree.root).abilities


def test_option_with_unknown_value_is_refused(host: Host) -> None:
    with pytest.raises(Misconfigured, match="one of never, if_possible, required"):
        make_driver(host, "always")


@pytest.mark.parametrize("policy", ["if_possible", "required"])
@pytest.mark.parametrize("address", [FREE, CARD])
def test_sanitise_resets_function_once(host: Host, policy: str, address: str) -> None:
    make_driver(host, policy).sanitise(item(address))
    assert host.written(address) == RESET
    assert host.written(FREE if address == CARD else CARD) == UNTOUCHED


def test_sanitise_never_resets_nothing(host: Host) -> None:
    make_driver(host, "never").sanitise(item(FREE))
    assert host.written(FREE) == UNTOUCHED


@pytest.mark.parametrize("policy", ["if_possible", "required"])
def test_sanitise_missing_function_or_other_handle_succeeds(host: Host, policy: str) -> None:
    driver = make_driver(host, policy)
    driver.sanitise(item("0000:77:00.0"))
    driver.sanitise(item(f"{FREE}/nvidia-222/0"))
    assert host.written(FREE) == UNTOUCHED


def mount(host: Host) -> str:
    host.tree.add_disk("sda", f"pci0000:00/{FREE}", [])
    host.tree.mount("sda", "/data")
    return FREE


def remove_methods(host: Host) -> str:
    host.disable_methods(FREE)
    return FREE


def enable_functions(host: Host) -> str:
    (host.tree.bus / FREE / "sriov_totalvfs").write_text("4\n")
    host.tree.enable_virtual_functions(FREE, 1)
    return FREE


OBSTACLES = {
    mount: "the host uses it: sda holds the file system /data",
    remove_methods: "the kernel has no method to reset it",
    enable_functions: "a reset would remove its virtual functions",
    lambda host: BOUND: "it cannot be reset while it is bound to the kernel driver c6xx",
}


@pytest.mark.parametrize(("prepare", "reason"), OBSTACLES.items())
def test_sanitise_function_with_obstacle(host: Host, prepare: Any, reason: str) -> None:
    """It is left as it is, or stays unavailable; the privileged function refuses it too."""
    address = prepare(host)
    make_driver(host, "if_possible").sanitise(item(address))
    with pytest.raises(DriverFailed, match=f"{address} cannot be reset: {reason}"):
        make_driver(host, "required").sanitise(item(address))
    with pytest.raises(DriverFailed, match=f"{address} cannot be reset: {reason}"):
        pci.reset(address)
    assert host.written(address) == UNTOUCHED


@pytest.mark.parametrize("policy", ["if_possible", "required"])
def test_sanitise_failed_reset_keeps_handle_unavailable(host: Host, policy: str) -> None:
    host.fail_reset(FREE)
    with pytest.raises(DriverFailed, match=rf"{FREE} could not be reset: .*\(flr bus\)"):
        make_driver(host, policy).sanitise(item(FREE))


def test_sanitise_function_of_a_running_server_fails(host: Host) -> None:
    """The kernel opens a group once, so it cannot be opened while QEMU has it."""
    (host.groups / "2").unlink()
    (host.groups / "2").mkdir()  # cannot be opened for writing
    with pytest.raises(DriverFailed, match=f"{CARD} may still be used by a process"):
        make_driver(host, "if_possible").sanitise(item(CARD))
    (host.tree.bus / CARD / "iommu_group").unlink()
    with pytest.raises(DriverFailed, match="has no IOMMU group"):
        make_driver(host, "if_possible").sanitise(item(CARD))
    assert host.written(CARD) == UNTOUCHED


def test_sanitise_on_other_sysfs_resets_nothing(host: Host) -> None:
    driver = GenericDriver("cards", {"reset": "required"}, host.tree.root)
    with pytest.raises(DriverFailed, match="not a device of this host"):
        driver.sanitise(item(FREE))
    assert host.written(FREE) == UNTOUCHED


@pytest.mark.parametrize("address", ["", "..", "0000:3d:00.0/..", "0000:3d:00.0\n", "3d:00"])
def test_privileged_reset_refuses_other_text_than_an_address(host: Host, address: str) -> None:
    with pytest.raises(Invalid):
        pci.reset(address)
    assert host.written(FREE) == UNTOUCHED


def test_privileged_reset_of_missing_function_is_none(host: Host) -> None:
    assert pci.reset("0000:77:00.0") is None
    assert pci.reset(FREE) == "flr bus"


def test_discover_required_withholds_what_cannot_be_reset(host: Host) -> None:
    host.disable_methods(FREE)
    found = {device.address: device for device in make_driver(host, "required").discover()}
    assert {a for a, device in found.items() if device.deliverable} == {CARD}
    assert "no method to reset it: enable one" in str(found[FREE].undeliverable_reason)
    assert "bind it to vfio-pci at boot" in str(found[BOUND].undeliverable_reason)
    assert all(device.deployables for device in found.values()), "their providers stay"


@pytest.mark.parametrize(
    ("methods", "neighbour", "can_reset"),
    [
        ("bus", "0000:3d:00.1", False),
        ("cxl_bus bus", "0000:3d:01.0", False),
        ("flr bus", "0000:3d:00.1", True),
        ("bus", "0000:40:00.0", True),
    ],
)
def test_discover_required_withholds_what_can_only_be_reset_with_others(
    host: Host, methods: str, neighbour: str, can_reset: bool
) -> None:
    """Such as a GPU with an audio function."""
    host.tree.add_function(neighbour, "10de", "10f9", "040300", iommu_group="9")
    (host.tree.bus / FREE / "reset_method").write_text(f"{methods}\n")
    found = {device.address: device for device in make_driver(host, "required").discover()}
    assert found[FREE].deliverable is can_reset
    assert can_reset or neighbour in str(found[FREE].undeliverable_reason)


@pytest.mark.parametrize("policy", ["never", "if_possible"])
def test_discover_otherwise_offers_what_cannot_be_reset(host: Host, policy: str) -> None:
    host.disable_methods(FREE)
    driver = make_driver(host, policy)
    assert [device.address for device in driver.discover() if device.deliverable] == [
        FREE,
        CARD,
        BOUND,
    ]
    assert driver.remarks[-1].startswith(f"the kernel has no method to reset {FREE}")


@pytest.mark.parametrize("policy", list(ResetPolicy))
def test_generic_driver_with_resets_passes_all_rules(host: Host, policy: str) -> None:
    results = run_rules(
        ResettingDriver,
        {"devices": ("vendor=8086",), "reset": policy},
        sysfs_root=host.tree.root,
        allow=[str(host.tree.root)],
        work=True,
        entry_point="generic",
    )
    outcomes = {result.rule.name: (result.outcome, result.reason) for result in results}
    failed = {n: r for n, r in outcomes.items() if r[0] in (Outcome.FAILED, Outcome.BLOCKED)}
    # The class of a test module imports more than a driver may.
    assert set(failed) <= {"imports_only_core_and_drivers"}
    expected = Outcome.SKIPPED if policy == "never" else Outcome.PASSED
    assert outcomes["sanitise_is_idempotent"][0] is expected


def test_release_job_fails_for_the_function_whose_reset_fails(host: Host) -> None:
    """The neighbour is reset; the conductor keeps the handle and requests the job again."""
    drivers = {"cards": make_driver(host, "if_possible")}
    spec = JobSpec("j", JobKind.RELEASE, (item(FREE), item(CARD)), 30.0)
    host.fail_reset(FREE)
    error = execute(spec, drivers)
    assert str(error).startswith(f"release of {FREE}: ")
    assert f"{FREE} could not be reset: " in str(error)
    assert CARD not in str(error)
    assert host.written(CARD) == RESET
    (host.tree.bus / FREE / "reset").unlink()
    (host.tree.bus / FREE / "reset").write_text("\n")
    assert execute(spec, drivers) is None
    assert host.written(FREE) == RESET
