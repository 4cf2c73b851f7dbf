# SPDX-License-Identifier: Apache-2.0
"""The record of a run: what result its phases give a test, and the order of the groups."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cyborg.tests.fixtures.runs import runner, scheduler
from cyborg.tests.fixtures.runs.record import Record, RecordReader

TEST = "cyborg/tests/unit/test_a.py::test_b[x y]"


def phase(name: str, outcome: str = "passed", **values: Any) -> dict[str, Any]:
    """Return the event of a phase."""
    details = {"reason": f"{outcome} in {name}", "output": "", **values}
    return {"event": "phase", "test": TEST, "phase": name, "outcome": outcome, "seconds": 1.0} | (
        details if outcome != "passed" else {}
    )


PASSED = [phase("setup"), phase("call"), phase("teardown")]


@pytest.mark.parametrize(
    ("events", "outcome", "reason"),
    [
        (PASSED, "passed", ""),
        ([phase("setup", "skipped"), phase("teardown")], "skipped", "skipped in setup"),
        ([phase("setup", "failed"), phase("teardown")], "failed", "failed in setup"),
        ([phase("setup"), phase("call", "failed"), phase("teardown")], "failed", "failed in call"),
        ([*PASSED[:2], phase("teardown", "failed")], "failed", "failed in teardown"),
        (
            [phase("setup"), phase("call", "skipped"), phase("teardown", "failed")],
            "failed",
            "failed in teardown",
        ),
        ([phase("setup"), phase("???", "failed")], "failed", "failed in ???"),
        (
            [phase("setup"), phase("call", "failed"), phase("teardown", "failed")],
            "failed",
            "failed in call; failed in teardown",
        ),
    ],
)
def test_record_phases_give_one_result(
    events: list[dict[str, Any]], outcome: str, reason: str
) -> None:
    record = Record(collected=[TEST])
    record.add({"event": "started", "test": TEST, "pid": 1, "limit": 5.0, "time": 0.0})
    assert record.running
    for event in events:
        record.add(event)
    assert record.results[TEST].outcome == outcome
    assert record.results[TEST].reason == reason
    assert record.seconds[TEST] == len(events)
    assert (record.count(outcome), record.missing(), record.running) == (1, [], {})


def test_record_failure_of_a_teardown_is_the_phase_of_a_failed_call() -> None:
    record = Record(collected=[TEST])
    for event in (phase("setup"), phase("call", "failed"), phase("teardown", "failed")):
        record.add(event)
    assert record.results[TEST].phase == "teardown", "such a test is not run again"


def test_record_test_without_last_phase_has_no_result() -> None:
    record = Record(collected=[TEST])
    for event in PASSED[:2]:
        record.add(event)
    assert record.missing() == [TEST]


def test_reader_incomplete_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "record"
    reader = RecordReader(path)
    assert reader.read().collected == []
    line = json.dumps({"event": "collected", "tests": [TEST]})
    path.write_text(line[:20])
    assert reader.read().collected == []
    path.write_text(f"{line}\n")
    assert reader.read().collected == [TEST]


@pytest.mark.parametrize("damaged", ['{"event": "pha', '{"event": "phase"}', "1", "\udcff"])
def test_reader_damaged_line_is_a_problem(damaged: str, tmp_path: Path) -> None:
    path = tmp_path / "record"
    lines = [json.dumps({"event": "collected", "tests": [TEST]}), damaged, json.dumps(PASSED[2])]
    path.write_text("".join(f"{line}\n" for line in lines), errors="surrogateescape")
    record = RecordReader(path).read()
    assert [problem.partition(":")[0] for problem in record.problems] == [
        "damaged line of the record"
    ]
    assert (record.collected, record.count("passed")) == ([TEST], 1)


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("lab/test_uevents.py", "lab"),
        ("lab/test_gpu_service.py", "lab/test_gpu_service.py"),
        ("functional/test_tempest.py", "keystone"),
        ("functional/console/test_console_keystone.py", "keystone"),
        ("unit/core/binding/test_states.py", "unit/core/binding/test_states.py"),
    ],
)
def test_group_of_a_test(path: str, group: str) -> None:
    assert scheduler.group_of(f"cyborg/tests/{path}::test_b[a::b]") == group


def test_durations_of_the_last_run_order_the_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "durations.json"
    monkeypatch.setenv(scheduler.DURATIONS, str(path))
    estimate = scheduler.read_durations()
    assert max(estimate, key=lambda group: estimate[group]) == scheduler.LONG_GROUPS[0]
    path.write_text(json.dumps({"lab": 7.5}))
    assert scheduler.read_durations() == {**estimate, "lab": 7.5}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"lab": null}', "\x00"])
def test_durations_damaged_are_unknown(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "durations.json"
    monkeypatch.setenv(scheduler.DURATIONS, str(path))
    unknown = scheduler.read_durations()
    path.write_text(text)
    assert scheduler.read_durations() == unknown


def test_durations_are_kept_for_each_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "folder" / "durations.json"
    runner.save_durations(Record(seconds=Counter({"cyborg/tests/lab/test_a.py::test": 7.5})), path)
    assert scheduler.load_durations(path) == {"lab": 7.5}
    example = tmp_path / "example"
    example.touch()
    assert path.stat().st_mode == example.stat().st_mode, "as the umask says"
    part = Counter({"cyborg/tests/lab/test_a.py::test": 0.5, "cyborg/tests/unit/test_b.py::t": 2})
    runner.save_durations(Record(seconds=part), path, has_parts=True)
    assert scheduler.load_durations(path) == {"lab": 7.5, "unit/test_b.py": 2.0}
    runner.save_durations(Record(seconds=part), path)
    assert scheduler.load_durations(path) == {"lab": 0.5, "unit/test_b.py": 2.0}
    path.unlink()
    path.mkdir()
    runner.save_durations(Record(), path)
    assert "the durations of the tests are not kept: " in capsys.readouterr().out
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("options", "selects"),
    [(["-m", "static"], True), (["-m", "not static"], False), (["--tier", "default"], False)],
)
def test_run_of_a_mark_has_parts_of_groups(options: list[str], selects: bool) -> None:
    assert runner.selects_marked(["-q", *options]) is selects


@pytest.mark.static
def test_longest_groups_exist() -> None:
    folder = Path(__file__).parents[1]
    files = [name for name in scheduler.LONG_GROUPS if name.endswith(".py")]
    assert [name for name in files if not (folder / name).exists()] == []
