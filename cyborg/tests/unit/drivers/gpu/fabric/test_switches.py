# SPDX-License-Identifier: Apache-2.0
"""Fatal errors of NVSwitches in the kernel log."""

from pathlib import Path

import pytest

from cyborg.drivers.base import VolatileMemory
from cyborg.drivers.gpu.fabric.manager import FabricManager
from cyborg.drivers.gpu.fabric.partitions import Partition
from cyborg.drivers.gpu.fabric.requests import FabricRequests
from cyborg.drivers.gpu.fabric.switches import (
    FABRIC_SXIDS,
    SwitchFault,
    SwitchLog,
    find_obstacles,
    parse_fault,
)

PREFIX = "nvidia-nvswitch3: SXid (PCI:0000:C1:00.0): "
LINK = SwitchFault("0000:c1:00.0", 24007, 30, "sourcetrack timeout error")
HALT = SwitchFault("0000:c1:00.0", 22003, 30, "Minion Halt")
PAIR, SINGLE = Partition(3, (1, 3)), Partition(7, (1,))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{PREFIX}24007, Fatal, Link 30 sourcetrack timeout error", LINK),
        (f"{PREFIX}22003, Fatal, Link 30 Minion Halt", HALT),
        (
            f"{PREFIX}10003, Fatal, unhandled interrupt in f(3)",
            SwitchFault("0000:c1:00.0", 10003, None, "unhandled interrupt in f(3)"),
        ),
        (
            "nvidia-nvswitch0 SXid (PCI:00010000:0b:00.1): 11001, Fatal, Link 04 ingress invalid",
            SwitchFault("00010000:0b:00.1", 11001, 4, "ingress invalid"),
        ),
        (f"{PREFIX}28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)", None),
        (f"{PREFIX}11012, Correctable, Link 46 ECC", None),
        (f"{PREFIX}20034, Fatal, Link 30 LTSSM Fault Up", None),
        (f"{PREFIX}garbled, Fatal", None),
        (f"cyborg: {PREFIX}24007, Fatal, Link 30 sourcetrack timeout error", None),
        ("NVRM: Xid (PCI:0000:3b:00): 74, pid=1", None),
        ("", None),
    ],
)
def test_parse_fault_returns_fatal_errors_only(text: str, expected: SwitchFault | None) -> None:
    assert parse_fault(text) == expected


def test_fault_of_a_link_is_local_unless_its_code_is_always_fatal() -> None:
    assert LINK.is_local
    assert not HALT.is_local
    assert not parse_fault(f"{PREFIX}24007, Fatal, no link").is_local  # type: ignore[union-attr]
    assert {12020, 22003, 22011, 23001, 23017} <= FABRIC_SXIDS


def test_find_obstacles_of_a_link_spares_partitions_of_one_gpu() -> None:
    reason = (
        "NVSwitch 0000:c1:00.0 has the fatal SXid 24007 (sourcetrack timeout error) at link 30: "
        "stop the servers and reset the GPUs, clear the kernel log (dmesg --clear), restart the "
        "agent"
    )
    assert find_obstacles([PAIR, SINGLE], [LINK]) == {3: reason}
    assert find_obstacles([PAIR, SINGLE], []) == {}


def test_find_obstacles_of_the_fabric_closes_each_partition() -> None:
    found = find_obstacles([PAIR, SINGLE], [LINK, HALT])
    assert sorted(found) == [3, 7]
    assert {"SXid 22003 (Minion Halt)" in text for text in found.values()} == {True}
    assert {"reboot the host" in text for text in found.values()} == {True}


def test_switch_log_returns_each_fault_once(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    line = f"{PREFIX}24007, Fatal, Link {{}} sourcetrack timeout error\n"
    path.write_text(f"3,1,1,-;{line.format(30)}3,2,2,-;{line.format(30)}14,3,3,-;{line.format(31)}")
    log = SwitchLog(path)
    assert log.read() == (LINK,), "a program wrote the last line"
    with path.open("a") as file:
        file.write(f"3,4,4,-;{line.format(31)}")
    assert [fault.link for fault in log.read()] == [30, 31]


def test_switch_log_unreadable_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = SwitchLog(tmp_path / "none")
    assert log.read() == log.read() == ()
    assert len(caplog.messages) == 1
    assert "SXid errors will not be detected" in caplog.messages[0]


@pytest.mark.requires("compiler")
@pytest.mark.slow
def test_read_state_has_obstacles_also_with_a_problem(sdk: FabricRequests, tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("")
    memory = VolatileMemory()
    manager = FabricManager(sdk, lambda: memory, path)
    assert manager.read().obstacles == {}
    path.write_text(f"3,1,1,-;{PREFIX}24007, Fatal, Link 30 sourcetrack timeout error\n")
    assert sorted(manager.read().obstacles) == list(range(7)), "singles are 7 to 14"
    Path(sdk.address).unlink()
    state = manager.read()
    assert state.problem is not None
    assert sorted(state.obstacles) == list(range(7))
