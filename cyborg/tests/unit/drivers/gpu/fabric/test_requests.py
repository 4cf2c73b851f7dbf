# SPDX-License-Identifier: Apache-2.0
"""Requests to the double of Fabric Manager, by its library and by fmpm."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.drivers.base import InvalidOption
from cyborg.drivers.gpu.fabric.codes import Code, explain
from cyborg.drivers.gpu.fabric.requests import (
    FabricRequests,
    LibraryMissing,
    RequestFailed,
    RequestTimedOut,
    check_address,
)
from cyborg.testing.fabric_manager import FabricManagerDouble, Programs
from cyborg.tests.fixtures.machine.processes import ends_within
from cyborg.tests.fixtures.machine.tiers import sample

pytestmark = [pytest.mark.requires("compiler"), pytest.mark.slow]

# Partitions of NVIDIA's Fabric Manager User Guide, "GPU Partitions".
H100 = {
    0: (1, 2, 3, 4, 5, 6, 7, 8),
    1: (1, 2, 3, 4),
    2: (5, 6, 7, 8),
    3: (1, 3),
    4: (2, 4),
    5: (5, 7),
    6: (6, 8),
    **{6 + module: (module,) for module in range(1, 9)},
}
B200 = {
    1: (1, 2, 3, 4, 5, 6, 7, 8),
    2: (1, 2, 3, 4),
    3: (5, 6, 7, 8),
    4: (1, 2),
    5: (3, 4),
    6: (5, 6),
    7: (7, 8),
    **{7 + module: (module,) for module in range(1, 9)},
}
A100 = {
    0: tuple(range(1, 17)),
    1: tuple(range(1, 9)),
    2: tuple(range(9, 17)),
    3: (1, 2, 3, 4, 9, 10, 11, 12),
    4: (5, 6, 7, 8, 13, 14, 15, 16),
    5: (1, 2, 3, 4, 13, 14, 15, 16),
    6: (5, 6, 7, 8, 9, 10, 11, 12),
    **{7 + n: tuple(range(1 + 4 * n, 5 + 4 * n)) for n in range(4)},
    **{11 + n: (1 + 2 * n, 2 + 2 * n) for n in range(8)},
    **{18 + module: (module,) for module in range(1, 17)},
}


@pytest.fixture(params=sample(["sdk", "fmpm"], "sdk"))
def requests(request: pytest.FixtureRequest) -> FabricRequests:
    found: FabricRequests = request.getfixturevalue(request.param)
    return found


def returned(requests: FabricRequests, number: int = 3) -> int:
    with pytest.raises(RequestFailed) as caught:
        requests.activate(number)
    return caught.value.returned


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("h100", H100),
        pytest.param("b200", B200, marks=pytest.mark.matrix),
        pytest.param("a100", A100, marks=pytest.mark.matrix),
    ],
)
def test_list_partitions_returns_those_of_the_baseboard(
    requests: FabricRequests,
    double: FabricManagerDouble,
    table: str,
    expected: dict[int, tuple[int, ...]],
) -> None:
    double.set("table", table)
    found = requests.list_partitions()
    assert {partition.id: partition.modules for partition in found} == expected
    assert {len(p.modules) for p in found if p.max_links == 0} == {1}
    assert {p.line_rate_mbps for p in found} == {25000}
    assert not any(partition.is_active for partition in found)


def test_list_partitions_of_a100_omits_those_of_a_failed_gpu(
    sdk: FabricRequests, double: FabricManagerDouble
) -> None:
    double.set("table", "a100")
    double.set("failed", 5)
    found = {partition.id for partition in sdk.list_partitions()}
    assert found == {number for number, modules in A100.items() if 5 not in modules}


def test_activate_and_deactivate_change_the_partition(
    requests: FabricRequests, double: FabricManagerDouble
) -> None:
    requests.activate(5)
    assert double.active == {5: ()}
    assert [p.id for p in requests.list_partitions() if p.is_active] == [5]
    requests.deactivate(5)
    assert double.active == {}


def test_activate_is_refused_as_by_fabric_manager(
    requests: FabricRequests, double: FabricManagerDouble
) -> None:
    requests.activate(3)
    assert returned(requests, 3) == Code.IN_USE
    assert returned(requests, 1) == Code.IN_USE, "an overlapping partition"
    assert returned(requests, 15) == Code.BADPARAM, "an unknown partition"
    requests.activate(4)
    with pytest.raises(RequestFailed) as caught:
        requests.deactivate(5)
    assert caught.value.returned == Code.UNINITIALIZED, "an inactive partition"
    assert sorted(double.active) == [3, 4]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("phase", "stopped", Code.CONNECTION_NOT_VALID),
        ("phase", "starting", Code.NOT_CONFIGURED),
        ("phase", "waiting", Code.NOT_CONFIGURED),
        ("mode", 0, Code.NOT_SUPPORTED),
        ("mode", 2, Code.NOT_SUPPORTED),
        ("internal", 1, Code.UNINITIALIZED),
    ],
)
def test_activate_in_another_state_fails_with_its_code(
    requests: FabricRequests, double: FabricManagerDouble, key: str, value: object, expected: Code
) -> None:
    double.set(key, value)
    assert returned(requests) == expected


CODES = [code for code in Code if code != Code.SUCCESS]


def test_each_code_has_a_sentence_with_remedy() -> None:
    for code in CODES:
        sentence = explain(code, "fmConnect", "host:6666")
        assert re.search(rf"\(.*: {code.name}, {code.value}\): \w", sentence), sentence


@pytest.mark.parametrize("code", sample(CODES, Code.NVLINK_ERROR))
def test_request_that_fails_with_a_code_has_its_sentence(
    requests: FabricRequests, double: FabricManagerDouble, code: Code
) -> None:
    double.set("fail", f"fmActivateFabricPartition {code} 1")
    with pytest.raises(RequestFailed, match=rf"\(.*: {code.name}, {code.value}\): \w") as caught:
        requests.activate(3)
    assert caught.value.returned == code
    assert double.active == {}
    requests.activate(3)


def test_explain_unknown_code_names_it() -> None:
    assert "(fmConnect: unknown, -29)" in explain(-29, "fmConnect", "host:6666")


def test_connect_with_other_versions_fails(
    sdk: FabricRequests, double: FabricManagerDouble
) -> None:
    double.set("fail", "fmConnect -6 0")
    with pytest.raises(RequestFailed, match="install nvidia-fabricmanager and its library"):
        sdk.list_partitions()


def test_connect_with_an_older_library_uses_the_first_layout(
    sdk: FabricRequests, double: FabricManagerDouble
) -> None:
    double.set("layout", 1)
    assert len(sdk.list_partitions()) == len(H100)


def test_connect_to_a_tcp_address_uses_its_type(
    sdk: FabricRequests, fmpm: FabricRequests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FabricManagerDouble(tmp_path / "10.0.0.5:6666")
    monkeypatch.setenv("FABRIC_MANAGER_DOUBLE", str(tmp_path))
    for requests in (sdk, fmpm):
        tcp = FabricRequests("10.0.0.5:6666", library=requests.library, command=requests.command)
        assert len(tcp.list_partitions()) == len(H100)
        other = FabricRequests("10.0.0.6:6666", library=requests.library, command=requests.command)
        assert returned(other) == Code.CONNECTION_NOT_VALID


def test_activate_with_functions_needs_one_of_each_gpu_in_order(
    sdk: FabricRequests, double: FabricManagerDouble
) -> None:
    double.set("mode", 2)
    double.set("gpu", "1 0000:41", "3 0001:b8")
    first, third = "0000:41:00.4", "0001:b8:01.7"
    for wrong in ([first], [third, first], [first, third, third]):
        with pytest.raises(RequestFailed) as caught:
            sdk.activate(3, wrong)
        assert caught.value.returned == Code.BADPARAM, wrong
    sdk.activate(3, [first, third])
    assert double.active == {3: (first, third)}


def test_activate_with_functions_by_fmpm_is_refused(
    fmpm: FabricRequests, double: FabricManagerDouble
) -> None:
    double.set("mode", 2)
    with pytest.raises(DriverFailed, match=r"cannot name virtual functions, and libmissing\.so"):
        fmpm.activate(7, ["0000:41:00.4"])


def test_set_activated_is_accepted_while_it_is_awaited(
    sdk: FabricRequests, double: FabricManagerDouble
) -> None:
    with pytest.raises(RequestFailed) as caught:
        sdk.set_activated([])
    assert caught.value.returned == Code.NOT_SUPPORTED
    for number in (3, 6):
        sdk.activate(number)
    double.start(restart=True)
    double.advance(60)
    for wrong in ([15], [1, 3]):
        with pytest.raises(RequestFailed) as caught:
            sdk.set_activated(wrong)
        assert caught.value.returned == Code.BADPARAM
    sdk.set_activated([3, 4])
    assert sorted(double.active) == [3, 4]
    assert double.values("cut") == ["6"]


def test_set_activated_after_sixty_seconds_finds_no_service(
    sdk: FabricRequests, double: FabricManagerDouble
) -> None:
    double.start(restart=True)
    double.advance(61)
    with pytest.raises(RequestFailed) as caught:
        sdk.set_activated([])
    assert caught.value.returned == Code.CONNECTION_NOT_VALID
    assert double.values("phase") == ["stopped"]


def test_set_activated_by_fmpm_is_limited_to_an_empty_list(
    fmpm: FabricRequests, double: FabricManagerDouble
) -> None:
    fmpm.activate(3)
    double.start(restart=True)
    with pytest.raises(DriverFailed, match="cannot send the list of active partitions"):
        fmpm.set_activated([3])
    assert double.values("phase") == ["waiting"]
    fmpm.set_activated([])
    assert double.values("cut") == ["3"]


def test_request_that_hangs_ends_at_the_timeout(
    programs: Programs, double: FabricManagerDouble
) -> None:
    double.set("hang", "fmActivateFabricPartition 30")
    for library, command in ((str(programs.library), "none"), ("none", str(programs.fmpm))):
        requests = FabricRequests(double.address, 0.5, library, command)
        with (
            ends_within(10),  # less than the 30 s of the program
            pytest.raises(RequestTimedOut, match=r"activate within 0.5 s: read /var/log"),
        ):
            requests.activate(3)


def test_connection_that_hangs_fails_with_the_error_of_the_library(
    sdk: FabricRequests, double: FabricManagerDouble
) -> None:
    double.set("hang", "fmConnect 30")
    with pytest.raises(RequestFailed, match=r"cannot be reached \(fmConnect: CONNECTION_NOT_VALID"):
        replace(sdk, timeout=4.0).list_partitions()


def test_request_in_a_library_that_crashes_fails(
    requests: FabricRequests, double: FabricManagerDouble
) -> None:
    double.set("crash", "fmActivateFabricPartition")
    with pytest.raises(DriverFailed, match="ended with -6 in activate"):
        requests.activate(3)


def test_request_without_library_and_fmpm_says_what_to_install() -> None:
    requests = FabricRequests(library="libmissing.so", command="/missing/fmpm")
    with pytest.raises(LibraryMissing, match="install nvidia-fabricmanager-dev, or the program"):
        requests.list_partitions()


@pytest.mark.parametrize("script", ["echo no list", "echo '{}'", "exit 3", "true", "kill $$"])
def test_request_to_a_program_that_is_not_fmpm_fails(tmp_path: Path, script: str) -> None:
    program = tmp_path / "fmpm"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    requests = FabricRequests(library="libmissing.so", command=str(program))
    with pytest.raises(DriverFailed, match=r"malformed|ended with"):
        requests.list_partitions()


def test_request_to_a_library_without_a_function_names_it(tmp_path: Path) -> None:
    requests = FabricRequests(library="libc.so.6", command="/missing/fmpm")
    with pytest.raises(DriverFailed, match="no function fmLibInit: install a later release"):
        requests.list_partitions()


@pytest.mark.parametrize("address", ["127.0.0.1:6666", "host.example:1", "/run/fm/socket"])
def test_check_address_returns_a_usable_one(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1", ":6666", "host:0", "host:65536", "host:x", "run/fm", "/" + "x" * 255],
)
def test_check_address_refuses_another_form(address: str) -> None:
    with pytest.raises(InvalidOption, match="host:port or the path of a unix socket"):
        check_address(address)
