# SPDX-License-Identifier: Apache-2.0
"""The conformance kit with all drivers of this package and a bad driver for each rule."""

import importlib
import inspect
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Ability, Device
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers import base
from cyborg.drivers.crypto.driver import CryptoDriver
from cyborg.drivers.fake import FakeDriver
from cyborg.drivers.fpga.driver import FpgaDriver
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.nic.driver import NicDriver
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.drivers.pci.health import CHECKS
from cyborg.testing.conformance import environment
from cyborg.testing.conformance.__main__ import main
from cyborg.testing.conformance.environment import RULES
from cyborg.testing.conformance.kit import Outcome, Result, conformance, format_table, run_rules
from cyborg.testing.machine import HostTree
from cyborg.testing.sysfs_tree import SysfsTree
from cyborg.tests.unit.drivers import bad_drivers
from cyborg.tests.unit.drivers.bad_drivers import (
    BAD_DRIVERS,
    HANDLE_COUNTS,
    IMAGES,
    OPEN_DESCRIPTORS,
    PREPARED,
    SETUP_CALLS,
    WIPED,
    Good,
)
from cyborg.tests.unit.drivers.gpu.simulated_gpu import SimulatedGpuDriver, SimulatedKernel
from cyborg.tests.unit.drivers.simulated_nvme import SimulatedNvmeDriver

IMAGE = "5f0f0c86-1d5c-4c4b-9c3a-0d8f6f7a2f12"
FAILURES = (Outcome.FAILED, Outcome.BLOCKED)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the simulated host, and shorten the timeout for threads of bad drivers."""
    monkeypatch.setattr(environment, "THREAD_EXIT_TIMEOUT", 0.02)
    for state in (PREPARED, IMAGES, WIPED, SETUP_CALLS, HANDLE_COUNTS):
        state.clear()
    yield
    while OPEN_DESCRIPTORS:
        os.close(OPEN_DESCRIPTORS.pop())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a sysfs with an empty bus."""
    (tmp_path / "sys" / "bus").mkdir(parents=True)
    return tmp_path / "sys"


def reasons_by_rule(results: Sequence[Result], *outcomes: Outcome) -> dict[str, str]:
    """Return the reasons of the rules with these outcomes, by rule name."""
    return {r.rule.name: r.reason for r in results if r.outcome in outcomes}


def test_run_rules_good_driver_passes_every_rule(root: Path) -> None:
    results = run_rules(Good, {}, sysfs_root=root, work=True, image=IMAGE, entry_point="good")
    assert reasons_by_rule(results, *FAILURES, Outcome.SKIPPED) == {}
    assert len(results) == len(RULES)
    assert set() == PREPARED


@pytest.mark.slow
@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_run_rules_bad_driver_fails_its_rule(name: str, root: Path) -> None:
    driver, also_failing = BAD_DRIVERS[name]
    driver_options = {"slot": "/x"} if driver is bad_drivers.Demanding else {}
    hangs = driver is bad_drivers.Hangs
    limit = 0.5 if hangs else 10.0
    results = run_rules(
        driver, driver_options, sysfs_root=root, work=not hangs, image=IMAGE, limit=limit
    )
    failures = reasons_by_rule(results, Outcome.FAILED)
    assert set(failures) == {name, *also_failing}
    assert all(failures.values())


def test_import_in_the_root_of_a_package_of_a_vendor_fails(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "acme_cards"
    package.mkdir()
    package.joinpath("__init__.py").write_text("import cyborg.conductor\n")
    package.joinpath("card.py").write_text(
        "from cyborg.tests.unit.drivers.bad_drivers import Good\n\nclass Card(Good):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    driver = importlib.import_module("acme_cards.card").Card
    failures = reasons_by_rule(run_rules(driver, sysfs_root=root), Outcome.FAILED)
    assert failures["imports_only_core_and_drivers"] == "acme_cards imports cyborg.conductor"
    for name in ("acme_cards", "acme_cards.card"):
        del sys.modules[name]


@pytest.mark.parametrize("ability", list(Ability))
def test_run_rules_ability_without_methods_fails(ability: Ability, root: Path) -> None:
    class Boasts(bad_drivers.Claims):
        __module__ = Good.__module__  # this test module has forbidden imports
        abilities = frozenset({ability})

    failures = reasons_by_rule(
        run_rules(Boasts, sysfs_root=root, work=True, image=IMAGE), Outcome.FAILED
    )
    assert list(failures) == ["abilities_are_implemented"]
    assert failures["abilities_are_implemented"].endswith(base.ABILITY_INTERFACES[ability].__name__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("setup", "setup_is_idempotent"),
        ("prepare", "prepare_is_idempotent"),
        ("release", "release_accepts_unprepared"),
        ("sanitise", "sanitise_is_idempotent"),
        ("program", "programmed_image_is_discovered"),
        ("layouts", "layouts_are_valid"),
        ("partition", "partition_is_discovered"),
        ("measure", "measure_is_in_time"),
    ],
)
def test_check_slow_method_fails(method: str, rule: str, root: Path) -> None:
    class Sleeps(Good):
        pass

    setattr(Sleeps, method, lambda *_: threading.Event().wait(5.0))
    checks = conformance(Sleeps, sysfs_root=root, work=True, image=IMAGE, limit=0.2)
    (check,) = (check for check in checks if str(check) == rule)
    result = check.run()
    assert result.outcome is Outcome.FAILED
    assert f"{method}()" in result.reason or "layouts()" in result.reason
    # The time that it took: more on a busy machine.
    assert re.search(r"has not returned after [0-9.]+ s", result.reason)


def test_partition_that_cannot_be_undone_fails_with_the_reason(root: Path) -> None:
    class Divides(Good):
        __module__ = Good.__module__  # this test module has forbidden imports

        def partition(self, item: WorkItem, layout: str) -> None:
            if layout == "whole":
                raise DriverFailed("vf_counts does not permit whole")
            super().partition(item, layout)

    checks = conformance(Divides, sysfs_root=root, work=True)
    (check,) = (check for check in checks if str(check) == "partition_is_discovered")
    result = check.run()
    assert result.outcome is Outcome.FAILED
    reason = "raised DriverFailed: vf_counts does not permit whole"
    assert result.reason == f"partition() back to whole {reason}"


def test_rules_for_discover_share_the_discoveries_of_one_object(root: Path) -> None:
    class Counts(Good):
        __module__ = Good.__module__  # this test module has forbidden imports
        calls: ClassVar[list[tuple[str, Path]]] = []

        def discover(self) -> Sequence[Device]:
            self.calls.append((self.backend, self.sysfs_root))
            return super().discover()

    results = run_rules(Counts, sysfs_root=root)
    assert reasons_by_rule(results, *FAILURES) == {}
    # Three by the first object; another object, another backend, and an empty host.
    assert [root == path for _, path in Counts.calls].count(True) == 5
    assert len(Counts.calls) == 6


def test_bad_drivers_cover_exactly_all_rules() -> None:
    assert sorted(BAD_DRIVERS) == sorted(rule.name for rule in RULES)


def test_rules_have_a_sentence_and_a_documented_source() -> None:
    for rule in RULES:
        assert rule.sentence.endswith(".")
        if rule.source == "the module":
            assert "no option library" in " ".join(str(base.__doc__).split())
            continue
        kind, _, member = rule.source.partition(".")
        source = getattr(base, kind)
        # A class variable has its documentation only in the source.
        assert inspect.getdoc(getattr(source, member) if member else source), rule.name


def effects(path: Path) -> dict[str, tuple[Callable[[], Any], str]]:
    """Return effects by kind: a function that causes it, and the start of its description."""

    def connect() -> None:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect_ex(str(path / "unused"))

    def process() -> None:
        subprocess.run(["/bin/true"], check=True)

    def temporary() -> None:
        (path / "kept").write_text("x")

    return {
        "write": (temporary, "opened "),
        "mkdir": ((path / "made").mkdir, "mkdir of "),
        "remove": ((path / "old").unlink, "remove of "),
        "rename": (lambda: (path / "older").rename(path / "newer"), "rename of "),
        "process": (process, "started a process (subprocess.Popen"),
        "socket": (connect, "connect to "),
    }


@pytest.mark.parametrize("kind", ["write", "mkdir", "remove", "rename", "process", "socket"])
def test_discover_with_side_effect_fails_unless_allowed(kind: str, tmp_path: Path) -> None:
    act, words = effects(tmp_path)[kind]

    class Acts(Good):
        __module__ = Good.__module__  # this test module has forbidden imports

        def discover(self) -> Sequence[Device]:
            for name in ("old", "older"):
                if not (tmp_path / name).exists() and kind in ("remove", "rename"):
                    os.mknod(tmp_path / name)  # no audit event is raised for this call
            if kind != "mkdir" or not (tmp_path / "made").exists():
                act()
            return super().discover()

    failures = reasons_by_rule(run_rules(Acts, sysfs_root=tmp_path), Outcome.FAILED)
    assert list(failures) == ["discover_is_read_only"]
    assert failures["discover_is_read_only"].startswith(words)
    if (tmp_path / "made").exists():
        (tmp_path / "made").rmdir()
    allowed = run_rules(Acts, sysfs_root=tmp_path, allow=[str(tmp_path), "/bin/true"])
    assert reasons_by_rule(allowed, Outcome.FAILED) == {}


def test_constructor_that_writes_fails(root: Path) -> None:
    failures = reasons_by_rule(run_rules(bad_drivers.HastyWriter, sysfs_root=root), Outcome.FAILED)
    assert failures == {"constructor_has_no_side_effects": "opened /dev/full for writing"}


def test_driver_name_other_than_entry_point_fails(root: Path) -> None:
    failures = reasons_by_rule(
        run_rules(Good, sysfs_root=root, entry_point="better"), Outcome.FAILED
    )
    assert failures == {"has_name_and_version": "name is 'good', but the entry point is 'better'"}


def test_rules_that_change_the_host_are_skipped_by_default(root: Path) -> None:
    left = reasons_by_rule(run_rules(Good, sysfs_root=root), Outcome.SKIPPED)
    assert sorted(left) == sorted(rule.name for rule in RULES if rule.changes_host)
    assert list(reasons_by_rule(run_rules(Good, sysfs_root=root, work=True), Outcome.SKIPPED)) == [
        "programmed_image_is_discovered"
    ]


def test_check_call_returns_result_or_raises(root: Path) -> None:
    checks = {str(c): c for c in conformance(bad_drivers.Raises, sysfs_root=root)}
    assert checks["has_name_and_version"]().outcome is Outcome.PASSED
    with pytest.raises(
        AssertionError, match=r"^discover\(\) raises no exception\. raised OSError: the"
    ):
        checks["discover_succeeds"]()
    with pytest.raises(AssertionError, match="raised OSError"):
        checks["discovery_is_stable"]()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_devices": 0},
        {"num_devices": 300, "num_handles": 2},
        {"num_devices": 2, "num_handles": 256, "address": "0000:fe:00.0", "prepare": "ok"},
        {"prepare": "ok", "prepare_seconds": 0.001, "sick": "{}/sick", "journal": "{}/journal"},
        {"num_devices": 3, "absent": "{}/absent", "hang": 0.001},
        {"sanitise": "ok", "journal": "{}/journal"},
        {"prepare": "ok", "sanitise": "ok", "divided": "{}/divided", "num_handles": 6},
        {"divided": "{}/divided", "num_handles": 0},
    ],
)
def test_fake_driver_passes_all_rules(options: dict[str, Any], root: Path) -> None:
    (root / "sick").write_text("* on fire\n")
    (root / "absent").write_text("0000:0d:00.0\n")
    driver_options = {
        key: value.format(root) if isinstance(value, str) else value
        for key, value in options.items()
    }
    idle = 0 in (driver_options.get("num_devices"), driver_options.get("num_handles"))
    results = run_rules(
        FakeDriver,
        driver_options,
        sysfs_root=root,
        allow=[str(root / "divided")],
        work=not idle,
        image=IMAGE,
        entry_point="fake",
    )
    assert reasons_by_rule(results, *FAILURES) == {}
    parameters = {
        "measure_is_in_time": "sick",
        "prepare_is_idempotent": "prepare",
        "sanitise_is_idempotent": "sanitise",
        "layouts_are_valid": "divided",
    }
    left = reasons_by_rule(results, Outcome.SKIPPED)
    assert {rule: rule not in left for rule in parameters} == {
        rule: option in driver_options for rule, option in parameters.items()
    }


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"fail": "out of smoke"}, "discover_succeeds"),
        ({"prepare": "fail"}, "prepare_is_idempotent"),
        ({"prepare": "ok", "releasing": "fail"}, "release_accepts_unprepared"),
        ({"sanitise": "fail"}, "sanitise_is_idempotent"),
        ({"program": "fail"}, "programmed_image_is_discovered"),
    ],
)
def test_fake_driver_configured_to_fail_fails_the_rule(
    options: dict[str, Any], rule: str, root: Path
) -> None:
    failures = reasons_by_rule(
        run_rules(FakeDriver, options, sysfs_root=root, work=True, image=IMAGE), *FAILURES
    )
    assert rule in failures


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"devices": ("vendor=8086",)},
        {"devices": ("vendor=8086,product=37c8|37c9",), "health": ()},
        {"devices": ("vendor=8086,kernel_driver=vfio-pci", "class=03"), "health": CHECKS},
        {"devices": ("vendor=8086,product=37c9,resource_class=CUSTOM_A", "vendor=10de")},
    ],
)
def test_generic_driver_passes_all_rules(options: dict[str, Any], tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path / "sys")
    tree.add_function("0000:3d:00.0", totalvfs=16, numa_node=1, iommu_group="7")
    tree.enable_virtual_functions("0000:3d:00.0", 9)
    tree.add_function("0000:3e:00.0", kernel_driver="vfio-pci", totalvfs=4)
    tree.add_function("0000:5e:00.0", vendor="10de", product="1eb8", class_code="030200")
    results = run_rules(
        GenericDriver, options, sysfs_root=tree.root, work=True, entry_point="generic"
    )
    assert reasons_by_rule(results, *FAILURES) == {}
    assert ("measure_is_in_time" in reasons_by_rule(results, Outcome.PASSED)) == (
        options.get("health") != ()
    )


@pytest.mark.parametrize("class_by_capacity", [False, True])
def test_nvme_driver_passes_all_rules(tmp_path: Path, class_by_capacity: bool) -> None:
    tree = HostTree(tmp_path)
    tree.add_function("0000:01:00.0", "144d", "a80a", "010802", kernel_driver="nvme")
    tree.add_disk("nvme0n1", "pci0000:00/0000:01:00.0/nvme/nvme0")
    tree.add_function("0000:02:00.0", "144d", "a80a", "010802", totalvfs=4)
    tree.enable_virtual_functions("0000:02:00.0", 3, "a80a", "010802")
    tree.add_function("0000:03:00.0")
    results = run_rules(
        SimulatedNvmeDriver,
        {"devices": ("vendor=144d",), "class_by_capacity": class_by_capacity},
        sysfs_root=tree.root,
        work=True,
        entry_point="nvme",
    )
    assert reasons_by_rule(results, *FAILURES) == {}


@pytest.mark.slow
def test_gpu_driver_passes_all_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimulatedKernel(tmp_path)
    kernel.add_function("0000:3d:00.0", "10de", "1eb8", "030200", iommu_group="7")
    kernel.add_function("0000:5e:00.0", "1002", "73bf", "030000", iommu_group="8")
    kernel.add_parent("0000:3d:00.0", 4, {"nvidia-222": 1, "nvidia-223": 4})
    kernel.add_parent("mtty", 24, {"mtty-1": 1, "mtty-2": 2})
    kernel.redirect(monkeypatch)
    results = run_rules(
        SimulatedGpuDriver,
        {
            "devices": ("class=03",),
            "mdev_types": ("vendor=10de,type=nvidia-222", "parent=mtty,type=mtty-2"),
        },
        sysfs_root=kernel.root,
        work=True,
        entry_point="gpu",
    )
    assert reasons_by_rule(results, *FAILURES) == {}
    assert "prepare_is_idempotent" in reasons_by_rule(results, Outcome.PASSED)
    assert kernel.devices() == []


def test_all_drivers_of_this_package_are_tested_here() -> None:
    """Check setup.cfg: a new driver must be added to this file."""
    from importlib import metadata

    points = metadata.distribution("cyborg").entry_points
    drivers = {e.load() for e in points if e.group == "cyborg.accelerator.driver"}
    # The crypto, fpga and nic drivers: crypto/test_driver.py and so on.
    others = {CryptoDriver, FpgaDriver, NicDriver}
    assert drivers <= others | {FakeDriver, GenericDriver, GpuDriver, NvmeDriver}


class TestCommand:
    def test_main_good_driver_exits_with_0(
        self, root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["fake", "-o", "num_devices=2", "-o", "prepare=ok", "--sysfs-root", str(root)]
        assert main([*words, "--image", IMAGE]) == 0
        out = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in out[:-1]] == [rule.name for rule in RULES]
        assert out[-1] == f"{len(RULES)} rules: 35 passed, 0 failed, 0 blocked, 13 skipped"

    def test_main_bad_driver_exits_with_1(
        self, root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([f"{bad_drivers.__name__}:Raises", "--sysfs-root", str(root)]) == 1
        out = capsys.readouterr().out
        assert "FAILED    raised OSError: the library is not there" in out
        assert "blocked   discover() raised OSError: the library is not there" in out

    def test_main_repeated_multi_option_is_accepted(self, tmp_path: Path) -> None:
        tree = SysfsTree(tmp_path / "sys")
        tree.add_function("0000:3e:00.0")
        words = ["generic", "-o", "devices=class=02", "-o", "devices=vendor=8086"]
        assert main([*words, "-o", "health=", "--sysfs-root", str(tree.root)]) == 0

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["faek"], "found 'faek' (did you mean fake?)"),
            (
                ["fake", "-o", "cards=2"],
                "-o cards=2: expected KEY=VALUE, where KEY is one of num_dev",
            ),
            (["fake", "-o", "num_devices=two"], "-o num_devices=two: "),
            (["fake", "-o", "num_devices=-1"], "num_devices: found -1; expected 0 to 4096"),
            (["nowhere:Driver"], "cannot load nowhere:Driver: ModuleNotFoundError"),
            (
                ["cyborg.drivers.fake:Nothing"],
                "cannot load cyborg.drivers.fake:Nothing: AttributeError",
            ),
        ],
    )
    def test_main_invalid_arguments_exit_with_2(
        self, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(words) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""

    def test_main_list_prints_all_rules(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--list"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == len(RULES)


def test_format_table_shows_outcome_of_each_rule(root: Path) -> None:
    lines = list(format_table(run_rules(bad_drivers.Misnamed, sysfs_root=root)))
    assert lines[1].split()[:2] == ["has_name_and_version", "FAILED"]
