# SPDX-License-Identifier: Apache-2.0
"""Backends that come, change and go while the agent runs."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.report import BackendStatus
from cyborg.core.wanted import Wish
from cyborg.fixtures.converging import EPOCH, Begin, Changing, Wisher
from cyborg.fixtures.drivers import LONG

TWO = "[agent]\nenabled_backends = f0, f1\n[f0]\ndriver = fake\n[f1]\ndriver = fake\n"
TWO += "address = 0000:20:00.0\nnum_devices = 3\n"


def cards(host: Changing, name: str) -> int:
    backend = host.fleet.get(name)
    assert backend is not None
    assert backend.view.state.status is BackendStatus.READY
    return len(backend.view.devices)


def test_a_backend_comes_changes_and_goes(begin: Begin, wisher: Wisher) -> None:
    host = begin()
    assert host.come_to(wisher.want("f1", num_devices=2)) == {"f1": None}
    assert wisher.asked.calls[0] == ("h", EPOCH)
    first = host.fleet[0]
    assert cards(host, "f1") == 2, "it has discovered before it is taken in"
    assert host.come_to(wisher.want("f1", num_devices=5)) == {"f1": None}
    assert cards(host, "f1") == 5
    assert first.join(LONG), "the old one has ended"
    last = host.fleet[0]
    assert host.come_to(wisher.want("f1", Wish.ABSENT)) == {"f1": None}
    assert host.names() == []
    assert last.join(LONG)


def test_what_did_not_change_is_left_alone(begin: Begin, wisher: Wisher) -> None:
    host = begin()
    host.come_to(wisher.want("f1"))
    running = host.fleet[0]
    assert host.come_to(wisher.want("f2", address="0000:20:00.0")) == {"f1": None, "f2": None}
    assert host.fleet[0] is running
    host.come_to(wisher.want("f1", Wish.DISABLED))
    assert host.fleet[0] is running, "closing it to requests is the conductor's"
    host.come_to(wisher.want("f1", Wish.DISABLED))
    assert host.fleet[0] is not running, "the same once more is a reload"


def test_options_lie_over_the_file_s(begin: Begin, wisher: Wisher) -> None:
    host = begin(f"{TWO}[late]\ndriver = fake\nnum_handles = 3\naddress = 0000:40:00.0\n")
    host.come_to(wisher.want("f1", num_handles="2"))
    assert (host.driver("f1").options["num_devices"], cards(host, "f1")) == (3, 3)
    assert host.driver("f1").options["num_handles"] == 2
    assert host.names() == ["f0", "f1"]
    host.come_to(wisher.want("late"))
    assert host.driver("late").options["num_handles"] == 3, "its section, configured or not"
    assert host.come_to(wisher.want("f0", driver="generic")) == {
        "f1": None,
        "late": None,
        "f0": None,
    }
    assert host.driver("f0").options["devices"] == [], "the section is another driver's"
    host.come_to(wisher.forget("f1"))
    assert host.driver("f1").options["num_handles"] == 16, "as the file says, again"


@pytest.mark.parametrize(
    ("wish", "error"),
    [
        ({"num_devices": -1}, "[f1] num_devices: found -1; expected 0 to 4096"),
        ({"num_devces": 2}, "config: the driver has no option 'num_devces'; did you mean"),
        (
            {"num_devices": "many"},
            "config: num_devices: found 'many'; expected a value of type int",
        ),
        ({"fail": "out of smoke"}, "out of smoke"),
        ({"setup": "fail"}, "setup: told to fail: setup of the host"),
        ({"driver": "fke"}, "found 'fke' (did you mean fake?); expected one of the drivers of"),
    ],
)
def test_what_cannot_be_leaves_the_old_one(
    begin: Begin, wisher: Wisher, wish: dict[str, Any], error: str, tmp_path: Path
) -> None:
    host = begin(TWO)
    host.come_to(wisher.want("f1", num_devices=2))
    running = list(host.fleet)
    outcomes = host.come_to(wisher.want("f1", **wish))
    assert str(outcomes["f1"]).startswith(error)
    assert list(host.fleet) == running
    outcomes = host.come_to(wisher.want("f0", Wish.DISABLED))
    assert str(outcomes["f1"]).startswith(error), "told each time, and not tried again"
    assert host.fleet[1] is running[1]
    kept = json.loads(host.path.read_text())["backends"][0]
    assert kept["applied"]["config"] == {"num_devices": 2}
    again = begin(TWO)
    assert again.driver("f1").options["num_devices"] == 2
    host_comes_back = again.come_to(wisher.want("f1", num_devices=2))
    assert host_comes_back["f1"] is None


@pytest.mark.parametrize("how", [{"hang": 2.0}, {"setup": "hang"}])
def test_what_takes_too_long(
    begin: Begin, wisher: Wisher, how: dict[str, Any], tmp_path: Path
) -> None:
    host = begin(timeout=0.2)
    host.come_to(wisher.want("f1"))
    running, gate = host.fleet[0], tmp_path / "gate"
    outcomes = host.come_to(wisher.want("f1", **how, gate=str(gate)))
    what = "setup" if "setup" in how else "discovery"
    assert outcomes == {"f1": f"{what} takes longer than 0.2 s"}
    assert host.fleet[0] is running
    gate.touch()


def test_it_is_set_up_when_an_operator_changes_it_and_not_at_each_start(
    begin: Begin, wisher: Wisher, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    host = begin()
    host.come_to(wisher.want("f1", setup="ok", journal=str(journal)))
    host.come_to(wisher.want("f1", setup="ok", journal=str(journal)))
    assert journal.read_text().splitlines() == ['{"act": "setup"}'] * 2
    host = begin()
    assert host.names() == ["f1"]
    assert len(journal.read_text().splitlines()) == 2


def test_a_start_asks_nobody(begin: Begin, wisher: Wisher) -> None:
    host = begin(TWO)
    host.come_to(wisher.want("f1", Wish.ABSENT))
    host.come_to(wisher.want("f5", num_devices=4, address="0000:50:00.0"))
    wisher.away = True
    asked = len(wisher.asked.calls)
    host = begin(TWO)
    assert host.names() == ["f0", "f5"]
    assert host.driver("f5").options["num_devices"] == 4
    assert len(wisher.asked.calls) == asked
    host.converger.nudge(wisher.revision)
    wisher.asked.wait_for(asked + 1)
    wisher.away = False
    assert host.come_to(wisher.revision) == {"f1": None, "f5": None}, "told in each life"


def test_killed_before_the_word_is_told(begin: Begin, wisher: Wisher) -> None:
    host = begin()
    revision = wisher.want("f1", fail="no smoke")
    host.converger.told = lambda *_: None  # type: ignore[method-assign]
    host.come_to(revision)
    assert host.converger.revision == 0
    host = begin()
    assert host.held.revision == revision
    assert host.converger.revision == 0, "nobody has heard of it in this life"
    assert host.come_to(revision) == {"f1": "no smoke"}
    assert host.converger.revision == revision


def test_what_was_applied_and_cannot_be_any_more_is_an_error_of_its_own(
    begin: Begin, wisher: Wisher, caplog: pytest.LogCaptureFixture
) -> None:
    host = begin()
    host.come_to(wisher.want("f1"))
    host.come_to(wisher.want("f2", address="0000:20:00.0"))
    body = json.loads(host.path.read_text())
    body["backends"][0]["applied"]["driver"] = "gone"
    host.path.write_text(json.dumps(body))
    host = begin()
    assert host.names() == ["f1", "f2"]
    with pytest.raises(Exception, match="found 'gone'; expected one of the drivers of"):
        host.driver("f1").discover()
    assert "Backend f1 cannot be made as it was" in caplog.text


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"revision": 1, "backends": [{}]}'])
def test_a_damaged_memory_counts_for_nothing(
    begin: Begin, wisher: Wisher, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = begin()
    host.come_to(wisher.want("f1"))
    host.path.write_text(damage)
    host = begin()
    assert (host.names(), host.held.revision) == ([], 0)
    aside = host.path.with_name("backends-h.json.broken")
    assert aside.read_text() == damage
    assert f"is moved to {aside}" in caplog.text
    assert host.come_to(wisher.revision) == {"f1": None}
    assert host.names() == ["f1"]


def test_a_memory_that_cannot_be_written_is_no_failure_of_the_change(
    begin: Begin, wisher: Wisher, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "agent").write_text("in the way")
    host = begin()
    assert host.come_to(wisher.want("f1")) == {"f1": None}
    assert "What is wanted of this host cannot be kept" in caplog.text
    assert host.come_to(wisher.want("f1", num_devices=2)) == {"f1": None}
    assert cards(host, "f1") == 2
    (tmp_path / "agent").unlink()


def test_nudges_during_one_round_are_one_more(begin: Begin, wisher: Wisher) -> None:
    host = begin()
    first = wisher.want("f1")
    wisher.hold()
    host.converger.nudge(first)
    wisher.asked.wait_for(1)
    for number in range(2, 5):
        wisher.want("f1", num_devices=number)
        host.converger.nudge(wisher.revision)
    wisher.free()
    host.told.wait_until((wisher.revision,))
    assert len(wisher.asked.calls) == 2
    assert cards(host, "f1") == 4
    assert host.converger.nudge(wisher.revision) == wisher.revision
    assert len(wisher.asked.calls) == 2, "nothing is asked for what has been reached"


def test_nudges_from_everywhere(begin: Begin, wisher: Wisher) -> None:
    host = begin()

    def pester() -> None:
        for _ in range(50):
            host.converger.nudge(wisher.revision)

    threads = [threading.Thread(target=pester) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(1, 6):
        wisher.want("f1", num_devices=number)
    for thread in threads:
        thread.join(LONG)
    host.come_to(wisher.revision)
    assert cards(host, "f1") == 5
    assert host.names() == ["f1"]


def test_a_word_that_is_not_taken_is_told_again(begin: Begin, wisher: Wisher) -> None:
    host = begin()
    revision = wisher.want("f1")
    host.come_to(revision)
    host.converger.told(revision, False)
    host.converger.nudge(revision)
    host.told.wait_for(2)
    assert host.told.calls == [(revision,), (revision,)]


def test_a_word_that_was_not_heard_is_told_again(begin: Begin, wisher: Wisher) -> None:
    host = begin()
    revision = wisher.want("f1")
    host.come_to(revision)
    running, asked = host.fleet[0], len(wisher.asked.calls)
    host.converger.nudge(revision)
    host.converger.nudge(revision, again=True)
    assert len(wisher.asked.wait_for(asked + 1)) == asked + 1, "a hello's answer is no question"
    assert len(host.told.wait_for(2)) == 2
    assert host.fleet[0] is running


@pytest.mark.parametrize("name", ["agent", "oslo_x", "sock"])
def test_a_name_that_is_not_free(begin: Begin, wisher: Wisher, name: str) -> None:
    host = begin("[agent]\nsocket_dir = /nowhere\nsocket_drivers = sock\n")
    (error,) = host.come_to(wisher.want(name)).values()
    assert name in str(error)
    assert host.names() == []


@pytest.mark.parametrize("nonsense", [7, {}, {"revision": 3, "backends": [{"backend": "f0"}]}])
def test_a_malformed_answer_changes_nothing(
    begin: Begin, wisher: Wisher, caplog: pytest.LogCaptureFixture, nonsense: Any
) -> None:
    host = begin(TWO)
    wisher.nonsense = nonsense
    running = list(host.fleet)
    host.converger.nudge(3)
    wisher.asked.wait_for(1)
    host.come_to(wisher.want("f9", Wish.ABSENT))
    assert list(host.fleet) == running
    assert "What is wanted of this host is not known: malformed wish" in caplog.text


def test_a_stop_ends_what_hangs(begin: Begin, wisher: Wisher, tmp_path: Path) -> None:
    host, gate = begin(), tmp_path / "gate"
    journal = tmp_path / "journal"
    host.converger.nudge(wisher.want("f1", setup="hang", gate=str(gate), journal=str(journal)))
    wisher.asked.wait_for(1)
    host.stop()
    assert host.names() == []
    assert not host.path.exists(), "what was not done is not remembered"
    gate.touch()
