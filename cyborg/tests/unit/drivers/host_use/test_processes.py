# SPDX-License-Identifier: Apache-2.0
"""Functions whose device nodes are open: in a tree, and of processes of this machine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cyborg.core.errors import TimedOut
from cyborg.drivers.host_use import open_nodes, processes
from cyborg.drivers.host_use.check import used_functions
from cyborg.drivers.host_use.open_nodes import SharedScan
from cyborg.drivers.host_use.processes import IGNORED, ProcessFacts, ProcessReader
from cyborg.drivers.replay.recorder import Recorder
from cyborg.drivers.sysfs import LOCAL_ROOT, Sysfs, observed_by
from cyborg.testing.machine import HostTree

A, B, C = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"
NOBODY = 65534


@pytest.fixture
def host(tmp_path: Path) -> HostTree:
    """Return a host with a device of each kind that has device nodes, at the address A."""
    tree = HostTree(tmp_path)
    for address in (A, B):
        tree.add_function(address, "1af4", "1042", "ffff00")
    for class_, name in (
        ("drm", "card0"),
        ("drm", "renderD128"),
        ("accel", "accel0"),
        ("habanalabs", "hl0"),
        ("infiniband_verbs", "uverbs0"),
        ("infiniband_mad", "umad0"),
        ("uio", "uio0"),
        ("nvme", "nvme0"),
        ("nvme-generic", "ng0n1"),
        ("scsi_generic", "sg0"),
        ("scsi_tape", "nst0"),
    ):
        tree.add_class_device(A, class_, name)
    tree.add_disk("nvme0n1", f"pci0000:00/{A}/nvme/nvme0", ["nvme0n1p1"])
    tree.add_disk("sda", f"pci0000:00/{A}/ata1/host0/target0:0:0/0:0:0:0/block", ["sda1"])
    tree.add_nvidia_gpu(A, 3)
    for bus, name in (("dsa", "wq0.1"), ("platform", "dfl-port.0")):
        folder = (tree.bus / A).resolve() / name
        folder.mkdir()
        (tree.root / f"bus/{bus}/devices").mkdir(parents=True, exist_ok=True)
        (tree.root / f"bus/{bus}/devices" / name).symlink_to(folder)
    return tree


def bind_to_vfio(host: HostTree, address: str, group: str) -> None:
    """Bind a function to vfio-pci, with the nodes of its group and of itself."""
    (host.bus / address / "driver").symlink_to(host.root / "bus/pci/drivers/vfio-pci")
    devices = host.root / f"kernel/iommu_groups/{group}/devices"
    devices.mkdir(parents=True)
    for other in (address, B):  # B is in the group too, and has no kernel driver
        (devices / other).symlink_to((host.bus / other).resolve())
    host.add_class_device(address, "vfio-dev", "vfio0")


NODES = [
    *("/dev/dri/card0", "/dev/dri/renderD128", "/dev/accel/accel0", "/dev/hl0"),
    *("/dev/dsa/wq0.1", "/dev/iax/wq0.1", "/dev/dfl-port.0"),
    *("/dev/infiniband/uverbs0", "/dev/infiniband/umad0", "/dev/uio0"),
    *("/dev/nvme0", "/dev/ng0n1", "/dev/nvme0n1", "/dev/nvme0n1p1", "/dev/sda", "/dev/sda1"),
    *("/dev/nvidia3", "/dev/sg0", "/dev/nst0"),
]


def test_nodes_of_the_functions(host: HostTree) -> None:
    host.add_class_device(A, "drm", "card0-DP-1")  # a connector has no node
    reader = ProcessReader(Sysfs(host.root), ProcessFacts())
    assert sorted(reader.nodes()) == sorted(NODES)


@pytest.mark.parametrize("node", NODES)
def test_function_with_open_node_is_used(host: HostTree, node: str) -> None:
    assert open_nodes.NODE.fullmatch(node)
    host.open_node(node, "smartd", "train.py")
    assert used_functions(host.root) == {A: f"the process train.py has {node} open"}
    host.close_nodes()
    assert used_functions(host.root) == {}


@pytest.mark.parametrize(
    ("node", "class_", "entry"),
    [
        ("/dev/tenstorrent/0", "tenstorrent", "tenstorrent!0"),
        ("/dev/hailo0", "hailo_chardev", "hailo0"),
        ("/dev/h1x-0", "hailo1x", "h1x-0"),
        ("/dev/xclmgmt256", "xrt_mgmt", "xclmgmt256"),
        ("/dev/xdma0_user", "xdma", "xdma0_user"),
        ("/dev/qdma01000-MM-0", "qdma-vf", "qdma01000-MM-0"),
        ("/dev/hisi_zip-0", "uacce", "hisi_zip-0"),
        ("/dev/apex_0", "apex", "apex_0"),
    ],
)
def test_function_with_a_node_of_its_maker_is_used(
    tmp_path: Path, node: str, class_: str, entry: str
) -> None:
    host = HostTree(tmp_path)
    host.add_function(A, "1e52", "401e", "120000", kernel_driver="driver")
    host.add_class_device(A, class_, entry)
    assert open_nodes.NODE.fullmatch(node)
    host.open_node(node, "serve")
    assert used_functions(host.root) == {A: f"the process serve has {node} open"}
    (host.proc / "open_devices.json").write_text("{")
    assert f"{node} may be open" in used_functions(host.root)[A]


@pytest.mark.parametrize(
    ("vendor", "product", "node", "manager"),
    [
        ("19e5", "d802", "/dev/davinci_manager", "npu-smi"),
        ("cabc", "0370", "/dev/cambricon_dev0", "cnmon"),
        ("1d0f", "7164", "/dev/neuron3", "neuron-top"),
        ("1ed2", "0000", "/dev/npu0pe0-1", "furiosa-smi"),
        ("1ed2", "0001", "/dev/rngd/npu0pe0", "furiosa-smi"),
        ("1eff", "1220", "/dev/rbln1", "rbln-stat"),
        ("1fe9", "0100", "/dev/memx0", "nvme"),
        ("1d95", "0001", "/dev/ipu0_ex", "nvme"),
        ("1ed5", "0222", "/dev/mtgpu.0", "mthreads-gmi"),
        ("10ee", "50b4", "/dev/ami0", "ami_tool"),
    ],
)
def test_node_without_a_device_counts_for_all_functions_of_its_maker(
    tmp_path: Path, vendor: str, product: str, node: str, manager: str
) -> None:
    host = HostTree(tmp_path)
    host.add_function(A, vendor, product, "120000", kernel_driver="driver")
    host.add_function(B, vendor, product, "120000", kernel_driver="vfio-pci")
    host.add_function(C, vendor, "ffff", "010802", kernel_driver="driver")
    others = {C} if vendor not in ("19e5", "1d0f", "10ee") else set()
    assert open_nodes.NODE.fullmatch(node)
    host.open_node(node, manager, "serve")
    reason = f"the process serve has {node} open"
    assert used_functions(host.root) == dict.fromkeys({A} | others, reason)
    host.open_node(node, manager)
    assert used_functions(host.root) == {}
    (host.proc / "open_devices.json").write_text("{")
    assert set(used_functions(host.root)) == {A} | others


@pytest.mark.parametrize("name", ["17", "noiommu-17", "devices/vfio0"])
def test_function_of_a_program_in_user_space_is_used(host: HostTree, name: str) -> None:
    node = f"/dev/vfio/{name}"
    bind_to_vfio(host, A, "17")
    assert open_nodes.NODE.fullmatch(node)
    host.open_node(node, "spdk_tgt")
    assert used_functions(host.root) == {A: f"the process spdk_tgt has {node} open"}
    host.open_node(node, "qemu-storage-da")
    assert used_functions(host.root) == {A: f"the process qemu-storage-da has {node} open"}
    # A guest, which may be a server, and the agent, which resets functions.
    host.open_node(node, "qemu-system-x86", "libvirtd", "privsep-helper")
    assert used_functions(host.root) == {}
    host.open_node(node, "qemu-system-x86", "vhost")
    assert used_functions(host.root) == {A: f"the process vhost has {node} open"}


@pytest.mark.parametrize("node", ["/dev/vfio/18", "/dev/vfio/devices/vfio1", "/dev/vfio/vfio"])
def test_other_node_of_vfio_is_no_use(host: HostTree, node: str) -> None:
    bind_to_vfio(host, A, "17")
    host.open_node(node, "spdk_tgt")
    assert used_functions(host.root) == {}


@pytest.mark.parametrize("node", ["/dev/nvidia1", "/dev/dri/card7", "/dev/nvme1", "/dev/sdb"])
def test_node_of_no_function_is_no_use(host: HostTree, node: str) -> None:
    host.open_node(node, "train.py")
    assert used_functions(host.root) == {}


@pytest.mark.parametrize("node", ["/dev/null", "/dev/nvidiactl", "/dev/dm-0", "/dev/kfd", "/x"])
def test_nodes_of_no_device_are_not_read(node: str) -> None:
    assert open_nodes.NODE.fullmatch(node) is None


def test_manager_of_gpus_is_no_use(host: HostTree) -> None:
    host.open_node("/dev/nvidia3", *sorted(IGNORED))
    assert used_functions(host.root) == {}
    assert all(len(name) <= 15 for name in IGNORED)  # TASK_COMM_LEN, with the final zero


def test_generic_node_of_a_drive_with_native_multipath(host: HostTree) -> None:
    host.add_disk("nvme1n1", "virtual/nvme-subsystem/nvme-subsys1")
    host.add_controller("nvme1n1", f"pci0000:00/{B}/nvme/nvme1")
    folder = host.root / "devices/virtual/nvme-subsystem/nvme-subsys1/ng1n1"
    folder.mkdir(parents=True)
    (host.root / "class/nvme-generic/ng1n1").symlink_to(folder)
    host.open_node("/dev/ng1n1", "fio")
    assert used_functions(host.root) == {B: "the process fio has /dev/ng1n1 open"}


def test_managers_of_a_gpu(host: HostTree) -> None:
    host.open_node("/dev/nvidia3", "nv-hostengine", "nvidia-persiste", "nvidia-smi")
    host.open_node("/dev/nvidia2", "dcgm-exporter")
    reader = ProcessReader(Sysfs(host.root), processes.read(host.root))
    assert reader.managers_by_function() == {A: ["DCGM", "nvidia-persistenced"]}


@pytest.mark.parametrize(
    "content",
    [
        *("{", '{"other": 1}', "[]", '{"programs": []}', '{"programs": null}'),
        *('{"programs": {"/dev/nvidia3": null}}', '{"programs": {"/dev/nvidia3": "train.py"}}'),
        '{"error": 1}',
    ],
)
def test_processes_that_cannot_be_read_make_each_node_a_use(host: HostTree, content: str) -> None:
    (host.proc / "open_devices.json").write_text(content)
    found = used_functions(host.root)
    assert set(found) == {A}
    assert " may be open: " in found[A]


@pytest.mark.parametrize("node", ["/dev/infiniband/uverbs0", "/dev/nvidia3"])
def test_node_of_a_network_card_is_no_use_where_interfaces_are_none(
    host: HostTree, node: str
) -> None:
    host.open_node(node, "perftest")
    assert (A in used_functions(host.root, interfaces=False)) is ("nvidia" in node)
    (host.proc / "open_devices.json").write_text("{")
    assert A in used_functions(host.root, interfaces=False)


def test_shared_function_with_open_node_is_unused(host: HostTree) -> None:
    host.open_node("/dev/nvidia3", "monitor")
    assert used_functions(host.root, shared=[A]) == {}
    assert set(used_functions(host.root, shared=[B])) == {A}


def write_process(proc: Path, number: int, program: str, *nodes: str, parent: int = 1) -> Path:
    folder = proc / str(number) / "fd"
    folder.mkdir(parents=True)
    (proc / str(number) / "comm").write_text(f"{program}\n")
    (proc / str(number) / "stat").write_text(f"{number} ({program}) S {parent} 1 1\n")
    for index, node in enumerate(nodes):
        (folder / str(index)).symlink_to(node)
    return folder


def test_scan_finds_programs_of_each_node(tmp_path: Path) -> None:
    write_process(tmp_path, 1, "init", "/dev/null")
    write_process(tmp_path, 70, "train.py", "/dev/nvidia0", "/dev/nvidia1", "socket:[12]")
    write_process(tmp_path, 71, "train.py", "/dev/nvidia0", parent=70)
    write_process(tmp_path, 72, "vllm", "/run/nvidia/driver/dev/nvidia0", "/dev/nvidia0")
    write_process(tmp_path, 73, "cyborg-agent", "/dev/nvidia0", "/dev/nvme0")
    write_process(tmp_path, 74, "sh (1) S 9", parent=73)
    write_process(tmp_path, 75, "xbutil", "/dev/dri/renderD128", parent=74)
    (tmp_path / "irq").mkdir()
    (tmp_path / "76").mkdir()  # a process that ends meanwhile has no files
    assert open_nodes.scan({73}, tmp_path) == {
        "/dev/nvidia0": ["train.py", "vllm"],
        "/dev/nvidia1": ["train.py"],
    }


def test_scan_ends_after_its_time(tmp_path: Path) -> None:
    write_process(tmp_path, 1, "init", "/dev/null")
    with pytest.raises(TimedOut, match=r"were not read in -1 s"):
        open_nodes.scan((), tmp_path, max_seconds=-1)


@pytest.mark.parametrize("is_visible", [True, False])
def test_check_namespace(tmp_path: Path, is_visible: bool) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    with pytest.raises(PermissionError, match="PID namespace"):
        open_nodes.check_namespace(tmp_path)  # a file of this test has another inode
    with pytest.MonkeyPatch.context() as patch:
        number = (tmp_path / "self/ns/pid").stat().st_ino
        patch.setattr(open_nodes, "INITIAL_NAMESPACE", number)
        if is_visible:
            (tmp_path / "1").mkdir()
            open_nodes.check_namespace(tmp_path)
        else:
            with pytest.raises(PermissionError, match="hidepid"):
                open_nodes.check_namespace(tmp_path)


@pytest.mark.slow
def test_scan_of_this_machine_finds_an_open_node(tmp_path: Path) -> None:
    """The file of a test stands for the node of a device."""
    program = (
        "import os, sys\n"
        "node = os.open(sys.argv[1], os.O_RDONLY | os.O_CREAT)\n"
        "print(os.getpid(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    node = tmp_path / "node"
    with subprocess.Popen(
        [sys.executable, "-c", program, node],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == str(process.pid)
        links = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert str(node) in links
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(open_nodes, "NODE", re.compile(f"({re.escape(str(node))})"))
            own = Path(f"/proc/{process.pid}/comm").read_text().strip()
            # A container without CAP_SYS_PTRACE cannot read the other processes.
            others = {int(path.name) for path in Path("/proc").glob("[0-9]*")} - {process.pid}
            assert open_nodes.scan(others) == {}, "a child of an ignored process"
            patch.setattr(open_nodes, "_descends", lambda *_: False)
            assert open_nodes.scan(others) == {str(node): [own]}
        process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_scan_without_permission_raises() -> None:
    program = (
        "import os\n"
        "from cyborg.drivers.host_use import open_nodes\n"
        # Not before: this user may be unable to reach the interpreter and the checkout.
        f"os.setuid({NOBODY})\n"
        "try:\n"
        "    open_nodes.scan(())\n"
        "except PermissionError as exc:\n"
        "    print(exc.filename)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("/proc/")


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> SharedScan:
    """Return the search of this process, without an earlier result."""
    monkeypatch.setattr(open_nodes, "check_namespace", lambda: None)
    scan = SharedScan()
    monkeypatch.setattr(processes, "_SHARED", scan)
    return scan


def test_read_without_permission_makes_each_node_a_use(
    monkeypatch: pytest.MonkeyPatch, shared: SharedScan
) -> None:
    def deny(*_: object) -> dict[str, list[str]]:
        raise PermissionError(13, "Permission denied", "/proc/1/fd")

    monkeypatch.setattr(open_nodes, "scan", deny)
    recorder = Recorder(Path("/"))
    with observed_by(recorder):
        error = str(processes.read(LOCAL_ROOT).error)
    assert error.startswith("the processes of the host cannot be read: ")
    assert "/proc/1/fd" in error
    recorded = json.loads(recorder.folders["proc"].files["open_devices.json"] or b"")
    assert recorded == {"programs": {}, "error": error}


def test_threads_share_a_search(monkeypatch: pytest.MonkeyPatch, shared: SharedScan) -> None:
    calls: list[set[int]] = []

    def count(ignored: set[int]) -> dict[str, list[str]]:
        calls.append(ignored)
        return {"/dev/nvidia0": ["train.py"]}

    monkeypatch.setattr(open_nodes, "scan", count)
    recorder = Recorder(Path("/"))
    with observed_by(recorder):
        for _ in range(3):
            assert processes.read(LOCAL_ROOT).programs == {"/dev/nvidia0": ["train.py"]}
    assert calls == [{os.getpid()}]
    recorded = json.loads(recorder.folders["proc"].files["open_devices.json"] or b"")
    assert recorded == {"programs": {"/dev/nvidia0": ["train.py"]}, "error": None}
    monkeypatch.setattr(open_nodes, "MAX_AGE", 0.0)
    shared._end = 0.0
    processes.read(LOCAL_ROOT)
    assert len(calls) == 2
