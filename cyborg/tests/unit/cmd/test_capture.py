# SPDX-License-Identifier: Apache-2.0
"""The command cyborg-capture: what it writes, and what it refuses."""

import gzip
from pathlib import Path

import pytest

from cyborg.cmd.capture import main
from cyborg.drivers.replay.fabric import parse_partitions
from cyborg.drivers.replay.host import ReplayedHost
from cyborg.drivers.replay.recorder import load_capture
from cyborg.testing import captures
from cyborg.testing.fabric_manager import FabricManagerDouble, build


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the sysfs of a host with drives."""
    (tmp_path / "host").mkdir()
    from cyborg.drivers.replay.recorder import unpack

    unpack(captures.load("nvme"), tmp_path / "host")
    return tmp_path / "host/sys"


def run(root: Path, file: Path, *words: str) -> int:
    return main([str(file), "--source", "a test", "--sysfs-root", str(root), *words])


def test_capture_writes_one_private_file(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "host.jsonl.gz"
    assert run(root, file) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert gzip.decompress(file.read_bytes()).startswith(b'{"format": "cyborg-capture"')
    capture = load_capture(file)
    assert (capture.source, capture.kernel, capture.scrubbed) == ("a test", "6.1.0-28-amd64", False)
    assert f"{file}: {file.stat().st_size} bytes" in capsys.readouterr().err
    host = ReplayedHost(capture)
    host.close()


@pytest.mark.slow
def test_capture_scrubs_on_request(root: Path, tmp_path: Path) -> None:
    assert run(root, tmp_path / "a.jsonl") == run(root, tmp_path / "b.jsonl", "--scrub") == 0
    assert "S64GNE0R50000" in (tmp_path / "a.jsonl").read_text()
    assert "S64GNE0R50000" not in (tmp_path / "b.jsonl").read_text()
    assert load_capture(tmp_path / "b.jsonl").scrubbed


@pytest.mark.slow
@pytest.mark.requires("compiler")
def test_capture_records_partitions_on_request(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    double, library = FabricManagerDouble(tmp_path / "state"), build(tmp_path).library
    file = tmp_path / "host.jsonl"
    words = ("--fabric", double.address, "--fabric-library", str(library))
    assert run(root, file, *words) == 0
    partitions = parse_partitions(load_capture(file))
    assert len(partitions) == 15
    assert not any(partition.is_active for partition in partitions)
    host = ReplayedHost(load_capture(file))
    assert host.fabric is not None
    host.close()
    # Without a Fabric Manager, the rest is written.
    assert run(root, tmp_path / "b.jsonl", "--fabric", "--fabric-library", "libno.so") == 0
    assert "warning: no partitions are recorded: libno.so cannot be" in capsys.readouterr().err
    assert not load_capture(tmp_path / "b.jsonl").fabric


def test_capture_overwrites_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old"
    file.write_text("old")
    assert run(root, file) == 1
    assert "exists: name a new file" in capsys.readouterr().err
    assert file.read_text() == "old"


def test_capture_into_a_missing_folder_fails(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(root, tmp_path / "missing/file") == 1
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--watch", "-1"], ["--watch", "x"], ["--source", " "]])
def test_capture_refuses_values(root: Path, tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(root, tmp_path / "file", *words)
    assert exit_.value.code == 2


@pytest.mark.parametrize("content", [b"\x1f\x8b broken", b"\xff\xfe", b"{}"])
def test_file_that_is_no_capture_is_refused(tmp_path: Path, content: bytes) -> None:
    from cyborg.core.errors import Invalid

    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(Invalid, match=str(file)):
        load_capture(file)
