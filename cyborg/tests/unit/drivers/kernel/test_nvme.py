# SPDX-License-Identifier: Apache-2.0
"""Data structures of NVMe admin commands, and the choice of the method of erasure."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import DriverFailed
from cyborg.drivers.kernel.nvme import (
    ControllerInfo,
    Method,
    NamespaceInfo,
    SanitizeState,
    choose_method,
    parse_controller,
    parse_namespace,
    parse_sanitize_status,
)
from cyborg.tests.unit.drivers.simulated_nvme import ListedController

PRIVATE, SHARED = NamespaceInfo(shared=False, format_bits=0), NamespaceInfo(True, 0)
FORMATS = (Method.FORMAT_CRYPTO, Method.FORMAT_ERASE)


def controller_data(oacs: int = 0, sanicap: int = 0, fna: int = 0) -> bytes:
    """Return an Identify Controller data structure with these fields."""
    data = bytearray(4096)
    struct.pack_into("<H", data, 256, oacs)
    struct.pack_into("<I", data, 328, sanicap)
    data[524] = fna
    return bytes(data)


@pytest.mark.parametrize(
    ("oacs", "sanicap", "fna", "methods", "format_all"),
    [
        (0, 0, 0, (), False),
        (0x2, 0, 0, (Method.FORMAT_ERASE,), False),
        (0x2, 0, 0x4, FORMATS, False),
        (0, 0, 0x4, (), False),  # a cryptographic erasure needs Format NVM
        (0x2, 0x7, 0x7, tuple(Method), True),
        (0x2, 0x4, 0x2, (Method.SANITIZE_OVERWRITE, Method.FORMAT_ERASE), True),
        (0xFF75, 0xFFFFFFF8, 0xF8, (), False),  # other bits
    ],
)
def test_parse_controller(
    oacs: int, sanicap: int, fna: int, methods: tuple[Method, ...], format_all: bool
) -> None:
    info = parse_controller(controller_data(oacs, sanicap, fna))
    assert info == ControllerInfo(methods, format_all)


def test_parse_namespace_keeps_its_format() -> None:
    data = bytearray(4096)
    data[25] = 63  # the last of 64 formats
    data[26] = 0x75  # LBA format 5 + 3 * 16, metadata at the end of the data
    data[29] = 0x0B  # protection information of type 3, first bytes
    data[30] = 0x01  # shared
    info = parse_namespace(bytes(data))
    assert info == NamespaceInfo(True, 0x5 | 1 << 4 | 3 << 5 | 1 << 8 | 3 << 12)
    data[25] = 15
    assert parse_namespace(bytes(data)).format_bits >> 12 == 0
    assert parse_namespace(bytes(4096)) == PRIVATE


def controller_list(*numbers: int) -> bytes:
    """Return a Controller List data structure."""
    return struct.pack(f"<{1 + len(numbers)}H", len(numbers), *numbers).ljust(4096, b"\0")


def secondary_list(*entries: tuple[int, bool]) -> bytes:
    """Return a Secondary Controller List of ids, each online or offline."""
    data = bytes([len(entries)]).ljust(32, b"\0")
    for number, online in entries:
        data += struct.pack("<HHB", number, 0, online).ljust(32, b"\0")
    return data.ljust(4096, b"\0")


@pytest.mark.parametrize(
    ("answers", "alone"),
    [
        ({}, False),
        ({0x13: controller_list(0)}, False),  # the Secondary Controller List cannot be read
        ({0x13: controller_list(0), 0x15: secondary_list()}, True),
        ({0x13: controller_list(0, 1, 2), 0x15: secondary_list((1, False), (2, False))}, True),
        ({0x13: controller_list(0, 1, 2), 0x15: secondary_list((1, False), (2, True))}, False),
        ({0x13: controller_list(0, 7), 0x15: secondary_list((1, False))}, False),
    ],
)
def test_is_alone_with_siblings_needs_both_lists(answers: dict[int, bytes], alone: bool) -> None:
    controller = ListedController(answers)
    info = ControllerInfo((), has_siblings=True, manages_virtualization=True)
    assert controller.is_alone(info) is alone
    assert controller.is_alone(ControllerInfo((), has_siblings=False)) is True


@pytest.mark.parametrize(("numbers", "alone"), [((65,), True), ((65, 66), False)])
def test_is_alone_without_virtualization_management(numbers: tuple[int, ...], alone: bool) -> None:
    """A drive with two ports has a controller for each port that is connected, and no others."""
    controller = ListedController({0x13: controller_list(*numbers)})
    assert controller.is_alone(ControllerInfo((), has_siblings=True, number=65)) is alone


def test_parse_controller_reads_siblings_number_and_namespace_management() -> None:
    data = bytearray(controller_data(oacs=0x88))
    data[76] = 0x2
    struct.pack_into("<H", data, 78, 300)
    info = ControllerInfo(
        (), manages_namespaces=True, has_siblings=True, manages_virtualization=True, number=300
    )
    assert parse_controller(bytes(data)) == info


def test_namespace_ids_are_read_from_their_lists() -> None:
    lists = {
        code: struct.pack("<3I", *ids).ljust(4096, b"\0")
        for code, ids in {0x02: (1, 3, 0), 0x10: (1, 2, 3)}.items()
    }
    controller = ListedController(lists)
    assert controller.namespace_ids() == [1, 3]
    assert controller.allocated_namespace_ids() == [1, 2, 3]


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (0, SanitizeState.NEVER),
        (1, SanitizeState.DONE),
        (2, SanitizeState.RUNNING),
        (3, SanitizeState.FAILED),
        (4, SanitizeState.DONE),
    ],
)
def test_parse_sanitize_status(status: int, state: SanitizeState) -> None:
    data = struct.pack("<HH", 0x8000, 0xFF00 | status) + bytes(508)
    assert parse_sanitize_status(data) == (state, 0.5)


@pytest.mark.parametrize(
    ("status", "detail", "state"),
    [
        (2, 0x05, SanitizeState.VERIFYING),
        (2, 0x25, SanitizeState.VERIFYING),  # the upper four bits are the state of a failure
        (2, 0x06, SanitizeState.RUNNING),  # it deallocates after the verification
        (1, 0x05, SanitizeState.DONE),
    ],
)
def test_parse_sanitize_status_of_revision_2_1(
    status: int, detail: int, state: SanitizeState
) -> None:
    data = bytearray(struct.pack("<HH", 0xFFFF, status) + bytes(508))
    data[36] = detail
    assert parse_sanitize_status(bytes(data))[0] is state


@pytest.mark.parametrize("status", [5, 6, 7])
def test_parse_sanitize_status_reserved_is_an_error(status: int) -> None:
    with pytest.raises(DriverFailed, match=f"unknown sanitize status {status}"):
        parse_sanitize_status(struct.pack("<HH", 0, status) + bytes(508))


@pytest.mark.parametrize(
    ("methods", "format_all", "namespaces", "words"),
    [
        ((), False, [PRIVATE], "does not support Format NVM"),
        ((Method.SANITIZE_CRYPTO,), False, [PRIVATE], "does not support Format NVM"),
        (FORMATS, True, [PRIVATE], "erases the namespaces of other controllers"),
        (FORMATS, False, [PRIVATE, SHARED], "a namespace is shared"),
    ],
)
def test_choose_method_never_erases_data_of_others(
    methods: tuple[Method, ...], format_all: bool, namespaces: list[NamespaceInfo], words: str
) -> None:
    with pytest.raises(DriverFailed, match=words):
        choose_method(ControllerInfo(methods, format_all), namespaces, exclusive=False)


def test_choose_method_without_any_is_an_error() -> None:
    with pytest.raises(DriverFailed, match="neither Sanitize nor Format NVM"):
        choose_method(ControllerInfo((), False), [PRIVATE], exclusive=True)


@given(
    st.sets(st.sampled_from(Method)),
    st.booleans(),
    st.lists(st.sampled_from([PRIVATE, SHARED])),
    st.booleans(),
)
def test_choose_method_is_the_strongest_permitted(
    supported: set[Method], format_all: bool, namespaces: list[NamespaceInfo], exclusive: bool
) -> None:
    methods = tuple(method for method in Method if method in supported)
    try:
        method = choose_method(ControllerInfo(methods, format_all), namespaces, exclusive=exclusive)
    except DriverFailed:
        assert not exclusive or not methods
        return
    assert method in supported
    if exclusive:
        assert method == methods[0]
    else:
        assert method == next(m for m in methods if m in FORMATS)
        assert not format_all
        assert SHARED not in namespaces
