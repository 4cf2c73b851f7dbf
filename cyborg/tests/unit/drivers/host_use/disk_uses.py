# SPDX-License-Identifier: Apache-2.0
"""The uses of disks by a host that drivers find."""

from collections.abc import Sequence

from cyborg.testing.machine import HostTree
from cyborg.tests.unit.drivers.host_use.steps import (
    FOLDER,
    A,
    Step,
    Use,
    add_drive,
    file_use,
    make_function,
)


def _mounted(name: str, reason: str, mount_point: str, *volumes: str) -> Use:
    """Return the use of a drive below volumes, of which the last one is mounted."""

    def begin(host: HostTree) -> None:
        lower = "nvme0n1"
        for volume in volumes:
            host.add_disk(volume, "virtual/block", slaves=[lower])
            lower = volume
        if mount_point:
            host.mount(lower, mount_point)

    def end(host: HostTree) -> None:
        host.unmount_all()
        for volume in volumes:
            (host.root / "class/block" / volume).unlink()
        for holder in (host.root / "class/block/nvme0n1/holders").iterdir():
            holder.unlink()

    return Use(name, reason, add_drive, begin, end)


def _signature(kind: str) -> Use:
    reason = f"nvme0n1 holds {kind}; erase it, for example with wipefs, or adopt the device"
    return Use(
        f"{kind} on a drive, not in use",
        reason,
        add_drive,
        lambda host: host.sign_disk("nvme0n1", kind),
        lambda host: host.sign_disk("nvme0n1", None),
    )


def _vmd(host: HostTree) -> None:
    make_function("8086", "201d", "010400", "vmd")(host)
    host.add_disk("nvme0n1", f"{FOLDER}/pci10000:00/10000:00:02.0/10000:01:00.0/nvme/nvme0")


def _fibre_channel(host: HostTree) -> None:
    make_function("10df", "e300", "0c0400", "lpfc")(host)
    host.add_disk("nvme0n1", "virtual/nvme-subsystem/nvme-subsys0")
    host.add_fc_controller("nvme0n1", "nvme0", A, "0x1000000000000010")


def _multipath(host: HostTree) -> None:
    make_function("144d", "a80a", "010802", "nvme")(host)
    host.add_disk("nvme0n1", "virtual/nvme-subsystem/nvme-subsys0")
    host.add_controller("nvme0n1", f"{FOLDER}/nvme/nvme0")


def _root(name: str, add: Step) -> Use:
    return Use(
        name,
        "nvme0n1 holds the root file system",
        add,
        lambda host: host.mount("nvme0n1", "/"),
        lambda host: host.unmount_all(),
    )


def _btrfs(host: HostTree) -> None:
    folder = host.root / "fs/btrfs/0c2f2bd6-3f2f-4c60-9d3f-2f7a1a0f5c11/devices"
    folder.mkdir(parents=True)
    (folder / "nvme0n1").symlink_to(host.root / "class/block/nvme0n1")


DISK_USES: Sequence[Use] = (
    _mounted("the root file system", "nvme0n1 holds the root file system", "/"),
    _mounted(
        "the EFI system partition, or /boot", "nvme0n1 holds the file system /boot/efi", "/boot/efi"
    ),
    _mounted("any mounted file system", "nvme0n1 holds the file system /srv", "/srv"),
    _mounted("root on LVM", "dm-0 holds the root file system", "/", "dm-0"),
    _mounted("root on LVM on RAID", "dm-0 holds the root file system", "/", "md0", "dm-0"),
    _mounted(
        "an active volume (LVM, RAID, bcache, multipath) that is not mounted",
        "nvme0n1 holds a part of bcache0",
        "",
        "bcache0",
    ),
    _root("root by native NVMe multipath", _multipath),
    _root("root by NVMe over Fibre Channel", _fibre_channel),
    _root("root behind Intel VMD", _vmd),
    Use(
        "a disk of a btrfs file system",
        "nvme0n1 holds a part of a btrfs file system",
        add_drive,
        _btrfs,
        lambda host: (host.root / "fs/btrfs").rename(host.root / "fs/old"),
    ),
    Use(
        "swap",
        "nvme0n1 holds swap",
        add_drive,
        lambda host: host.enable_swap("/dev/nvme0n1"),
        lambda host: host.disable_swap(),
    ),
    file_use(
        "a loop device",
        "nvme0n1 holds the data of loop0",
        add_drive,
        "class/block/loop0/loop/backing_file",
        "/dev/nvme0n1",
        "/srv/image",
    ),
    file_use(
        "a zram device",
        "nvme0n1 holds the data of zram0",
        add_drive,
        "class/block/zram0/backing_dev",
        "/dev/nvme0n1",
        "none",
    ),
    file_use(
        "an NVMe target of the kernel",
        "nvme0n1 holds a namespace of the NVMe target nqn.t",
        add_drive,
        "kernel/config/nvmet/subsystems/nqn.t/namespaces/1/device_path",
        "/dev/nvme0n1",
        "(null)",
    ),
    file_use(
        "a SCSI target of the kernel",
        "nvme0n1 holds the SCSI target disk1",
        add_drive,
        "kernel/config/target/core/iblock_0/disk1/udev_path",
        "/dev/nvme0n1",
        "",
    ),
    *map(
        _signature,
        (
            *(
                "a partition table (gpt)",
                "a file system (ext4)",
                "a file system (xfs)",
                "data (swap)",
            ),
            *("a part of a volume (LVM2_member)", "a part of a volume (linux_raid_member)"),
            *(
                "a file system (zfs_member)",
                "data (ceph_bluestore)",
                "encrypted data (crypto_LUKS)",
            ),
            *("data (bcache)", "a part of a volume (VMFS_volume_member)", "data (mpath_member)"),
        ),
    ),
    Use(
        "a disk that cannot be read",
        "the contents of nvme0n1 are unknown: Permission denied",
        add_drive,
        lambda host: host.sign_disk("nvme0n1", None, "Permission denied"),
        lambda host: host.sign_disk("nvme0n1", None),
    ),
)
