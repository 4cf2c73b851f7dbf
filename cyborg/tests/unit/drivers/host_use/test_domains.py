# SPDX-License-Identifier: Apache-2.0
"""PCI functions of domains of libvirt: the XML, the file of a tree, and what a driver refuses."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.host_use import domains
from cyborg.drivers.host_use.domains import DomainFacts
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.replay.recorder import Recorder
from cyborg.drivers.sysfs import LOCAL_ROOT, Sysfs, observed_by
from cyborg.testing.machine import HostTree

A, B = "0000:01:00.0", "0000:02:00.0"
ADDRESS = "<address domain='0x0000' bus='0x01' slot='0x00' function='0x{}'/>"


def xml(devices: str) -> str:
    return f"<domain type='kvm'><name>guest1</name><devices>{devices}</devices></domain>"


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (
            "<hostdev mode='subsystem' type='pci' managed='yes'><driver name='vfio'/>"
            f"<source>{ADDRESS.format(1)}</source><address type='pci' domain='0x0000' bus='0x06' "
            "slot='0x00' function='0x0'/></hostdev>",
            {"0000:01:00.1"},
        ),
        (
            "<interface type='hostdev' managed='yes'><mac address='52:54:00:6d:90:02'/><source>"
            "<address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x2'/></source>"
            "</interface>",
            {"0000:01:00.2"},
        ),
        (
            "<disk type='nvme' device='disk'><source type='pci' managed='yes' namespace='1'>"
            f"{ADDRESS.format(0)}</source><target dev='vda'/></disk>",
            {A},
        ),
        ("<hostdev type='pci'><source><address bus='2' slot='0'/></source></hostdev>", {B}),
        (
            "<hostdev mode='subsystem' type='pci'><source>"
            "<address domain='0x10000' bus='0x01' slot='0x1f' function='0x7'/></source></hostdev>",
            {"10000:01:1f.7"},
        ),
        (
            "<hostdev mode='subsystem' type='usb'><source><address bus='1' device='2'/></source>"
            "</hostdev>",
            set(),
        ),
        (
            "<hostdev mode='subsystem' type='mdev' model='vfio-pci'><source>"
            "<address uuid='c2177883-f1bb-47f0-914d-32a22e3a8804'/></source></hostdev>",
            set(),
        ),
        ("<interface type='network'><source network='pool'/></interface>", set()),
        ("<hostdev type='pci'><source><address bus='0x1ff'/></source></hostdev>", set()),
        ("<hostdev type='pci'><source><address bus='one'/></source></hostdev>", set()),
        ("<hostdev type='pci'/>", set()),
    ],
    ids=[
        *("hostdev", "interface", "nvme disk", "decimal", "VMD", "USB", "mdev"),
        *("pool", "out of range", "no number", "no address"),
    ],
)
def test_parse_functions(devices: str, expected: set[str]) -> None:
    assert domains.parse_functions(xml(devices)) == expected


@pytest.mark.parametrize("text", ["", "<domain>", "\x00", "<?xml encoding='x'?><domain/>"])
def test_parse_functions_malformed_xml(text: str) -> None:
    with pytest.raises(ValueError, match="no XML"):
        domains.parse_functions(text)


class Reader:
    """A reader of this host that counts the fresh reads."""

    def __init__(self, facts: DomainFacts) -> None:
        self.facts = facts
        self.fresh = 0

    def __call__(self, *, fresh: bool = False) -> DomainFacts:
        """Return the facts."""
        self.fresh += fresh
        return self.facts


@pytest.fixture
def host(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.add_function(A, "144d", "a80a", "010802", kernel_driver="vfio-pci")
    tree.add_function(B, "8086", "1572", "020000", kernel_driver="vfio-pci", totalvfs=4)
    return tree


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"users": []}', '{"users": {"a": 1}}', '{"error": 1}', '{"x": 1}']
)
def test_malformed_file_of_a_tree_counts_as_used(host: HostTree, content: str) -> None:
    (host.proc / "libvirt_domains.json").write_text(content)
    used = domains.find_used(host.root, domains.read_nothing, Sysfs(host.root).pci_functions())
    assert set(used) == {A, B}
    assert used[A].startswith("a domain of libvirt may have it: proc/libvirt_domains.json: ")


def test_tree_without_file_has_no_domain(host: HostTree) -> None:
    (host.proc / "libvirt_domains.json").unlink()
    assert domains.read(host.root, Reader(DomainFacts({A: "guest1"}))) == DomainFacts()


def test_capture_has_the_functions_without_the_names_of_domains() -> None:
    recorder = Recorder(Path("/"))
    facts = DomainFacts({A: "payroll", B: "payroll", "0000:03:00.0": "accounts"})
    with observed_by(recorder):
        assert domains.read(LOCAL_ROOT, Reader(facts)) == facts
    recorded: Mapping[str, Any] = json.loads(
        recorder.folders["proc"].files["libvirt_domains.json"] or b""
    )
    assert recorded == {
        "users": {A: "domain2", B: "domain2", "0000:03:00.0": "domain1"},
        "error": None,
    }


def test_reason_has_a_printable_short_name(host: HostTree) -> None:
    host.give_to_domain(A, "a\tb" + "c" * 500)
    (reason,) = domains.find_used(host.root, domains.read_nothing, ()).values()
    assert reason == f"it is used by the domain a b{'c' * 97} of libvirt"


def test_driver_passes_its_reader_on(monkeypatch: pytest.MonkeyPatch, host: HostTree) -> None:
    """The facts of the agent count on this host, which the tree here stands for."""
    monkeypatch.setattr(domains, "LOCAL_ROOT", host.root)
    driver = GenericDriver("g", {"devices": ["address=*"], "check_iommu": False}, host.root)
    driver.read_domains = Reader(DomainFacts({B: "guest1"}, remarks=("libvirt is away",)))
    reasons = {d.address: d.vendor_board_info.get(NOT_OFFERED) for d in driver.discover()}
    assert reasons == {A: None, B: "it is used by the domain guest1 of libvirt"}
    assert driver.remarks == ("libvirt is away",)


def test_drive_of_a_domain_is_not_erased(host: HostTree) -> None:
    erased: list[str] = []

    def erase(address: str, seconds: float, methods: Sequence[str]) -> Mapping[str, Any]:
        erased.append(address)
        return {"method": None}

    access = replace(HostAccess.of(host.root), erase=erase)
    driver = NvmeDriver("n", {"devices": ["class=0108"]}, host.root, access)
    item = WorkItem("n", A, A, A)
    host.give_to_domain(A, "guest1")
    with pytest.raises(DriverFailed, match=f"{A} cannot be changed now: .* domain guest1 of lib"):
        driver.sanitise(item)
    host.give_to_domain(A, None)
    driver.sanitise(item)
    assert erased == [A]


def test_function_of_a_domain_is_not_reset(host: HostTree) -> None:
    done: list[str] = []

    def reset(address: str) -> str:
        done.append(address)
        return "flr"

    options = {"devices": ["class=02"], "reset": "required"}
    access = replace(HostAccess.of(host.root), reset=reset)
    driver = GenericDriver("g", options, host.root, access)
    (host.bus / B / "reset").write_text("")
    host.give_to_domain(B, "guest1")
    with pytest.raises(DriverFailed, match="it is used by the domain guest1 of libvirt"):
        driver.sanitise(WorkItem("g", B, B, B))
    host.give_to_domain(B, None)
    driver.sanitise(WorkItem("g", B, B, B))
    assert done == [B]


def test_card_keeps_the_virtual_functions_that_a_stopped_domain_has(host: HostTree) -> None:
    virtual = host.enable_virtual_functions(B, 2, class_code="020000")
    counts: list[int] = []
    access = replace(
        HostAccess.of(host.root), set_count=lambda address, count, *_: counts.append(count)
    )
    options = {"devices": ["class=02"], "vf_counts": ["4"]}
    driver = GenericDriver("g", options, host.root, access)
    driver.discover()
    host.give_to_domain(virtual[1], "guest1")
    with pytest.raises(DriverFailed, match=f"{virtual[1]} cannot be changed now: it is used"):
        driver.partition(WorkItem("g", B, ""), "vfs-4")
    assert counts == []
    host.give_to_domain(virtual[1], None)
    driver.partition(WorkItem("g", B, ""), "vfs-4")
    assert counts == [4]


def test_virtual_functions_of_a_card_that_a_domain_has_are_not_offered(host: HostTree) -> None:
    virtual = host.enable_virtual_functions(B, 2, class_code="020000")
    driver = GenericDriver("g", {"devices": ["class=02"], "check_iommu": False}, host.root)
    host.give_to_domain(B, "guest1")
    (card,) = driver.discover()
    assert card.vendor_board_info[NOT_OFFERED] == (
        f"{virtual[0]}, {virtual[1]}: its physical function {B} is used by the domain guest1 of "
        "libvirt"
    )
    with pytest.raises(DriverFailed, match=f"its physical function {B} is used by"):
        driver.check_unused(virtual[0])
    host.give_to_domain(B, None)
    (card,) = driver.discover()
    assert len(card.deployables[0].handles) == 2


def test_function_in_the_group_of_a_domain_cannot_be_attached(host: HostTree) -> None:
    other = "0000:03:00.0"
    host.add_function(other, "8086", "1572", "020000", kernel_driver="vfio-pci", iommu_group="7")
    for address in (A, B):
        link = host.bus / address / "iommu_group"
        link.unlink()
        link.symlink_to("../../../kernel/iommu_groups/7")
    driver = GenericDriver("g", {"devices": [f"address={B}", f"address={other}"]}, host.root)
    host.give_to_domain(A, "guest1")
    host.give_to_domain(B, "guest1")
    device = driver.discover()[1]
    assert (device.address, device.deliverable) == (other, False)
    assert device.undeliverable_reason == (
        f"it shares IOMMU group 7 with {A} (vfio-pci, used by a domain of libvirt), {B} (vfio-pci, "
        "used by a domain of libvirt): take these from the domain, or use a slot with ACS"
    )
    host.give_to_domain(A, None)
    host.give_to_domain(B, None)
    host.remove_function(B)
    assert driver.discover()[0].deliverable


def test_checks_before_host_work_read_now(host: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domains, "LOCAL_ROOT", host.root)
    (host.bus / B / "reset").write_text("")
    read = Reader(DomainFacts())
    access = replace(HostAccess.of(host.root), reset=lambda address: "flr")
    options = {"devices": ["class=02"], "reset": "required"}
    driver = GenericDriver("g", options, host.root, access)
    driver.read_domains = read
    driver.discover()
    assert read.fresh == 0
    driver.sanitise(WorkItem("g", B, B, B))
    assert read.fresh == 1
    driver.check_unused(B)
    assert read.fresh == 2
    domains.check_unused(Sysfs(host.root), read, B)
    assert read.fresh == 3
    gpus = GpuDriver("g", {"devices": ["class=03"]}, host.root)
    gpus.read_domains = read
    gpus.check_unused(B)
    assert read.fresh == 4
