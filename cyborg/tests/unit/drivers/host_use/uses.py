# SPDX-License-Identifier: Apache-2.0
"""The uses of functions by a host that drivers find: how each begins and ends, and its reason."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cyborg.drivers.host_use import rtnetlink
from cyborg.drivers.host_use.rtnetlink import Link, Route
from cyborg.testing.host_tree import HostTree

A = "0000:01:00.0"
"""The function that the host uses; its interface is eth0, or its disk is nvme0n1 or sda."""

Step = Callable[[HostTree], object]
_FOLDER = f"pci0000:01/{A}"


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


def _function(vendor: str, product: str, class_code: str, driver: str | None = None) -> Step:
    return lambda host: host.add_function(
        A, vendor, product, class_code, kernel_driver=driver, parent="pci0000:01"
    )


def _nic(host: HostTree) -> None:
    _function("8086", "1572", "020000", "i40e")(host)
    host.add_interface("eth0", A)
    _set_up(host, "eth0", False)


def _drive(host: HostTree) -> None:
    _function("144d", "a80a", "010802", "nvme")(host)
    host.add_disk("nvme0n1", f"{_FOLDER}/nvme/nvme0")


def _hba(host: HostTree) -> None:
    _function("1000", "0097", "010700", "mpt3sas")(host)
    host.add_disk("sda", f"{_FOLDER}/host0/target0:0:0/0:0:0:0/block")


def _set_up(host: HostTree, name: str, up: bool) -> None:
    (host.root / "class/net" / name / "flags").write_text("0x1003\n" if up else "0x1002\n")


def _end_network(host: HostTree) -> None:
    host.remove_routes()
    for link in (host.root / "class/net/eth0").glob("upper_*"):
        link.unlink()
    (host.root / "class/net/eth0/master").unlink(missing_ok=True)
    _set_up(host, "eth0", False)


def _network(
    name: str,
    reason: str,
    *above: str,
    routes: Sequence[Route] = (),
    addressed: Sequence[int] = (),
    is_master: bool = True,
) -> Use:
    """Return a use of eth0, which has the number 1, or of the last interface above, with 2."""

    def begin(host: HostTree) -> None:
        _set_up(host, "eth0", True)
        lower = "eth0"
        for upper in above:
            host.add_interface(upper)
            host.stack_interfaces(upper, lower, master=is_master)
            lower = upper
        links = [Link(1, "eth0"), *([Link(2, lower)] if above else [])]
        for interface, text in rtnetlink.summarize(links, routes, addressed).reasons.items():
            host.add_route(interface, text)

    return Use(name, reason, _nic, begin, _end_network)


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

    return Use(name, reason, _drive, begin, end)


def _signature(kind: str) -> Use:
    reason = f"nvme0n1 holds {kind}; erase it, for example with wipefs, or adopt the device"
    return Use(
        f"{kind} on a drive, not in use",
        reason,
        _drive,
        lambda host: host.sign_disk("nvme0n1", kind),
        lambda host: host.sign_disk("nvme0n1", None),
    )


def _open(node: str, program: str, add: Step, name: str | None = None) -> Use:
    return Use(
        name or f"{node} open",
        f"the process {program} has {node} open",
        add,
        lambda host: host.open_node(node, program),
        lambda host: host.close_nodes(),
    )


def _with_class(class_: str, name: str, add: Step) -> Step:
    def create(host: HostTree) -> None:
        add(host)
        host.add_class_device(A, class_, name)

    return create


def _with_bus(bus: str, name: str, add: Step) -> Step:
    def create(host: HostTree) -> None:
        add(host)
        folder = (host.bus / A).resolve() / name
        folder.mkdir()
        (host.root / f"bus/{bus}/devices").mkdir(parents=True)
        (host.root / f"bus/{bus}/devices" / name).symlink_to(folder)

    return create


def _write(path: str, text: str) -> Step:
    def write(host: HostTree) -> None:
        file = host.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    return write


def _file_use(name: str, reason: str, add: Step, path: str, on: str, off: str) -> Use:
    return Use(name, reason, add, _write(path, on), _write(path, off))


def _bind(driver: str) -> Step:
    def bind(host: HostTree) -> None:
        link = host.bus / A / "driver"
        link.unlink()
        target = host.root / "bus/pci/drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent.resolve()))

    return bind


def _hide_interface(host: HostTree) -> None:
    (host.root / "class/net/eth0").rename(host.root / "hidden")


def _show_interface(host: HostTree) -> None:
    (host.root / "hidden").rename(host.root / "class/net/eth0")


def _unread(host: HostTree) -> None:
    _set_up(host, "eth0", True)
    (host.proc / "self/net/rtnetlink.json").write_text('{"error": "rtnetlink: EPERM"}')


def _create_mediated_device(host: HostTree) -> None:
    folder = (host.bus / A).resolve() / "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
    folder.mkdir()
    (host.root / "bus/mdev/devices").mkdir(parents=True, exist_ok=True)
    (host.root / "bus/mdev/devices" / folder.name).symlink_to(folder)


def _remove_mediated_device(host: HostTree) -> None:
    for link in (host.root / "bus/mdev/devices").iterdir():
        link.unlink()


def _gpu(host: HostTree) -> None:
    _function("10de", "2330", "030200", "nvidia")(host)
    host.add_nvidia_gpu(A, 0)


def _vfio_drive(host: HostTree) -> None:
    _function("144d", "a80a", "010802", "vfio-pci")(host)
    host.list_in_group(A)


def _screen(host: HostTree) -> None:
    _function("1002", "6811", "030000", "radeon")(host)
    host.add_display(A, "card0-DP-1", enabled=False)


def _vmd(host: HostTree) -> None:
    _function("8086", "201d", "010400", "vmd")(host)
    host.add_disk("nvme0n1", f"{_FOLDER}/pci10000:00/10000:00:02.0/10000:01:00.0/nvme/nvme0")


def _fibre_channel(host: HostTree) -> None:
    _function("10df", "e300", "0c0400", "lpfc")(host)
    host.add_disk("nvme0n1", "virtual/nvme-subsystem/nvme-subsys0")
    host.add_fc_controller("nvme0n1", "nvme0", A, "0x1000000000000010")


def _multipath(host: HostTree) -> None:
    _function("144d", "a80a", "010802", "nvme")(host)
    host.add_disk("nvme0n1", "virtual/nvme-subsystem/nvme-subsys0")
    host.add_controller("nvme0n1", f"{_FOLDER}/nvme/nvme0")


def _root(name: str, add: Step) -> Use:
    return Use(
        name,
        "nvme0n1 holds the root file system",
        add,
        lambda host: host.mount("nvme0n1", "/"),
        lambda host: host.unmount_all(),
    )


def _platform(name: str, reason: str, vendor: str, product: str, class_code: str) -> Use:
    return Use(name, reason, _function(vendor, product, class_code), lambda host: None, None)


def _btrfs(host: HostTree) -> None:
    folder = host.root / "fs/btrfs/0c2f2bd6-3f2f-4c60-9d3f-2f7a1a0f5c11/devices"
    folder.mkdir(parents=True)
    (folder / "nvme0n1").symlink_to(host.root / "class/block/nvme0n1")


_MAIN, _VRF = 254, 100
_IN_CONTAINER = (
    "it is bound to i40e and has no network interface here: a container or a vDPA device may "
    "have it"
)
_DSA = _function("8086", "0b25", "088000", "idxd")
_PLAIN = _function("10ee", "903f", "058000", "qdma")

USES: Sequence[Use] = (
    _network("the default route", "eth0 has the default route", routes=[Route((1,), _MAIN, True)]),
    _network("another route", "eth0 has a route", routes=[Route((1,), _MAIN, False)]),
    _network(
        "a route of a policy table",
        "eth0 has the default route in table 100",
        routes=[Route((1,), _VRF, True)],
    ),
    _network(
        "the second next hop of a route (ECMP)",
        "eth0 has the default route",
        routes=[Route((9, 1), _MAIN, True)],
    ),
    _network("an address, IPv4 or IPv6", "eth0 has an address of the host", addressed=[1]),
    _network(
        "a bond with an address",
        "eth0 is below bond0, which has an address of the host",
        "bond0",
        addressed=[2],
    ),
    _network(
        "a VLAN with a route on a bond",
        "eth0 is below bond0, which has a route",
        *("bond0", "bond0.7"),
        routes=[Route((2,), _MAIN, False)],
    ),
    _network("a port of a VRF", "eth0 is an active port of red", "red"),
    _network("a port of a Linux bridge", "eth0 is an active port of br0", "br0"),
    _network("a port of Open vSwitch", "eth0 is an active port of ovs-system", "ovs-system"),
    _network("a port of a team", "eth0 is an active port of team0", "team0"),
    _network("a macvtap of a guest", "eth0 is below macvtap0", "macvtap0", is_master=False),
    _network(
        "the underlay of a tunnel (VXLAN, GRE)",
        "eth0 is below vxlan0, which has an address of the host",
        "vxlan0",
        addressed=[2],
        is_master=False,
    ),
    Use(
        "an interface of a container or vDPA device",
        _IN_CONTAINER,
        _nic,
        _hide_interface,
        _show_interface,
    ),
    Use(
        "routes that cannot be read",
        "eth0 may be in use: rtnetlink: EPERM",
        _nic,
        _unread,
        _end_network,
    ),
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
        _drive,
        _btrfs,
        lambda host: (host.root / "fs/btrfs").rename(host.root / "fs/old"),
    ),
    Use(
        "swap",
        "nvme0n1 holds swap",
        _drive,
        lambda host: host.enable_swap("/dev/nvme0n1"),
        lambda host: host.disable_swap(),
    ),
    _file_use(
        "a loop device",
        "nvme0n1 holds the data of loop0",
        _drive,
        "class/block/loop0/loop/backing_file",
        "/dev/nvme0n1",
        "/srv/image",
    ),
    _file_use(
        "a zram device",
        "nvme0n1 holds the data of zram0",
        _drive,
        "class/block/zram0/backing_dev",
        "/dev/nvme0n1",
        "none",
    ),
    _file_use(
        "an NVMe target of the kernel",
        "nvme0n1 holds a namespace of the NVMe target nqn.t",
        _drive,
        "kernel/config/nvmet/subsystems/nqn.t/namespaces/1/device_path",
        "/dev/nvme0n1",
        "(null)",
    ),
    _file_use(
        "a SCSI target of the kernel",
        "nvme0n1 holds the SCSI target disk1",
        _drive,
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
        _drive,
        lambda host: host.sign_disk("nvme0n1", None, "Permission denied"),
        lambda host: host.sign_disk("nvme0n1", None),
    ),
    _open(
        "/dev/nvme0n1",
        "ceph-osd",
        _drive,
        "a drive that a program has open (Ceph, raw disk of a guest)",
    ),
    _open("/dev/ng0n1", "fio", _with_class("nvme-generic", "ng0n1", _drive)),
    _open("/dev/sda", "qemu-kvm", _hba),
    _open("/dev/sg0", "sg_write", _with_class("scsi_generic", "sg0", _hba)),
    _open(
        "/dev/nst0",
        "bacula-sd",
        _with_class("scsi_tape", "nst0", _function("1000", "0097", "010700", "mpt3sas")),
    ),
    _open("/dev/nvidia0", "python3", _gpu),
    _open(
        "/dev/dri/renderD128",
        "python3",
        _with_class("drm", "renderD128", _function("1002", "74a1", "120000", "amdgpu")),
    ),
    _open(
        "/dev/accel/accel0",
        "python3",
        _with_class("accel", "accel0", _function("1da3", "1020", "120000", "habanalabs")),
    ),
    _open(
        "/dev/hl0",
        "python3",
        _with_class("habanalabs", "hl0", _function("1da3", "1020", "120000", "habanalabs")),
    ),
    _open(
        "/dev/infiniband/uverbs0",
        "ib_write_bw",
        _with_class(
            "infiniband_verbs", "uverbs0", _function("15b3", "101b", "020700", "mlx5_core")
        ),
    ),
    _open("/dev/uio0", "testpmd", _with_class("uio", "uio0", _PLAIN)),
    _open("/dev/dsa/wq0.0", "dsa_perf", _with_bus("dsa", "wq0.0", _DSA)),
    _open(
        "/dev/dfl-port.0",
        "opae",
        _with_bus("platform", "dfl-port.0", _function("8086", "0b2b", "120000", "dfl-pci")),
    ),
    _open("/dev/vfio/1000", "spdk_tgt", _vfio_drive, "a VFIO group of SPDK or DPDK"),
    Use(
        "uio_pci_generic or igb_uio",
        "it is bound to uio_pci_generic, for a driver in user space",
        _nic,
        _bind("uio_pci_generic"),
        _bind("i40e"),
    ),
    Use(
        "an enabled work queue of DSA or IAA",
        "its work queue wq0.0 is enabled",
        _with_bus("dsa", "wq0.0", _DSA),
        _write("bus/dsa/devices/wq0.0/state", "enabled"),
        _write("bus/dsa/devices/wq0.0/state", "disabled"),
    ),
    Use(
        "mediated devices",
        "it has mediated devices, which servers may use",
        _gpu,
        _create_mediated_device,
        _remove_mediated_device,
    ),
    _file_use(
        "an enabled output of a display",
        "its display output card0-DP-1 is enabled",
        _screen,
        f"devices/{_FOLDER}/drm/card0-DP-1/enabled",
        "enabled",
        "disabled",
    ),
    _platform(
        "the security processor (AMD, Hygon)",
        "it contains the security processor (PSP) of the host, which firmware, SEV and TPM depend "
        "on",
        "1022",
        "14ca",
        "108000",
    ),
    _platform(
        "the display of the BMC",
        "it is the display of the management controller (BMC) of the host",
        "1a03",
        "2000",
        "030000",
    ),
    _platform(
        "the management endpoint of a PCIe switch",
        "it manages a PCIe switch of the host",
        "1000",
        "00b2",
        "010700",
    ),
)
