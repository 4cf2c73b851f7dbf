# SPDX-License-Identifier: Apache-2.0
"""The conformance kit with every installed driver on every capture and described machine.

The kit runs on the replay of a capture that the recorder makes of the host, so a file that a driver
reads and that the recorder omits is found too: devices, measurements or layouts differ, or a rule
fails.
"""

import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.backends.catalogue import NAMESPACE
from cyborg.core.inventory.device import Device
from cyborg.drivers.base import Driver, MeasureInterface, PartitionInterface
from cyborg.drivers.replay.recorder import record_host, save_capture
from cyborg.testing import captures, machine
from cyborg.testing.conformance.__main__ import main
from cyborg.testing.conformance.environment import RULES
from cyborg.testing.conformance.kit import (
    Outcome,
    find_hosts,
    options_of_host,
    packaged_hosts,
    run_rules_on_tree,
    sysfs_of,
)
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.unit.drivers import bad_drivers

DRIVERS: Sequence[type[Driver]] = [
    entry.load()
    for entry in sorted(metadata.distribution("cyborg").entry_points.select(group=NAMESPACE))
]
NAMES = [driver.name for driver in DRIVERS]
ANY_DEVICE = {"fake", "generic"}  # no machine lists all devices of these drivers
QAT = captures.FOLDER / "qat-4xxx.jsonl"
GH200 = machine.FOLDER / "gpu-gh200.json"


# Hosts of the default tier: a capture of each kind of card, and a described machine.
QUICK = {"qat-4xxx", "nvme", "pac-d5005", "nvidia-vgpu", "nic-vfs", "gpu-gh200"}
# Machines of --all, which has all captures too.
MORE = {
    *("crypto-granite-rapids-qat-402xx", "disk-nvme-multipath", "fpga-versal-vck5000-xrt"),
    *("gpu-a40-sriov", "nic-bluefield3-host", "nic-ovs-switchdev"),
}


def mark_host(path: Path) -> pytest.MarkDecorator | tuple[()]:
    """Return the mark of a host by the tier in which the drivers run on it."""
    if path.stem in QUICK:
        return ()
    return pytest.mark.matrix if path.suffix != ".json" or path.stem in MORE else pytest.mark.long


def options_for(driver: type[Driver], root: Path) -> dict[str, Any]:
    """Return options with which a driver discovers every device, also virtual functions of GPUs."""
    options = options_of_host(driver, root)
    if "devices" in options:
        options["devices"] = ["address=*,functions=all"]
    return options


def observe(driver: type[Driver], root: Path) -> tuple[Sequence[Device], Any, Any]:
    """Return the devices of a host, their measurements and their layouts."""
    backend = driver("conformance", options_for(driver, root), root)
    devices = list(backend.discover())
    measured = backend.measure(devices) if isinstance(backend, MeasureInterface) else None
    layouts = None
    if isinstance(backend, PartitionInterface):
        layouts = [backend.layouts(device) for device in devices]
    return devices, measured, layouts


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=mark_host(path)) for path in packaged_hosts()],
    ids=lambda path: path.stem,
)
def test_drivers_pass_all_rules_on_the_capture_of_a_host(path: Path, tmp_path: Path) -> None:
    expected = {}
    with sysfs_of(path) as root:
        capture, errors = record_host(DRIVERS, "test", root)
        assert errors == []
        save_capture(capture, tmp_path / "host.jsonl")
        for driver in DRIVERS:
            expected[driver.name] = observe(driver, root)
    failures: dict[tuple[str, str], str] = {}
    discovered: dict[str, Sequence[Device]] = {}
    with sysfs_of(tmp_path / "host.jsonl") as root:
        for driver in DRIVERS:
            options = options_for(driver, root)
            found = run_rules_on_tree(driver, options, path.stem, root, entry_point=driver.name)
            failures |= {(driver.name, r.rule.name): r.reason for r in found.failures}
            discovered[driver.name] = found.devices
            assert observe(driver, root) == expected[driver.name]
            assert found.devices == expected[driver.name][0]
            skipped = {r.rule.name for r in found.results if r.outcome is Outcome.SKIPPED}
            assert skipped <= {r.name for r in RULES if r.changes_host or r.ability or r.protocol}
    assert failures == {}
    addresses = {
        (name, device.address)
        for name, devices in discovered.items()
        for device in devices
        if name not in ANY_DEVICE
    }
    assert addresses or discovered["generic"]
    if path.suffix == ".json":
        rows = machine.read_machine(path)["expected"]
        cards = {(row["driver"], row["device"]) for row in rows if row["driver"] not in ANY_DEVICE}
        assert addresses == cards


def test_packaged_hosts_are_all_files_of_both_folders() -> None:
    assert packaged_hosts() == find_hosts([captures.FOLDER, machine.FOLDER])
    assert len(packaged_hosts()) == len(captures.capture_names()) + len(machine.machine_names())


class TestCommand:
    # What the driver does there is proved above, by all drivers on each host.
    @pytest.mark.parametrize("driver", sample(NAMES, "fake", mark=pytest.mark.long))
    @pytest.mark.matrix
    def test_main_all_captures_exits_with_0(
        self, driver: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([driver, "--all-captures"]) == 0
        *hosts, total = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in hosts] == [path.name for path in packaged_hosts()]
        assert total.startswith(f"{len(hosts)} hosts: ")
        assert " 0 failed, 0 blocked, " in total
        assert " 0 devices, " not in total

    def test_main_capture_takes_files_and_options(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["crypto", "--capture", str(QAT), "--capture", str(GH200)]
        assert main(words) == 0
        assert main([*words, "-o", "devices=address=0000:6b:00.0"]) == 0
        lines = capsys.readouterr().out.splitlines()
        counts = [int(line.split()[1]) for line in lines if "hosts: " not in line]
        assert counts == [2, 0, 1, 0]

    def test_main_capture_folder_with_a_bad_driver_exits_with_1(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for path in (QAT, GH200):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "README").touch()
        words = [f"{bad_drivers.__name__}:Raises", "--capture", str(tmp_path)]
        assert main(words) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("gpu-gh200.json     0 devices  ")
        reason = "raised OSError: the library is not there"
        assert lines.count(f"  discover_succeeds  FAILED  {reason}") == 2

    @pytest.mark.parametrize(
        ("name", "content", "reason"),
        [
            ("a.jsonl", "{}", "a.jsonl: line 1: it is no capture"),
            ("a.json", "{", "a.json: JSONDecodeError: "),
            ("a.json", "[]", "a.json: AttributeError: "),
            ("a.json", json.dumps({"cards": []}), "a.json: ValueError: a: unknown keys cards"),
            ("a.json", "{}", "a.json: KeyError: 'functions'"),
            ("a.txt", "", "a.txt: found no capture and no machine; expected .jsonl, "),
        ],
    )
    def test_main_malformed_host_exits_with_2(
        self,
        name: str,
        content: str,
        reason: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (tmp_path / name).write_text(content)
        assert main(["crypto", "--capture", str(tmp_path / name)]) == 2
        assert reason in capsys.readouterr().err

    def test_main_capture_with_work_exits_with_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["crypto", "--capture", str(QAT), "--work"]) == 2
        assert "omit --socket, --work, --image and --sysfs-root" in capsys.readouterr().err
