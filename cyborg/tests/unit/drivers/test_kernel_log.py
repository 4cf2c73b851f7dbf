# SPDX-License-Identifier: Apache-2.0
"""Reading a kernel log that waits, one that loses records, and one that cannot be read."""

import os
from pathlib import Path

import pytest

from cyborg.core.health import WELL
from cyborg.drivers.kernel_log import SICK, Xids

PLACE = "0000:3b:00.0"


def line(code: int) -> bytes:
    return f"3,1,2,-;NVRM: Xid (PCI:{PLACE[:-2]}): {code}, words\n".encode()


@pytest.mark.parametrize("code", SICK)
def test_a_log_that_waits_for_more_is_left(tmp_path: Path, code: int) -> None:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    xids = Xids(path)
    xids.read()
    writer = os.open(path, os.O_WRONLY)
    try:
        xids.read()
        assert xids.of(PLACE) == WELL
        os.write(writer, line(code))
        xids.read()
        assert xids.of(PLACE).reason == f"Xid {code} ({SICK[code]})"
    finally:
        os.close(writer)


def test_records_that_were_overwritten_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(line(79))
    read, lost = os.read, [True]

    def overrun(file: int, size: int) -> bytes:
        if lost:
            lost.pop()
            raise BrokenPipeError
        return read(file, size)

    monkeypatch.setattr(os, "read", overrun)
    xids = Xids(path)
    xids.read()
    assert xids.of(PLACE).reason == "Xid 79 (GPU has fallen off the bus)"


def test_one_that_cannot_be_read_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (tmp_path / "none", tmp_path):
        caplog.clear()
        xids = Xids(path)
        for _ in range(2):
            xids.read()
        (said,) = caplog.messages
        assert said.startswith(f"No Xid is seen: {path} cannot be read: ")
    assert xids.of(PLACE) == WELL
