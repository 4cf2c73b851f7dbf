# SPDX-License-Identifier: Apache-2.0
"""The uses of devices by programs, guests, screens and the platform that drivers find."""

import os
from collections.abc import Sequence

from cyborg.testing.machine import HostTree
from cyborg.tests.unit.drivers.host_use.steps import (
    FOLDER,
    A,
    Step,
    Use,
    add_drive,
    add_hba,
    add_nic,
    file_use,
    make_function,
    write,
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


def _bind(driver: str) -> Step:
    def bind(host: HostTree) -> None:
        link = host.bus / A / "driver"
        link.unlink()
        target = host.root / "bus/pci/drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent.resolve()))

    return bind


def _create_mediated_device(host: HostTree) -> None:
    folder = (host.bus / A).resolve() / "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
    folder.mkdir()
    (host.root / "bus/mdev/devices").mkdir(parents=True, exist_ok=True)
    (host.root / "bus/mdev/devices" / folder.name).symlink_to(folder)


def _remove_mediated_device(host: HostTree) -> None:
    for link in (host.root / "bus/mdev/devices").iterdir():
        link.unlink()


def _gpu(host: HostTree) -> None:
    make_function("10de", "2330", "030200", "nvidia")(host)
    host.add_nvidia_gpu(A, 0)


def _vfio_drive(host: HostTree) -> None:
    make_function("144d", "a80a", "010802", "vfio-pci")(host)
    host.list_in_group(A)


def _screen(host: HostTree) -> None:
    make_function("1002", "6811", "030000", "radeon")(host)
    host.add_display(A, "card0-DP-1", enabled=False)


def _domain(name: str, add: Step) -> Use:
    return Use(
        name,
        "it is used by the domain guest1 of libvirt",
        add,
        lambda host: host.give_to_domain(A, "guest1"),
        lambda host: host.give_to_domain(A, None),
    )


def _platform(name: str, reason: str, vendor: str, product: str, class_code: str) -> Use:
    return Use(name, reason, make_function(vendor, product, class_code), lambda host: None, None)


_DSA = make_function("8086", "0b25", "088000", "idxd")
_PLAIN = make_function("10ee", "903f", "058000", "qdma")

DEVICE_USES: Sequence[Use] = (
    _open(
        "/dev/nvme0n1",
        "ceph-osd",
        add_drive,
        "a drive that a program has open (Ceph, raw disk of a guest)",
    ),
    _open("/dev/ng0n1", "fio", _with_class("nvme-generic", "ng0n1", add_drive)),
    _open("/dev/sda", "qemu-kvm", add_hba),
    _open("/dev/sg0", "sg_write", _with_class("scsi_generic", "sg0", add_hba)),
    _open(
        "/dev/nst0",
        "bacula-sd",
        _with_class("scsi_tape", "nst0", make_function("1000", "0097", "010700", "mpt3sas")),
    ),
    _open("/dev/nvidia0", "python3", _gpu),
    _open(
        "/dev/dri/renderD128",
        "python3",
        _with_class("drm", "renderD128", make_function("1002", "74a1", "120000", "amdgpu")),
    ),
    _open(
        "/dev/accel/accel0",
        "python3",
        _with_class("accel", "accel0", make_function("1da3", "1020", "120000", "habanalabs")),
    ),
    _open(
        "/dev/hl0",
        "python3",
        _with_class("habanalabs", "hl0", make_function("1da3", "1020", "120000", "habanalabs")),
    ),
    _open(
        "/dev/tenstorrent/0",
        "vllm",
        _with_class("tenstorrent", "tenstorrent!0", make_function("1e52", "401e", "120000", "tt")),
    ),
    _open(
        "/dev/davinci_manager",
        "python3",
        make_function("19e5", "d802", "120000", "devdrv_device_driver"),
    ),
    _open("/dev/neuron0", "python3", make_function("1d0f", "7164", "088000", "neuron")),
    _open(
        "/dev/infiniband/uverbs0",
        "ib_write_bw",
        _with_class(
            "infiniband_verbs", "uverbs0", make_function("15b3", "101b", "020700", "mlx5_core")
        ),
    ),
    _open("/dev/uio0", "testpmd", _with_class("uio", "uio0", _PLAIN)),
    _open("/dev/dsa/wq0.0", "dsa_perf", _with_bus("dsa", "wq0.0", _DSA)),
    _open(
        "/dev/dfl-port.0",
        "opae",
        _with_bus("platform", "dfl-port.0", make_function("8086", "0b2b", "120000", "dfl-pci")),
    ),
    _open("/dev/vfio/1000", "spdk_tgt", _vfio_drive, "a VFIO group of SPDK or DPDK"),
    *(
        _domain(name, add)
        for name, add in (
            ("a PCI device of a domain of libvirt, running or not (<hostdev>)", _gpu),
            ("a network function of a domain (<interface type='hostdev'>)", add_nic),
            ("a drive of a domain (<disk type='nvme'>)", add_drive),
        )
    ),
    Use(
        "uio_pci_generic or igb_uio",
        "it is bound to uio_pci_generic, for a driver in user space",
        add_nic,
        _bind("uio_pci_generic"),
        _bind("i40e"),
    ),
    Use(
        "an enabled work queue of DSA or IAA",
        "its work queue wq0.0 is enabled",
        _with_bus("dsa", "wq0.0", _DSA),
        write("bus/dsa/devices/wq0.0/state", "enabled"),
        write("bus/dsa/devices/wq0.0/state", "disabled"),
    ),
    Use(
        "mediated devices",
        "it has mediated devices, which servers may use",
        _gpu,
        _create_mediated_device,
        _remove_mediated_device,
    ),
    file_use(
        "an enabled output of a display",
        "its display output card0-DP-1 is enabled",
        _screen,
        f"devices/{FOLDER}/drm/card0-DP-1/enabled",
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
