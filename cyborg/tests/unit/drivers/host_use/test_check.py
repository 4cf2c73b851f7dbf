# SPDX-License-Identifier: Apache-2.0
"""Detection of disks, interfaces and displays that the host itself uses."""

from pathlib import Path

import pytest

from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.host_use.check import used_functions
from cyborg.drivers.host_use.networks import NetworkUse
from cyborg.testing.machine import HostTree

A, B, C = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"
BUS = "pci0000:00"


@pytest.fixture
def host(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    for address in (A, B, C):
        tree.add_function(address, "1af4", "1042", "ffff00")
    return tree


def nvme(host: HostTree, number: int, address: str, *partitions: str) -> None:
    name = f"nvme{number}n1"
    host.add_disk(name, f"{BUS}/{address}/nvme/nvme{number}", [f"{name}{p}" for p in partitions])


def test_used_functions_idle_host_is_empty(host: HostTree, tmp_path: Path) -> None:
    nvme(host, 0, A, "p1")
    host.add_interface("lo")
    host.add_interface("eth0", B)
    assert used_functions(host.root) == {}
    assert used_functions(tmp_path / "nowhere" / "sys") == {}


@pytest.mark.parametrize("mount_point", ["/", "/var/lib/nova"])
def test_used_functions_disk_with_mounted_file_system(host: HostTree, mount_point: str) -> None:
    nvme(host, 0, A, "p1")
    nvme(host, 1, B, "p1")
    host.mount("nvme0n1p1", mount_point)
    reason = "the root file system" if mount_point == "/" else f"the file system {mount_point}"
    assert used_functions(host.root) == {A: f"nvme0n1p1 holds {reason}"}


@pytest.mark.parametrize("mount_point", ["/boot", "/srv/chroot"])
def test_used_functions_root_file_system_is_named_first(host: HostTree, mount_point: str) -> None:
    nvme(host, 0, A, "p1", "p2")
    host.mount("nvme0n1p1", mount_point)
    host.mount("nvme0n1p2", "/")
    assert used_functions(host.root) == {A: "nvme0n1p2 holds the root file system"}


def test_used_functions_virtio_and_scsi_disks(host: HostTree) -> None:
    host.add_disk("vda", f"{BUS}/{A}/virtio1/block")
    host.add_disk("sda", f"{BUS}/{B}/ata1/host0/target0:0:0/0:0:0:0/block", ["sda1"])
    host.mount("vda", "/")
    host.mount("sda1", "/srv")
    assert set(used_functions(host.root)) == {A, B}


def test_used_functions_disks_below_raid_volume(host: HostTree) -> None:
    nvme(host, 0, A, "p1")
    nvme(host, 1, B, "p1")
    host.add_disk("md0", "virtual/block", slaves=["nvme0n1p1", "nvme1n1p1"])
    host.add_disk("dm-0", "virtual/block", slaves=["md0"])
    host.mount("dm-0", "/", source="/dev/mapper/vg-root")
    functions = used_functions(host.root)
    assert functions == {A: "dm-0 holds the root file system", B: "dm-0 holds the root file system"}


def test_used_functions_disk_of_unmounted_volume(host: HostTree) -> None:
    nvme(host, 0, A)
    host.add_disk("dm-0", "virtual/block", slaves=["nvme0n1"])
    assert used_functions(host.root) == {A: "nvme0n1 holds a part of dm-0"}


def test_used_functions_btrfs_disk_is_found_by_source(host: HostTree) -> None:
    nvme(host, 0, A, "p1")
    host.mount("nvme0n1p1", "/", number="0:37")
    assert set(used_functions(host.root)) == {A}


def test_used_functions_every_disk_of_btrfs(host: HostTree) -> None:
    nvme(host, 0, A, "p1")
    nvme(host, 1, B)
    host.mount("nvme0n1p1", "/srv", number="0:37")
    devices = host.root / "fs/btrfs/0c2f2bd6-3f2f-4c60-9d3f-2f7a1a0f5c11/devices"
    devices.mkdir(parents=True)
    for name in ("nvme0n1p1", "nvme1n1"):
        (devices / name).symlink_to(host.root / "class/block" / name)
    assert used_functions(host.root) == {
        A: "nvme0n1p1 holds the file system /srv",
        B: "nvme1n1 holds a part of a btrfs file system",
    }


def test_used_functions_controller_above_disk(host: HostTree) -> None:
    behind = "10000:e1:00.0"
    host.add_disk("nvme0n1", f"{BUS}/{A}/pci10000:e0/10000:e0:06.0/{behind}/nvme/nvme0")
    host.mount("nvme0n1", "/")
    functions = used_functions(host.root)
    assert functions[A] == functions[behind] == "nvme0n1 holds the root file system"
    driver = GenericDriver("gen0", {"devices": ["address=*"]}, host.root)
    offered = {d.address for d in driver.discover() if d.deployables}
    assert offered == {B, C}


def test_used_functions_disk_with_swap(host: HostTree) -> None:
    nvme(host, 0, A, "p3")
    host.add_disk("dm-1", f"{BUS}/{B}/block")
    dm = (host.root / "class/block/dm-1").resolve() / "dm"
    dm.mkdir()
    (dm / "name").write_text("vg-swap\n")
    host.enable_swap("/dev/nvme0n1p3")
    host.enable_swap("/dev/mapper/vg-swap")
    host.enable_swap("/swap.img", "file")
    assert used_functions(host.root) == {A: "nvme0n1p3 holds swap", B: "dm-1 holds swap"}


def test_used_functions_multipath_nvme_disk(host: HostTree) -> None:
    host.add_disk("nvme0n1", "virtual/nvme-subsystem/nvme-subsys0")
    subsystem = host.root / "devices/virtual/nvme-subsystem/nvme-subsys0"
    for number, address in enumerate((A, B)):
        controller = host.root / "devices" / BUS / address / "nvme" / f"nvme{number}"
        controller.mkdir(parents=True)
        (subsystem / f"nvme{number}").symlink_to(controller)
    host.mount("nvme0n1", "/")
    assert set(used_functions(host.root)) == {A, B}


def test_used_functions_interface_with_default_route(host: HostTree) -> None:
    host.add_interface("eth0", A)
    host.add_interface("eth1", B)
    host.add_route("eth0")
    assert used_functions(host.root) == {A: "eth0 has the default route"}


def test_used_functions_interface_with_address(host: HostTree) -> None:
    host.add_interface("eth0", A)
    host.add_interface("eth1", B)
    host.add_route("eth0", "has a route")
    host.add_route("eth1", "has an address of the host")
    assert used_functions(host.root) == {
        A: "eth0 has a route",
        B: "eth1 has an address of the host",
    }


def test_used_functions_interface_below_vlan_on_bond(host: HostTree) -> None:
    host.add_interface("eth0", A, carrier="0")
    host.add_interface("eth1", B, flags=0x1002)
    host.add_interface("bond0")
    host.add_interface("bond0.7")
    host.stack_interfaces("bond0", "eth0")
    host.stack_interfaces("bond0", "eth1")
    host.stack_interfaces("bond0.7", "bond0", master=False)
    host.add_route("bond0.7")
    assert used_functions(host.root) == {
        A: "eth0 is below bond0, which has the default route",
        B: "eth1 is below bond0, which has the default route",
    }


@pytest.mark.parametrize(
    ("flags", "carrier", "in_use"), [(0x1003, "1", True), (0x1002, "1", False), (0x1003, "0", True)]
)
def test_used_functions_port_of_bridge_without_addresses(
    host: HostTree, flags: int, carrier: str, in_use: bool
) -> None:
    host.add_interface("eth0", A, flags=flags, carrier=carrier)
    host.add_interface("ovs-system")
    host.stack_interfaces("ovs-system", "eth0")
    expected = {A: "eth0 is an active port of ovs-system"} if in_use else {}
    assert used_functions(host.root) == expected


def test_discover_interface_that_lost_its_link_is_not_offered(host: HostTree) -> None:
    host.add_interface("eth0", A)
    host.add_interface("eth1", B, carrier="0")
    host.add_route("eth0")
    driver = GenericDriver("gen0", {"devices": ["address=*"]}, host.root)

    def offered() -> set[str]:
        return {device.address for device in driver.discover() if device.deployables}

    assert offered() == {B, C}
    host.remove_routes()
    # A routing daemon starts again.
    assert [offered(), offered()] == [{B, C}] * 2
    (device,) = [device for device in driver.discover() if device.address == A]
    assert device.vendor_board_info[NOT_OFFERED] == (
        "eth0 has the default route; this ended, but the interface is still up: set it down to "
        "free it"
    )
    for name in ("eth0", "eth1"):
        (host.root / "class/net" / name / "carrier").write_text("0\n")
    assert [offered(), offered()] == [{B, C}] * 2
    (host.root / "class/net/eth0/flags").write_text("0x1002\n")
    assert offered() == {A, B, C}


def test_use_that_only_seemed_to_be_one_ends_at_once(host: HostTree) -> None:
    """A failed read, an open node and a missing interface say nothing about the interface."""
    known: dict[str, NetworkUse] = {}
    folder = host.add_function("0000:04:00.0", "8086", "1889", "020000", kernel_driver="iavf")
    assert set(used_functions(host.root, known)) == {folder.name}
    host.add_interface("eth0", folder.name)
    (host.proc / "self/net/rtnetlink.json").write_text('{"error": "rtnetlink: EPERM"}')
    assert set(used_functions(host.root, known)) == {folder.name}
    host.write()
    assert (used_functions(host.root, known), known) == ({}, {})


def test_use_of_an_interface_ends_when_a_server_has_the_function(host: HostTree) -> None:
    known: dict[str, NetworkUse] = {}
    host.add_interface("eth0", A)
    host.add_route("eth0")
    assert set(used_functions(host.root, known)) == set(known) == {A}
    host.remove_routes()
    (host.root / "class/net/eth0").rename(host.root / "hidden")
    assert (used_functions(host.root, known), known) == ({}, {})
    (host.root / "hidden").rename(host.root / "class/net/eth0")
    assert used_functions(host.root, known) == {}


def test_used_functions_interface_below_macvtap(host: HostTree) -> None:
    host.add_interface("eth0", A)
    host.add_interface("eth1", B)
    host.add_interface("macvtap0")
    host.add_interface("macvtap1", flags=0x1002)
    host.stack_interfaces("macvtap0", "eth0", master=False)
    host.stack_interfaces("macvtap1", "eth1", master=False)
    assert used_functions(host.root) == {A: "eth0 is below macvtap0"}


def test_used_functions_interface_cycle_ends(host: HostTree) -> None:
    host.add_interface("eth0", A, flags=0)
    host.add_interface("eth1", flags=0)
    host.stack_interfaces("eth1", "eth0")
    host.stack_interfaces("eth0", "eth1")
    assert used_functions(host.root) == {}


def test_used_functions_parent_of_mediated_device(host: HostTree) -> None:
    devices = host.root / "bus/mdev/devices"
    devices.mkdir(parents=True)
    for folder in (f"{BUS}/{B}/{A}", "virtual/mtty/mtty"):
        target = host.root / "devices" / folder / f"device-of-{folder[-1]}"
        target.mkdir(parents=True)
        (devices / target.name).symlink_to(target)
    assert used_functions(host.root) == {A: "it has mediated devices, which servers may use"}
    (devices / "device-of-0").unlink()
    (devices / "device-of-0").symlink_to(host.root / "devices/absent")
    assert used_functions(host.root) == {}


def test_used_functions_malformed_proc_files_are_ignored(host: HostTree) -> None:
    for name in ("self/mountinfo", "swaps"):
        (host.proc / name).write_bytes(b"\xff\n - \n1 2 3 - x\n/dev/x\n\n")
    assert used_functions(host.root) == {}


def test_discover_boot_disk_and_nic_are_shown_but_not_offered(host: HostTree) -> None:
    host.add_disk("vda", f"{BUS}/{A}/virtio1/block")
    host.mount("vda", "/")
    host.add_interface("eth0", B)
    host.add_route("eth0")
    driver = GenericDriver("gen0", {"devices": ["address=*"], "adopt": [A]}, host.root)
    devices = {device.address: device for device in driver.discover()}
    assert {address: len(d.deployables) for address, d in devices.items()} == {A: 0, B: 0, C: 1}
    assert devices[A].vendor_board_info == {NOT_OFFERED: "vda holds the root file system"}
    assert devices[B].vendor_board_info == {NOT_OFFERED: "eth0 has the default route"}
    assert devices[C].vendor_board_info == {}
    assert driver.remarks == (
        f"{A} cannot be adopted: the host uses it: vda holds the root file system",
    )


def test_discover_unused_virtual_functions_of_active_card_are_offered(
    host: HostTree,
) -> None:
    card = "0000:04:00.0"
    host.add_function(card, class_code="020000", totalvfs=4)
    first, second = host.enable_virtual_functions(card, 2, class_code="020000")
    host.add_interface("eth0", card)
    host.add_interface("eth1", first)
    host.add_route("eth0")
    host.add_route("eth1", "has a route")
    driver = GenericDriver("gen0", {"devices": ["class=02"]}, host.root)
    (device,) = driver.discover()
    assert [h.address for deployable in device.deployables for h in deployable.handles] == [second]
    assert device.vendor_board_info == {NOT_OFFERED: f"{first}: eth1 has a route"}


def test_discover_names_each_reason_once(host: HostTree) -> None:
    card = "0000:04:00.0"
    host.add_function(card, class_code="020000", totalvfs=8)
    addresses = host.enable_virtual_functions(card, 6, class_code="020000")
    for address in addresses:
        (host.bus / address / "driver").symlink_to(host.root / "bus/pci/drivers/iavf")
    host.add_interface("eth1", addresses[0])
    host.add_route("eth1", "has a route")
    (device,) = GenericDriver("gen0", {"devices": ["class=02"]}, host.root).discover()
    one, *others = addresses
    assert device.vendor_board_info[NOT_OFFERED].startswith(
        f"{one}: eth1 has a route; {', '.join(others[:4])}, 1 more functions: it is bound to iavf "
    )


DISPLAY = "0000:04:00.0"


def add_gpu(host: HostTree, kernel_driver: str | None, boot_vga: str | None) -> None:
    folder = host.add_function(DISPLAY, "1002", "6811", "030000", kernel_driver=kernel_driver)
    if boot_vga is not None:
        (folder / "boot_vga").write_text(f"{boot_vga}\n")


@pytest.mark.parametrize(
    ("kernel_driver", "boot_vga", "displays", "expected"),
    [
        ("radeon", "1", {"card0": None}, "it is the VGA device of the boot, bound to radeon"),
        ("radeon", "1", {"fb0": None}, "it is the VGA device of the boot, bound to radeon"),
        ("radeon", "1", {}, None),
        ("nvidia", "0", {"card1": None, "card1-DP-1": False}, None),
        ("nvidia", None, {"card1": None, "renderD128": None}, None),
        ("amdgpu", "0", {"card1": None, "card1-DP-1": True}, "its display output card1-DP-1 is"),
        ("amdgpu", "0", {"card1": None, "fb1": None}, "it has the framebuffer fb1"),
        (None, "1", {"fb0": None}, "it has the framebuffer fb0"),
        (None, "1", {}, None),
        ("vfio-pci", "1", {"fb0": None, "card0": None, "card0-DP-1": True}, None),
    ],
    ids=[
        *("boot display", "boot framebuffer", "no display driver"),
        *("GPU without screen", "compute GPU", "screen", "console"),
        *("firmware framebuffer", "no driver", "bound to VFIO"),
    ],
)
def test_used_functions_display(
    host: HostTree,
    kernel_driver: str | None,
    boot_vga: str | None,
    displays: dict[str, bool | None],
    expected: str | None,
) -> None:
    add_gpu(host, kernel_driver, boot_vga)
    for name, enabled in displays.items():
        host.add_display(DISPLAY, name, enabled=enabled)
    used = used_functions(host.root)
    assert set(used) == ({DISPLAY} if expected else set())
    assert used.get(DISPLAY, "").startswith(expected or "")


def test_discover_active_display_is_shown_but_not_offered(host: HostTree) -> None:
    add_gpu(host, "radeon", "1")
    host.add_display(DISPLAY, "card0")
    (device,) = GenericDriver("gen0", {"devices": ["class=03"]}, host.root).discover()
    assert not device.deliverable
    assert device.deployables == ()
    assert device.vendor_board_info == {
        NOT_OFFERED: "it is the VGA device of the boot, bound to radeon"
    }


def test_used_functions_interface_below_tunnel(host: HostTree) -> None:
    host.add_interface("eth0", A)
    host.add_interface("eth1", B)
    host.add_tunnel("gre1", "eth0")
    host.add_tunnel("gre2", "eth1")
    host.add_route("gre1", "has a route in table 100")
    assert used_functions(host.root) == {
        A: "eth0 is below gre1, which has a route in table 100",
        B: "eth1 is below gre2",
    }


def test_used_functions_without_facts_is_each_interface_that_is_up(host: HostTree) -> None:
    host.add_interface("eth0", A)
    host.add_interface("eth1", B, flags=0x1002)
    (host.proc / "self/net/rtnetlink.json").write_text('{"error": "rtnetlink: EPERM"}')
    assert used_functions(host.root) == {A: "eth0 may be in use: rtnetlink: EPERM"}


@pytest.mark.parametrize(
    ("class_code", "kernel_driver", "is_used"),
    [
        ("020000", "ixgbe", True),
        ("020000", None, False),
        ("020000", "vfio-pci", False),
        ("020000", "pci-stub", False),
        ("020000", "pciback", False),
        ("020700", "mlx5_core", False),  # without IPoIB
        ("010802", "nvme", False),
    ],
)
def test_used_functions_network_card_of_a_container(
    host: HostTree, class_code: str, kernel_driver: str | None, is_used: bool
) -> None:
    host.add_function(DISPLAY, "8086", "10fb", class_code, kernel_driver=kernel_driver)
    reason = "it is bound to ixgbe and has no network interface here: a container or a vDPA device "
    assert used_functions(host.root) == ({DISPLAY: f"{reason}may have it"} if is_used else {})
    host.add_interface("eth0", DISPLAY)
    assert used_functions(host.root) == {}


def test_used_functions_with_an_enabled_work_queue(host: HostTree) -> None:
    for name, state in (("wq0.0", "disabled"), ("wq0.1", "enabled"), ("engine0.0", "enabled")):
        folder = (host.bus / A).resolve() / "dsa0" / name
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (host.root / "bus/dsa/devices").mkdir(parents=True, exist_ok=True)
        (host.root / "bus/dsa/devices" / name).symlink_to(folder)
    assert used_functions(host.root) == {A: "its work queue wq0.1 is enabled"}
    (host.root / "bus/dsa/devices/wq0.1/state").write_text("disabled\n")
    assert used_functions(host.root) == {}


@pytest.mark.parametrize("stated", [True, False])
def test_used_functions_fibre_channel_port_of_a_fabric(host: HostTree, stated: bool) -> None:
    host.add_disk("nvme0n1", "virtual/nvme-subsystem/nvme-subsys0")
    host.add_fc_controller("nvme0n1", "nvme0", A, "0x1000000000000010")
    host.add_disk("nvme1n1", "virtual/nvme-subsystem/nvme-subsys1")
    host.add_fc_controller("nvme1n1", "nvme1", B, "0x1000000000000011")
    if not stated:
        address = host.root / "devices/virtual/nvme-fabrics/ctl/nvme0/address"
        address.write_text("traddr=nn-0x1:pn-0x2\n")
    host.mount("nvme0n1", "/")
    assert set(used_functions(host.root)) == ({A} if stated else {A, B})


def test_used_functions_fibre_channel_port_that_nothing_names(host: HostTree) -> None:
    host.add_disk("nvme0n1", "virtual/nvme-subsystem/nvme-subsys0")
    host.add_fc_controller("nvme0n1", "nvme0", A, "0x1000000000000010")
    address = host.root / "devices/virtual/nvme-fabrics/ctl/nvme0/address"
    address.write_text("traddr=nn-0x1:pn-0x2\n")
    host.add_disk("nvme1n1", "virtual/nvme-subsystem/nvme-subsys1")
    host.add_fc_controller("nvme1n1", "nvme1", B, "0x1000000000000011")
    (host.root / "class/fc_host/host17/port_name").unlink()
    host.mount("nvme0n1", "/")
    assert set(used_functions(host.root)) == {A, B}


def test_used_functions_fibre_channel_without_native_multipath(host: HostTree) -> None:
    host.add_disk("nvme0n1", "virtual/nvme-fabrics/ctl/nvme0", ["nvme0n1p1"])
    host.add_fc_controller("nvme0n1", "nvme0", A, "0x1000000000000010")
    host.mount("nvme0n1p1", "/")
    assert used_functions(host.root) == {A: "nvme0n1p1 holds the root file system"}


def test_used_functions_infiniband_card_of_a_container(host: HostTree) -> None:
    (host.root / "module/ib_ipoib").mkdir(parents=True)
    host.add_function(DISPLAY, "15b3", "101b", "020700", kernel_driver="mlx5_core")
    assert set(used_functions(host.root)) == {DISPLAY}
    host.add_interface("ib0", DISPLAY)
    assert used_functions(host.root) == {}


@pytest.mark.parametrize("kernel_driver", ["uio_pci_generic", "igb_uio"])
def test_used_functions_of_user_space(host: HostTree, kernel_driver: str) -> None:
    host.add_function(DISPLAY, "144d", "a80a", "010802", kernel_driver=kernel_driver)
    assert used_functions(host.root) == {
        DISPLAY: f"it is bound to {kernel_driver}, for a driver in user space"
    }


@pytest.mark.parametrize(
    ("vendor", "product", "class_code", "reason"),
    [
        ("1022", "1486", "108000", "security processor"),  # Rome and Milan
        ("1022", "14ca", "108000", "security processor"),  # Genoa
        ("1022", "ffff", "108000", "security processor"),  # of a later processor
        ("1d94", "1486", "108000", "security processor"),  # Hygon
        ("1022", "1498", "108000", None),  # copies memory
        ("1000", "00b2", "010700", "PCIe switch"),
        ("11f8", "4000", "058000", "PCIe switch"),
        ("1022", "1468", "108000", None),  # a crypto engine alone
        ("1022", "1537", "108000", None),
        ("8086", "4940", "108000", None),
        ("1022", "1485", "130000", None),
        ("1a03", "2000", "030000", "management controller"),
        ("102b", "0536", "030000", "management controller"),
        ("19e5", "1711", "030000", "management controller"),
        ("102b", "0520", "030000", None),
        ("10de", "2330", "030200", None),
    ],
)
def test_function_of_the_platform_is_used_for_each_driver(
    tmp_path: Path, vendor: str, product: str, class_code: str, reason: str | None
) -> None:
    tree = HostTree(tmp_path)
    tree.add_function(A, vendor, product, class_code)
    assert (A in used_functions(tree.root)) is (reason is not None)
    driver = GenericDriver("g", {"devices": ["address=*"]}, tree.root)
    (device,) = driver.discover()
    found = device.vendor_board_info.get(NOT_OFFERED)
    assert found is None if reason is None else reason in str(found)
