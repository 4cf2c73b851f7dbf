# SPDX-License-Identifier: Apache-2.0
"""The conformance kit: over every driver of ours, and over one that breaks each rule."""

import inspect
import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.device import Ability, Device
from cyborg.drivers import base
from cyborg.drivers.fake import FakeDriver
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.health import CHECKS
from cyborg.fixtures import conformance_bed
from cyborg.fixtures.conformance_command import main
from cyborg.fixtures.conformance_rules import RULES
from cyborg.fixtures.driver_conformance import (
    Outcome,
    Result,
    conformance,
    judge,
    table,
)
from cyborg.fixtures.sysfs_tree import SysfsTree
from cyborg.tests.unit.drivers import bad_drivers
from cyborg.tests.unit.drivers.bad_drivers import (
    BAD,
    IMAGES,
    KEPT,
    PARTS,
    PREPARED,
    SETUPS,
    WIPED,
    Good,
)

IMAGE = "5f0f0c86-1d5c-4c4b-9c3a-0d8f6f7a2f12"
SICK = (Outcome.BROKEN, Outcome.UNTOLD)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host that bad drivers work on is as new, and nobody waits long for their threads."""
    monkeypatch.setattr(conformance_bed, "GRACE", 0.02)
    for state in (PREPARED, IMAGES, WIPED, SETUPS, PARTS):
        state.clear()
    yield
    while KEPT:
        os.close(KEPT.pop())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A sysfs with a bus and nothing on it."""
    (tmp_path / "sys" / "bus").mkdir(parents=True)
    return tmp_path / "sys"


def told(results: Sequence[Result], *outcomes: Outcome) -> dict[str, str]:
    """Return the rules with these outcomes, and why."""
    return {r.rule.name: r.why for r in results if r.outcome in outcomes}


def test_a_driver_that_keeps_every_rule(root: Path) -> None:
    results = judge(Good, {}, sysfs_root=root, work=True, image=IMAGE, entry_point="good")
    assert told(results, *SICK, Outcome.LEFT_OUT) == {}
    assert len(results) == len(RULES)
    assert set() == PREPARED


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_a_bad_driver_for_each_rule_is_caught(name: str, root: Path) -> None:
    driver, others = BAD[name]
    given = {"path": "/x"} if driver is bad_drivers.Demanding else {}
    hangs = driver is bad_drivers.Hangs
    limit = 0.5 if hangs else 10.0
    results = judge(driver, given, sysfs_root=root, work=not hangs, image=IMAGE, limit=limit)
    broken = told(results, Outcome.BROKEN)
    assert set(broken) == {name, *others}
    assert all(broken.values())


@pytest.mark.parametrize("ability", list(Ability))
def test_an_ability_without_its_methods_is_caught(ability: Ability, root: Path) -> None:
    class Boasts(bad_drivers.Claims):
        __module__ = Good.__module__  # this one imports more than a driver may
        abilities = frozenset({ability})

    broken = told(judge(Boasts, sysfs_root=root, work=True, image=IMAGE), Outcome.BROKEN)
    assert list(broken) == ["abilities_have_methods"]
    assert broken["abilities_have_methods"].endswith(base.NEEDED[ability].__name__)


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("setup", "sets_up_twice"),
        ("prepare", "prepares_twice"),
        ("release", "releases_the_unprepared"),
        ("sanitise", "sanitises_twice"),
        ("program", "programs_and_shows"),
        ("layouts", "layouts_are_told"),
        ("partition", "partitions_and_shows"),
        ("measure", "measures_in_time"),
    ],
)
def test_whatever_takes_too_long_is_caught(method: str, rule: str, root: Path) -> None:
    class Sleeps(Good):
        pass

    setattr(Sleeps, method, lambda *_: threading.Event().wait(5.0))
    checks = conformance(Sleeps, sysfs_root=root, work=True, image=IMAGE, limit=0.2)
    (check,) = (one for one in checks if str(one) == rule)
    result = check.result()
    assert result.outcome is Outcome.BROKEN
    assert f"{method}()" in result.why or "layouts()" in result.why
    assert "has not returned after 0.2 s" in result.why


def test_no_bad_driver_without_a_rule() -> None:
    assert sorted(BAD) == sorted(rule.name for rule in RULES)


def test_each_rule_has_a_sentence_and_a_source_in_the_contract() -> None:
    for rule in RULES:
        assert rule.sentence.endswith(".")
        if rule.source == "the module":
            assert "no option library" in str(base.__doc__)
            continue
        kind, _, member = rule.source.partition(".")
        source = getattr(base, kind)
        # A class variable has its sentence in the source alone.
        assert inspect.getdoc(getattr(source, member) if member else source), rule.name


def test_the_guide_has_all_rules() -> None:
    guide = Path(base.__file__).parents[2] / "doc/source/contributor/drivers.rst"
    rules = guide.read_text(encoding="utf-8").partition("What it says")[2]
    rows = re.findall(r"^``(\w+)`` +(\S.*)$", rules, re.MULTILINE)
    assert rows == [(rule.name, rule.sentence) for rule in RULES]


def tell_apart(path: Path) -> dict[str, tuple[Callable[[], Any], str]]:
    """Return effects by their kind: what does them, and how they are told."""

    def connect() -> None:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect_ex(str(path / "nobody"))

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
def test_effects_are_seen_unless_allowed(kind: str, tmp_path: Path) -> None:
    act, words = tell_apart(tmp_path)[kind]

    class Acts(Good):
        __module__ = Good.__module__  # this one imports more than a driver may

        def discover(self) -> Sequence[Device]:
            for name in ("old", "older"):
                if not (tmp_path / name).exists() and kind in ("remove", "rename"):
                    os.mknod(tmp_path / name)  # the interpreter tells nobody of this one
            if kind != "mkdir" or not (tmp_path / "made").exists():
                act()
            return super().discover()

    broken = told(judge(Acts, sysfs_root=tmp_path), Outcome.BROKEN)
    assert list(broken) == ["discovery_only_reads"]
    assert broken["discovery_only_reads"].startswith(words)
    if (tmp_path / "made").exists():
        (tmp_path / "made").rmdir()
    allowed = judge(Acts, sysfs_root=tmp_path, allow=[str(tmp_path), "/bin/true"])
    assert told(allowed, Outcome.BROKEN) == {}


def test_an_object_that_writes_when_it_is_made(root: Path) -> None:
    broken = told(judge(bad_drivers.HastyWriter, sysfs_root=root), Outcome.BROKEN)
    assert broken == {"making_touches_nothing": "opened /dev/full for writing"}


def test_the_entry_points_name_is_the_drivers(root: Path) -> None:
    broken = told(judge(Good, sysfs_root=root, entry_point="better"), Outcome.BROKEN)
    assert broken == {"is_named": "name is 'good', and the entry point's name 'better'"}


def test_the_host_is_not_worked_on_unasked(root: Path) -> None:
    left = told(judge(Good, sysfs_root=root), Outcome.LEFT_OUT)
    assert sorted(left) == sorted(rule.name for rule in RULES if rule.works)
    assert list(told(judge(Good, sysfs_root=root, work=True), Outcome.LEFT_OUT)) == [
        "programs_and_shows"
    ]


def test_a_check_is_a_test(root: Path) -> None:
    checks = {str(c): c for c in conformance(bad_drivers.Raises, sysfs_root=root)}
    assert checks["is_named"]().outcome is Outcome.HELD
    with pytest.raises(AssertionError, match=r"^discover\(\) raises nothing\. raised OSError: the"):
        checks["discovers"]()
    with pytest.raises(AssertionError, match="raised OSError"):
        checks["answers_are_stable"]()


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
def test_the_fake_driver(options: dict[str, Any], root: Path) -> None:
    (root / "sick").write_text("* on fire\n")
    (root / "absent").write_text("0000:0d:00.0\n")
    given = {
        key: value.format(root) if isinstance(value, str) else value
        for key, value in options.items()
    }
    idle = 0 in (given.get("num_devices"), given.get("num_handles"))
    results = judge(
        FakeDriver,
        given,
        sysfs_root=root,
        allow=[str(root / "divided")],
        work=not idle,
        image=IMAGE,
        entry_point="fake",
    )
    assert told(results, *SICK) == {}
    asked = {
        "measures_in_time": "sick",
        "prepares_twice": "prepare",
        "sanitises_twice": "sanitise",
        "layouts_are_told": "divided",
    }
    left = told(results, Outcome.LEFT_OUT)
    assert {rule: rule not in left for rule in asked} == {
        rule: option in given for rule, option in asked.items()
    }


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"fail": "out of smoke"}, "discovers"),
        ({"prepare": "fail"}, "prepares_twice"),
        ({"prepare": "ok", "releasing": "fail"}, "releases_the_unprepared"),
        ({"sanitise": "fail"}, "sanitises_twice"),
        ({"program": "fail"}, "programs_and_shows"),
    ],
)
def test_a_fake_driver_that_is_told_to_fail(options: dict[str, Any], rule: str, root: Path) -> None:
    broken = told(judge(FakeDriver, options, sysfs_root=root, work=True, image=IMAGE), *SICK)
    assert rule in broken


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
def test_the_generic_driver_on_a_tree(options: dict[str, Any], tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path / "sys")
    tree.function("0000:3d:00.0", totalvfs=16, numa_node=1, iommu_group="7")
    tree.virtual_functions("0000:3d:00.0", 9)
    tree.function("0000:3e:00.0", kernel_driver="vfio-pci", totalvfs=4)
    tree.function("0000:5e:00.0", vendor="10de", product="1eb8", class_code="030200")
    results = judge(GenericDriver, options, sysfs_root=tree.root, work=True, entry_point="generic")
    assert told(results, *SICK) == {}
    assert ("measures_in_time" in told(results, Outcome.HELD)) == (options.get("health") != ())


def test_every_driver_of_ours_is_tried_here() -> None:
    """A driver that is added to setup.cfg has to be added to this file."""
    from importlib import metadata

    points = metadata.distribution("cyborg").entry_points
    ours = {e.load() for e in points if e.group == "cyborg.accelerator.driver"}
    assert ours <= {FakeDriver, GenericDriver}


class TestCommand:
    def test_a_sound_driver(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["fake", "-o", "num_devices=2", "-o", "prepare=ok", "--sysfs-root", str(root)]
        assert main([*words, "--image", IMAGE]) == 0
        out = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in out[:-1]] == [rule.name for rule in RULES]
        assert out[-1] == f"{len(RULES)} rules: 34 held, 0 broken, 0 untold, 13 left out"

    def test_a_broken_one(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([f"{bad_drivers.__name__}:Raises", "--sysfs-root", str(root)]) == 1
        out = capsys.readouterr().out
        assert "BROKEN    raised OSError: the library is not there" in out
        assert "untold    discover() raised OSError: the library is not there" in out

    def test_options_of_a_multi_kind(self, tmp_path: Path) -> None:
        tree = SysfsTree(tmp_path / "sys")
        tree.function("0000:3e:00.0")
        words = ["generic", "-o", "devices=class=02", "-o", "devices=vendor=8086"]
        assert main([*words, "-o", "health=", "--sysfs-root", str(tree.root)]) == 0

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["faek"], "found 'faek' (did you mean fake?)"),
            (["fake", "-o", "cards=2"], "-o cards=2: expected KEY=VALUE, with a KEY of num_dev"),
            (["fake", "-o", "num_devices=two"], "-o num_devices=two: "),
            (["fake", "-o", "num_devices=-1"], "num_devices: found -1; expected 0 to 4096"),
            (["nowhere:Driver"], "nowhere:Driver cannot be loaded: ModuleNotFoundError"),
            (["cyborg.drivers.fake:Nothing"], "cannot be loaded: AttributeError"),
        ],
    )
    def test_what_cannot_begin(
        self, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(words) == 2
        captured = capsys.readouterr()
        assert said in captured.err
        assert captured.out == ""

    def test_the_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--list"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == len(RULES)


def test_the_table_says_what_each_rule_came_to(root: Path) -> None:
    lines = list(table(judge(bad_drivers.Misnamed, sysfs_root=root)))
    assert lines[1].split()[:2] == ["is_named", "BROKEN"]
