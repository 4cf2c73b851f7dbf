# SPDX-License-Identifier: Apache-2.0
"""Reader of Xid errors with a blocking log, overwritten records and an unreadable log."""

import os
from pathlib import Path

import pytest

from cyborg.core.inventory.device_state import HEALTHY
from cyborg.drivers.pci.health import FATAL_XIDS, XidLog

GPU = "0000:3b:00.0"


def xid_record(code: int) -> bytes:
    return f"3,1,2,-;NVRM: Xid (PCI:{GPU[:-2]}): {code}, words\n".encode()


@pytest.mark.parametrize("code", FATAL_XIDS)
def test_read_stops_at_end_of_log(tmp_path: Path, code: int) -> None:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    xids = XidLog(path)
    xids.read()
    writer = os.open(path, os.O_WRONLY)
    try:
        xids.read()
        assert xids.measure(GPU) == HEALTHY
        os.write(writer, xid_record(code))
        xids.read()
        assert xids.measure(GPU).reason == f"Xid {code} ({FATAL_XIDS[code]})"
    finally:
        os.close(writer)


def test_read_overwritten_records_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(xid_record(79))
    read, overruns = os.read, [True]

    def overrun(file: int, size: int) -> bytes:
        if overruns:
            overruns.pop()
            raise BrokenPipeError
        return read(file, size)

    monkeypatch.setattr(os, "read", overrun)
    xids = XidLog(path)
    xids.read()
    assert xids.measure(GPU).reason == "Xid 79 (GPU has fallen off the bus)"


def test_read_unreadable_log_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in (tmp_path / "none", tmp_path):
        caplog.clear()
        xids = XidLog(path)
        for _ in range(2):
            xids.read()
        (message,) = caplog.messages
        assert message.startswith(f"Cannot read {path}, Xid errors will not be detected: ")
    assert xids.measure(GPU) == HEALTHY
