# SPDX-License-Identifier: Apache-2.0
"""PCI functions of domains of libvirt: the XML, the file of a tree, and what a driver refuses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.jobs.job import WorkItem
from cyborg.core.wire.board_info import NOT_OFFERED
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.host_use import domains
from cyborg.drivers.host_use.domains import DomainFacts
from cyborg.drivers.nvme import NvmeDriver
from cyborg.drivers.replay.recorder import Recorder
from cyborg.drivers.sysfs import LOCAL_ROOT, observed_by
from cyborg.testing.host_tree import HostTree

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
    used = domains.find_used(host.root, domains.read_nothing, [A, B])
    assert set(used) == {A, B}
    assert used[A].startswith("a domain of libvirt may have it: proc/libvirt_domains.json: ")


def test_tree_without_file_has_no_domain(host: HostTree) -> None:
    (host.proc / "libvirt_domains.json").unlink()
    assert domains.read(host.root, lambda: DomainFacts({A: "guest1"})) == DomainFacts()


def test_capture_has_the_functions_without_the_names_of_domains() -> None:
    recorder = Recorder(Path("/"))
    facts = DomainFacts({A: "payroll", B: "payroll", "0000:03:00.0": "accounts"})
    with observed_by(recorder):
        assert domains.read(LOCAL_ROOT, lambda: facts) == facts
    recorded: Mapping[str, Any] = json.loads(
        recorder.folders["proc"].files["libvirt_domains.json"] or b""
    )
    assert recorded == {
        "users": {A: "domain2", B: "domain2", "0000:03:00.0": "domain1"},
        "error": None,
    }


def test_reason_has_a_printable_short_name(host: HostTree) -> None:
    host.give_to_domain(A, "a\tb" + "c" * 500)
    (reason,) = domains.find_used(host.root, domains.read_nothing, [A]).values()
    assert reason == f"it is used by the domain a b{'c' * 97} of libvirt"


def test_driver_passes_its_reader_on(monkeypatch: pytest.MonkeyPatch, host: HostTree) -> None:
    """The facts of the agent count on this host, which the tree here stands for."""
    monkeypatch.setattr(domains, "LOCAL_ROOT", host.root)
    driver = GenericDriver("g", {"devices": ["address=*"], "check_iommu": False}, host.root)
    driver.read_domains = lambda: DomainFacts({B: "guest1"})
    reasons = {d.address: d.vendor_board_info.get(NOT_OFFERED) for d in driver.discover()}
    assert reasons == {A: None, B: "it is used by the domain guest1 of libvirt"}


def test_drive_of_a_domain_is_not_erased(host: HostTree) -> None:
    erased: list[str] = []

    def erase(address: str, seconds: float, methods: Sequence[str]) -> Mapping[str, Any]:
        erased.append(address)
        return {"method": None}

    driver = NvmeDriver("n", {"devices": ["class=0108"]}, host.root, erase=erase)
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
    driver = GenericDriver("g", options, host.root)
    driver.set_reset(reset)
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
    driver = GenericDriver(
        "g",
        {"devices": ["class=02"], "vf_counts": ["4"]},
        host.root,
        set_count=lambda address, count, *_: counts.append(count),
    )
    driver.discover()
    host.give_to_domain(virtual[1], "guest1")
    with pytest.raises(DriverFailed, match=f"{virtual[1]} cannot be changed now: it is used"):
        driver.partition(WorkItem("g", B, ""), "vfs-4")
    assert counts == []
    host.give_to_domain(virtual[1], None)
    driver.partition(WorkItem("g", B, ""), "vfs-4")
    assert counts == [4]
