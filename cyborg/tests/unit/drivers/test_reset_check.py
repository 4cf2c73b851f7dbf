# SPDX-License-Identifier: Apache-2.0
"""Check that a reset happened, on files like the configuration space of functions."""

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import DriverFailed
from cyborg.drivers.privileged import CONTEXT, files, pci
from cyborg.drivers.privileged.files import find_message_data, set_mark
from cyborg.testing.machine import HostTree

ADDRESS = "0000:3d:00.0"
PM, EXPRESS = 0x01, 0x10


def make_config(*capabilities: tuple[int, int, bytes]) -> bytes:
    """Return a configuration space; a capability is its offset, id and body."""
    config = bytearray(256)
    config[0:4] = bytes.fromhex("de103523")
    config[6] = 0x10 if capabilities else 0
    link = 0x34
    for offset, number, body in capabilities:
        config[link] = offset
        config[offset] = number
        config[offset + 2 : offset + 2 + len(body)] = body
        link = offset + 1
    return bytes(config)


MSI_32, MSI_64, MSI_ENABLED = b"\x00\x00", b"\x80\x00", b"\x81\x00"


@pytest.mark.parametrize(
    ("config", "offset"),
    [
        (make_config((0x60, 0x05, MSI_32)), 0x68),
        (make_config((0x40, PM, b""), (0x48, 0x05, MSI_64), (0x60, EXPRESS, b"")), 0x54),
        (make_config((0x48, 0x05, MSI_ENABLED)), None),
        (make_config((0x40, PM, b""), (0x60, EXPRESS, b"")), None),
        (make_config((0xF8, 0x05, MSI_64)), None),
        (make_config(), None),
        (make_config((0x60, 0x05, MSI_32))[:64], None),  # what a user without privileges can read
        (b"\xff" * 256, None),  # a function that does not answer
        (b"", None),
    ],
)
def test_find_message_data(config: bytes, offset: int | None) -> None:
    assert find_message_data(config) == offset


@given(st.binary(min_size=256, max_size=256))
def test_find_message_data_of_any_bytes_ends_in_the_space(config: bytes) -> None:
    """The links of the capabilities may form a circle."""
    offset = find_message_data(config)
    assert offset is None or 0x40 < offset <= 254


def test_read_only_register_is_not_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config"
    config.write_bytes(make_config((0x60, 0x05, MSI_32)))
    monkeypatch.setattr(files, "_write", lambda path, offset, content: None)
    assert set_mark(config) is None
    assert set_mark(tmp_path / "none") is None


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the configuration space of a function with MSI that can be reset."""
    tree = HostTree(tmp_path)
    tree.add_function(ADDRESS, iommu_group="1")
    (tree.bus / ADDRESS / "reset_method").write_text("flr\n")
    path = tree.bus / ADDRESS / "config"
    path.write_bytes(make_config((0x60, 0x05, MSI_32)))
    monkeypatch.setattr(pci, "_SYS", tree.root)
    monkeypatch.setattr(CONTEXT, "client_mode", False)
    return path


def act_as_kernel(monkeypatch: pytest.MonkeyPatch, config: Path, content: bytes | None) -> None:
    """Let a reset write this configuration space; None leaves it as it is."""

    def write(path: Path, text: str) -> None:
        assert (path.name, text) == ("reset", "1")
        assert config.read_bytes()[0x68:0x6A] in (b"\xde\xc0", b"\0\0")
        if content is not None:
            config.write_bytes(content)

    monkeypatch.setattr(pci, "_write", write)


def test_reset_that_clears_the_mark_is_checked(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_as_kernel(monkeypatch, config, make_config((0x60, 0x05, MSI_32)))
    assert pci.reset(ADDRESS) == "flr; checked"
    assert pci.reset(ADDRESS) == "flr; checked", "and again"


def test_reset_without_effect_fails(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    act_as_kernel(monkeypatch, config, None)
    with pytest.raises(DriverFailed, match=rf"the reset of {ADDRESS} had no effect \(flr\)"):
        pci.reset(ADDRESS)


def test_function_that_does_not_answer_after_its_reset_fails(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_as_kernel(monkeypatch, config, b"\xff" * 256)
    with pytest.raises(DriverFailed, match=f"{ADDRESS} does not answer after its reset"):
        pci.reset(ADDRESS)


def test_lockdown_forbids_the_mark_and_not_the_reset(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, offset: int, content: bytes) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(files, "_write", refuse)
    act_as_kernel(monkeypatch, config, None)
    assert pci.reset(ADDRESS) == "flr"


@pytest.mark.parametrize("methods", ["device_specific", "device_specific flr", "acpi"])
def test_method_that_leaves_the_configuration_space_is_not_checked(
    config: Path, monkeypatch: pytest.MonkeyPatch, methods: str
) -> None:
    (config.parent / "reset_method").write_text(f"{methods}\n")
    act_as_kernel(monkeypatch, config, None)
    assert pci.reset(ADDRESS) == methods


def test_function_without_msi_is_reset_without_a_check(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_bytes(make_config())
    act_as_kernel(monkeypatch, config, None)
    assert pci.reset(ADDRESS) == "flr"
