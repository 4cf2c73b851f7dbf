# SPDX-License-Identifier: Apache-2.0
"""Signatures on disks: from records of udev, from the disk itself, from a tree."""

from pathlib import Path

import pytest

from cyborg.drivers.host_use import signatures
from cyborg.drivers.host_use.signatures import DiskContents, SignatureFacts
from cyborg.drivers.sysfs import Sysfs
from cyborg.testing.machine import HostTree
from cyborg.tests.fixtures.hosts import disk_contents

A, B = "0000:01:00.0", "0000:02:00.0"
MIB = 1 << 20


@pytest.fixture
def host(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.add_function(A, "144d", "a80a", "010802", kernel_driver="nvme")
    tree.add_function(B, "1000", "005d", "010700", kernel_driver="megaraid_sas")
    tree.add_disk("nvme0n1", f"pci0000:00/{A}/nvme/nvme0")
    for name in ("sda", "sdb"):
        tree.add_disk(name, f"pci0000:00/{B}/host0/{name}/block")
    return tree


def test_whole_disks_are_neither_partitions_nor_volumes(host: HostTree) -> None:
    host.add_disk("nvme1n1", "virtual/nvme-subsystem/nvme-subsys0", ["nvme1n1p1"])
    host.add_disk("dm-0", "virtual/block", slaves=["sda"])
    host.add_disk("loop0", "virtual/block")
    sysfs = Sysfs(host.root)
    assert list(signatures.whole_disks(sysfs)) == ["nvme0n1", "nvme1n1", "sda", "sdb"]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ("E:ID_FS_TYPE=ext4\nE:ID_FS_USAGE=filesystem", "a file system (ext4)"),
        ("E:ID_FS_TYPE=vfat\nE:ID_FS_USAGE=filesystem\nE:ID_PART_TABLE_TYPE=dos", "(vfat)"),
        ("E:ID_FS_TYPE=LVM2_member\nE:ID_FS_USAGE=raid", "a part of a volume (LVM2_member)"),
        ("E:ID_FS_TYPE=zfs_member\nE:ID_FS_USAGE=filesystem", "a file system (zfs_member)"),
        ("E:ID_FS_TYPE=ceph_bluestore\nE:ID_FS_USAGE=other", "data (ceph_bluestore)"),
        ("E:ID_FS_TYPE=crypto_LUKS\nE:ID_FS_USAGE=crypto", "encrypted data (crypto_LUKS)"),
        ("E:ID_FS_TYPE=mpath_member", "data (mpath_member)"),
        ("E:ID_PART_TABLE_TYPE=gpt", "a partition table (gpt)"),
        ("E:ID_FS_AMBIVALENT=other:swap filesystem:xfs", "data of other:swap filesystem:xfs"),
        ("S:disk/by-id/nvme-X\nE:ID_MODEL=X\nG:systemd", None),
        ("", None),
    ],
)
def test_read_local_record_of_udev(
    host: HostTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str, text: str | None
) -> None:
    number = (host.root / "class/block/nvme0n1/dev").read_text().strip()
    for name in ("sda", "sdb"):
        (host.root / f"class/block/{name}/size").write_text("0\n")
        (host.root / f"class/block/{name}/removable").write_text("1\n")  # no medium
    (host.root / "class/block/nvme0n1/size").write_text("2048\n")
    (tmp_path / f"b{number}").write_text(f"{record}\n")
    monkeypatch.setattr(signatures, "probe", lambda node, number: {})  # of a block device
    facts = signatures.read_local(Sysfs(host.root), udev=tmp_path, dev=tmp_path / "missing")
    assert facts.errors == {}
    if text is None:
        assert facts.signatures == {}
    else:
        assert facts.signatures["nvme0n1"].endswith(text)


def test_read_local_disk_without_record_or_signature_is_probed(
    host: HostTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """udev has a record of a disk that it could not read, too."""
    probed: list[str] = []

    def probe(node: Path, number: str | None) -> dict[str, str]:
        probed.append(node.name)
        assert number is not None
        if node.name == "sdb":
            raise OSError(5, "Input/output error", str(node))
        return {"TYPE": "swap", "USAGE": "other"} if node.name == "sda" else {}

    monkeypatch.setattr(signatures, "probe", probe)
    monkeypatch.setattr(signatures, "_EMPTY", {})
    for name in ("nvme0n1", "sda", "sdb"):
        (host.root / f"class/block/{name}/size").write_text("2048\n")
    for name in ("nvme0n1", "sdb"):
        number = (host.root / f"class/block/{name}/dev").read_text().strip()
        (tmp_path / f"b{number}").write_text("E:ID_SERIAL=x\n")
    for _ in range(2):
        facts = signatures.read_local(Sysfs(host.root), udev=tmp_path, dev=tmp_path)
        error = f"{tmp_path / 'sdb'}: Input/output error"
        assert facts == SignatureFacts({"sda": "data (swap)"}, {"sdb": error})
    assert probed == ["nvme0n1", "sda", "sdb", "sda", "sdb"], "an empty disk is read once"


def test_read_local_without_permission_trusts_udev(
    host: HostTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(node: Path, number: str | None) -> dict[str, str]:
        raise PermissionError(1, "Operation not permitted", str(node))

    monkeypatch.setattr(signatures, "probe", probe)
    monkeypatch.setattr(signatures, "_EMPTY", {})
    for name in ("nvme0n1", "sda", "sdb"):
        (host.root / f"class/block/{name}/size").write_text("2048\n")
    number = (host.root / "class/block/sda/dev").read_text().strip()
    (tmp_path / f"b{number}").write_text("E:ID_SERIAL=x\n")
    facts = signatures.read_local(Sysfs(host.root), udev=tmp_path, dev=tmp_path)
    assert set(facts.errors) == {"nvme0n1", "sdb"}, "udev has no record of these"


def test_read_local_disk_without_capacity_is_unknown(host: HostTree, tmp_path: Path) -> None:
    facts = signatures.read_local(Sysfs(host.root), udev=tmp_path, dev=tmp_path)
    assert facts.errors["nvme0n1"] == "the kernel shows no capacity"


def test_probe_refuses_the_node_of_another_device(tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(bytes(MIB))
    with pytest.raises(OSError, match="the node of another device; expected 259:0"):
        signatures.probe(tmp_path / "disk", "259:0")


@pytest.mark.parametrize("kind", disk_contents.CONTENTS)
def test_probe_each_kind_of_content(tmp_path: Path, kind: str) -> None:
    disk = tmp_path / "disk"
    with open(disk, "wb") as file:
        file.truncate(disk_contents.SIZE)
        for offset, content in disk_contents.CONTENTS[kind]:
            file.seek(offset)
            file.write(content)
    assert signatures.describe(signatures.probe(disk)) == kind


def test_probe_finds_a_member_of_a_volume_whose_checksum_is_wrong(tmp_path: Path) -> None:
    kind = "a part of a volume (LVM2_member)"
    ((offset, content),) = disk_contents.CONTENTS[kind]
    disk = bytearray(disk_contents.SIZE)
    disk[offset : offset + len(content)] = content
    disk[offset + 16] ^= 1
    (tmp_path / "disk").write_bytes(disk)
    assert signatures.describe(signatures.probe(tmp_path / "disk")) == kind


def test_probe_empty_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(bytes(MIB))
    assert signatures.probe(tmp_path / "disk") == {}
    assert signatures.describe({}) is None


def test_probe_node_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        signatures.probe(tmp_path / "missing")
    with pytest.raises(OSError, match="directory"):
        signatures.probe(tmp_path)


def test_read_tree_with_file(host: HostTree) -> None:
    assert signatures.read(host.root) == SignatureFacts()
    host.sign_disk("sda", "a partition table (gpt)")
    assert signatures.read(host.root) == SignatureFacts({"sda": "a partition table (gpt)"})


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1}', '{"signatures": {"sda": 1}}', "null"])
def test_read_malformed_file_makes_each_disk_unknown(host: HostTree, content: str) -> None:
    (host.root.parent / signatures.FILE).write_text(content)
    facts = signatures.read(host.root)
    assert facts.signatures == {}
    assert set(facts.errors) == {"nvme0n1", "sda", "sdb"}


def test_contents_by_function(host: HostTree) -> None:
    host.add_disk("sdc", f"pci0000:00/{B}/host0/sdc/block", ["sdc1"])
    sysfs = Sysfs(host.root)
    facts = SignatureFacts({}, {"sda": "no permission"})
    assert signatures.contents_by_function(sysfs, facts) == {
        A: DiskContents(),
        B: DiskContents(
            "sdc holds a partition table", "the contents of sda are unknown: no permission"
        ),
    }
