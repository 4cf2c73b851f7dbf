# SPDX-License-Identifier: Apache-2.0
"""Policies of erasure: the key ``erase`` of a rule, and what it permits."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Driver, VolatileMemory
from cyborg.drivers.crypto.driver import CryptoDriver
from cyborg.drivers.fpga.driver import FpgaDriver
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.kernel import nvme as nvme_admin
from cyborg.drivers.kernel.nvme import (
    SANITIZE_METHODS,
    ControllerInfo,
    ErasePolicy,
    Method,
    NamespaceInfo,
    choose_method,
    find_mismatch,
    permitted_methods,
)
from cyborg.drivers.nic.driver import NicDriver
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.privileged import CONTEXT
from cyborg.drivers.privileged import nvme as privileged
from cyborg.testing.machine import HostTree
from cyborg.tests.fixtures.drivers import pci_drivers

DRIVE = "0000:01:00.0"
PRIVATE = NamespaceInfo(shared=False, format_bits=0)
CRYPTO, BLOCK, OVERWRITE, FORMAT_CRYPTO, FORMAT_ERASE = Method
METHODS = st.lists(st.sampled_from(Method), unique=True).map(tuple)


@pytest.mark.parametrize(
    ("policies", "methods"),
    [
        ("", (CRYPTO, BLOCK, OVERWRITE, FORMAT_CRYPTO, FORMAT_ERASE)),
        ("clear", (CRYPTO, BLOCK, OVERWRITE, FORMAT_CRYPTO, FORMAT_ERASE)),
        ("purge", (CRYPTO, BLOCK, OVERWRITE, FORMAT_CRYPTO)),
        ("sanitize", (CRYPTO, BLOCK, OVERWRITE)),
        ("crypto", (CRYPTO, FORMAT_CRYPTO)),
        ("block", (BLOCK,)),
        ("overwrite", (OVERWRITE,)),
        ("overwrite|crypto", (OVERWRITE, CRYPTO, FORMAT_CRYPTO)),
        ("block|clear", (BLOCK, CRYPTO, OVERWRITE, FORMAT_CRYPTO, FORMAT_ERASE)),
    ],
)
def test_permitted_methods(policies: str, methods: tuple[Method, ...]) -> None:
    parsed = [ErasePolicy(name) for name in policies.split("|") if name]
    assert permitted_methods(parsed) == methods


@pytest.mark.parametrize(
    ("permitted", "supported", "exclusive", "words"),
    [
        ((BLOCK,), (CRYPTO, BLOCK), True, None),
        (
            (BLOCK,),
            (CRYPTO,),
            True,
            "only by: sanitize, crypto erase. Permit that with erase=purge",
        ),
        ((BLOCK,), (FORMAT_ERASE,), True, "Permit that with erase=clear, or skip the device"),
        ((BLOCK,), (BLOCK, FORMAT_CRYPTO), False, "only by: format, crypto erase. Permit that wit"),
        ((BLOCK, FORMAT_ERASE), (BLOCK, FORMAT_ERASE), False, None),
        ((BLOCK,), (BLOCK,), False, "does not support Format NVM"),
        ((BLOCK,), (), True, "neither Sanitize nor Format NVM: skip the device with a rule"),
    ],
)
def test_find_mismatch(
    permitted: Sequence[Method], supported: Sequence[Method], exclusive: bool, words: str | None
) -> None:
    found = find_mismatch(permitted, supported, exclusive=exclusive)
    assert found is None if words is None else words in str(found)


@given(METHODS, st.sets(st.sampled_from(Method)), st.booleans())
def test_find_mismatch_fits_in_the_reason_of_a_device(
    permitted: tuple[Method, ...], supported: set[Method], exclusive: bool
) -> None:
    found = find_mismatch(permitted, sorted(supported), exclusive=exclusive)
    assert found is None or len(found) <= 255


@given(METHODS, st.sets(st.sampled_from(Method)), st.booleans(), st.booleans())
def test_choose_method_is_the_first_permitted_one_that_is_possible(
    permitted: tuple[Method, ...], supported: set[Method], format_all: bool, exclusive: bool
) -> None:
    methods = tuple(method for method in Method if method in supported)
    info = ControllerInfo(methods, format_all)
    possible = supported if exclusive or format_all else supported - SANITIZE_METHODS
    if not exclusive and format_all:
        possible = set()
    expected = next((method for method in permitted if method in possible), None)
    try:
        found = choose_method(info, [PRIVATE], exclusive=exclusive, permitted=permitted)
    except DriverFailed:
        assert expected is None
    else:
        assert found is expected


@pytest.mark.parametrize("driver", [CryptoDriver, FpgaDriver, GenericDriver, GpuDriver, NicDriver])
def test_other_drivers_refuse_the_key(driver: type[Driver], tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=rf"\[a\] devices: .* driver {driver.name} does not"):
        driver("a", {"devices": ["address=*,erase=purge"]}, tmp_path)


def test_rule_of_mediated_devices_refuses_the_key(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="no erase in a rule for mediated devices"):
        GpuDriver("a", {"mdev_types": ["address=*,type=a,erase=purge"]}, tmp_path)


def test_only_the_help_of_nvme_shows_the_key() -> None:
    shown = {
        name
        for name, driver in pci_drivers().items()
        if any("The key erase" in option.help for option in driver.OPTIONS)
    }
    assert shown == {"nvme"}


class Host:
    """A host with a drive whose methods can be read."""

    def __init__(self, folder: Path) -> None:
        self.tree = HostTree(folder)
        self.tree.add_function(DRIVE, "144d", "a80a", "010802", kernel_driver="nvme", totalvfs=2)
        self.tree.add_disk("nvme0n1", f"pci0000:00/{DRIVE}/nvme/nvme0")
        self.controller = self.tree.root / f"devices/pci0000:00/{DRIVE}/nvme/nvme0"
        self.supported: tuple[Method, ...] | None = (BLOCK, FORMAT_ERASE)
        self.reads: list[Path] = []
        self.erased: list[Sequence[str]] = []
        self.memory = VolatileMemory()
        self.write(state="live", serial="S4", model="Drive", firmware_rev="2.0", dev="240:0")

    def write(self, **values: str) -> None:
        """Write files of the controller."""
        for name, value in values.items():
            (self.controller / name).write_text(f"{value}\n")

    def make_driver(self, *rules: str) -> NvmeDriver:
        """Return a driver as a new agent process makes it."""

        def erase(address: str, timeout: float, methods: Sequence[str]) -> Mapping[str, Any]:
            self.erased.append(methods)
            return {"method": methods[0], "namespaces": 1, "samples": 16}

        def read(node: Path, number: str | None) -> tuple[Method, ...] | None:
            assert number == "240:0"
            self.reads.append(node)
            return self.supported

        options = {"devices": rules, "check_iommu": False}
        access = replace(HostAccess.of(self.tree.root), erase=erase, read_methods=read)
        driver = NvmeDriver("drives", options, self.tree.root, access)
        driver.memory = self.memory
        return driver

    def find_reason(self, *rules: str) -> str | None:
        """Return why the drive is not scheduled."""
        (device,) = self.make_driver(*rules).discover()
        assert device.deliverable is (device.undeliverable_reason is None)
        return device.undeliverable_reason


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_drive_without_a_permitted_method_is_not_scheduled(host: Host) -> None:
    assert host.find_reason("address=*,erase=crypto") == (
        "its rule permits only: sanitize, crypto erase; format, crypto erase. The controller can "
        "be erased only by: sanitize, block erase; format, user data erase. Permit that with "
        "erase=purge, or skip the device"
    )
    for policy in ("block", "purge", "clear", "crypto|block"):
        assert host.find_reason(f"address=*,erase={policy}") is None
    assert host.reads == [Path("/dev/nvme0")], "the first answer is stored"


def test_drive_without_a_policy_is_not_read(host: Host) -> None:
    host.supported = ()
    assert host.find_reason("address=*") is None
    assert host.reads == []


def test_drive_whose_methods_cannot_be_read_is_scheduled(host: Host) -> None:
    host.supported = None
    assert host.find_reason("address=*,erase=crypto") is None
    host.supported = ()
    assert "neither Sanitize nor Format" in (host.find_reason("address=*,erase=crypto") or "")


def test_methods_are_read_again_for_another_drive_or_firmware(host: Host) -> None:
    host.find_reason("address=*,erase=crypto")
    host.supported = (CRYPTO,)
    host.write(firmware_rev="3.0")
    assert host.find_reason("address=*,erase=crypto") is None
    host.supported = None
    host.write(serial="S5")
    assert host.find_reason("address=*,erase=block") is None


def test_methods_are_known_while_the_controller_is_not_bound_to_nvme(host: Host) -> None:
    host.find_reason("address=*,erase=crypto")
    host.write(state="resetting")
    host.supported = (CRYPTO,)
    assert "only by: sanitize, block erase" in (host.find_reason("address=*,erase=crypto") or "")
    assert len(host.reads) == 1


@pytest.mark.parametrize("text", ["", "x", "144d:a80a\n", "144d:a80a\nS4 Drive 2.0\nshred", "a\nb"])
def test_damaged_memory_permits_nothing_wrong(host: Host, text: str) -> None:
    host.memory.put(f"methods {DRIVE}", text)
    host.write(serial="S5")
    assert "sanitize, block erase" in (host.find_reason("address=*,erase=crypto") or "")


def test_drive_of_the_host_is_not_read(host: Host) -> None:
    host.tree.mount("nvme0n1", "/")
    host.make_driver("address=*,erase=crypto").discover()
    assert host.reads == []


def test_virtual_function_is_never_sanitised(host: Host) -> None:
    host.tree.enable_virtual_functions(DRIVE, 1, "a80a", "010802")
    host.supported = None
    reason = host.find_reason("address=*,erase=sanitize")
    assert "only by: format, crypto erase; format, user data erase" in (reason or "")
    assert host.find_reason("address=*,erase=purge") is None


def test_sanitise_uses_the_policy_of_the_rule_and_logs_it(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    item = WorkItem("drives", DRIVE, DRIVE, DRIVE)
    host.make_driver("vendor=8086,erase=crypto", "address=*,erase=block|purge").sanitise(item)
    host.make_driver("address=*").sanitise(item)
    host.make_driver().sanitise(item)
    every = [method.value for method in Method]
    assert host.erased == [
        [BLOCK.value, CRYPTO.value, OVERWRITE.value, FORMAT_CRYPTO.value],
        every,
        every,
    ]
    assert "by sanitize, block erase (policy erase=block|purge), verified" in caplog.text
    assert "by sanitize, crypto erase (no policy), verified" in caplog.text


@pytest.mark.parametrize(
    "methods",
    [
        (),
        "sanitize, block erase",
        ["shred"],
        [BLOCK.value, "shred"],
        [BLOCK.value, BLOCK.value],
        [2],
        ["SANITIZE_BLOCK"],
    ],
)
def test_privileged_erase_with_other_methods_fails(methods: Any) -> None:
    CONTEXT.set_client_mode(False)
    try:
        with pytest.raises(DriverFailed, match="methods of erasure: found"):
            privileged.erase("0000:99:00.0", 60.0, methods)
    finally:
        CONTEXT.set_client_mode(True)


def test_read_methods_of_another_device_is_unknown(tmp_path: Path) -> None:
    null = Path("/dev/null")
    number = os.stat(null).st_rdev
    shown = f"{os.major(number)}:{os.minor(number)}"
    assert nvme_admin.read_methods(tmp_path / "nvme0", "240:0") is None
    assert nvme_admin.read_methods(null, "240:0") is None
    assert nvme_admin.read_methods(null, None) is None
    assert nvme_admin.read_methods(null, shown) is None, "it knows no admin commands"
