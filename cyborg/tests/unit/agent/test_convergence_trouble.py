# SPDX-License-Identifier: Apache-2.0
"""Backends that change while everything goes wrong, and go on changing."""

import gc
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.device import Health
from cyborg.core.errors import DriverFailed
from cyborg.core.report import BackendStatus
from cyborg.core.wanted import Wish
from cyborg.drivers.fake import FakeDriver
from cyborg.fixtures.converging import Begin, Changing, Wisher

SECOND = "0000:20:00.0"
TWO = "[agent]\nenabled_backends = f0\n[f0]\ndriver = fake\naddress = 0000:40:00.0\n"


class Leaving(FakeDriver):
    """Ends the thread that calls it."""

    where = ""

    def setup(self) -> None:
        """Leave, if it is here."""
        self._leave("setup")

    def discover(self) -> Any:
        """Leave, if it is here."""
        self._leave("discover")
        return super().discover()

    def measure(self, devices: Any) -> Any:
        """Leave, if it is here."""
        self._leave("measure")
        return super().measure(devices)

    @property
    def abilities(self) -> Any:
        """Leave, if it is here."""
        self._leave("abilities")
        return super().abilities

    def _leave(self, here: str) -> None:
        if self.where == here:
            sys.exit(7)


@pytest.mark.parametrize("where", ["setup", "discover", "measure", "abilities"])
def test_a_driver_that_exits_ends_nothing_but_its_own_change(
    begin: Begin, wisher: Wisher, monkeypatch: pytest.MonkeyPatch, where: str, tmp_path: Path
) -> None:
    monkeypatch.setattr("cyborg.drivers.fake.FakeDriver", Leaving)
    host = begin()
    host.come_to(wisher.want("f1"))
    monkeypatch.setattr(Leaving, "where", where)
    error = host.come_to(wisher.want("f1", num_devices=2, sick=str(tmp_path / "sick")))["f1"]
    if where != "measure":  # which fails no discovery
        assert "SystemExit: 7" in str(error)
    monkeypatch.setattr(Leaving, "where", "")
    assert host.come_to(wisher.want("f1", num_devices=3)) == {"f1": None}
    (backend,) = host.fleet
    assert len(backend.view.devices) == 3


def test_a_running_backend_whose_driver_exits_goes_on(
    begin: Begin, wisher: Wisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyborg.drivers.fake.FakeDriver", Leaving)
    host = begin()
    host.come_to(wisher.want("f1"))
    (backend,) = host.fleet
    for where, status in (("discover", BackendStatus.ERROR), ("", BackendStatus.READY)):
        monkeypatch.setattr(Leaving, "where", where)
        assert looked(host)[0] is status
        assert len(backend.view.devices) == 1


def looked(host: Changing) -> list[BackendStatus]:
    """Return what a discovery of each backend leads to."""
    found: list[BackendStatus] = []
    news = threading.Event()
    for backend in host.fleet:
        news.clear()
        backend.rediscover(lambda state: (found.append(state.status), news.set()))  # type: ignore[func-returns-value]
        assert news.wait(20)
    return found


def test_killed_in_the_midst_of_several_changes(
    begin: Begin, wisher: Wisher, tmp_path: Path
) -> None:
    host, gate, journal = begin(), tmp_path / "gate", tmp_path / "journal"
    host.come_to(wisher.want("f1"))
    wisher.want("f1", num_devices=2)
    host.converger.nudge(
        wisher.want("f2", setup="hang", gate=str(gate), journal=str(journal), address=SECOND)
    )
    while not journal.exists():
        assert host.converger.revision == 1
    # As a kill leaves it: nothing is written after this.
    kept = tmp_path / "kept"
    shutil.copy(host.path, kept)
    host.stop()
    shutil.copy(kept, host.path)
    gate.touch()
    again = begin()
    assert again.driver("f1").options["num_devices"] == 2, "its devices do not come and go"
    assert again.held.revision == 1, "it has not come to the whole"
    assert again.come_to(wisher.revision) == {"f1": None, "f2": None}
    assert again.held.revision == wisher.revision


def test_a_database_that_was_restored_counts_on_from_an_older_revision(
    begin: Begin, wisher: Wisher
) -> None:
    host = begin()
    host.come_to(wisher.want("f1", num_devices=2))
    host.come_to(wisher.want("f1", num_devices=3))
    wisher.revision = 1
    wisher.want("f1", num_devices=4)
    host = begin()
    assert host.come_to(2) == {"f1": None}
    assert host.driver("f1").options["num_devices"] == 4


def test_whoever_cannot_go_along_undoes_nothing(
    begin: Begin, wisher: Wisher, caplog: pytest.LogCaptureFixture
) -> None:
    def deaf() -> None:
        raise OSError("no ear")

    host = begin(changed=deaf)
    for number in (1, 2):
        assert host.come_to(wisher.want("f1", num_devices=number)) == {"f1": None}
        assert host.driver("f1").options["num_devices"] == number
        assert json.loads(host.path.read_text())["revision"] == number
    host.come_to(wisher.want("f1", Wish.ABSENT))
    assert host.names() == []
    assert "The change of the backends is not seen everywhere" in caplog.text


def test_who_was_sick_is_not_well_by_a_reload(begin: Begin, wisher: Wisher, tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    sick.write_text("* too hot\n")
    host = begin()
    host.come_to(wisher.want("f1", sick=str(sick)))
    assert healths(host) == [Health.UNHEALTHY]
    sick.write_text("")
    host.come_to(wisher.want("f1", sick=str(sick), num_devices=2))
    assert healths(host) == [Health.UNHEALTHY, Health.OK], (
        "it is watched until it was well for long"
    )


def healths(host: Changing) -> list[Health]:
    return [device.health for device in host.fleet[0].view.devices]


def test_a_backend_that_was_given_up_still_takes_back(
    begin: Begin, wisher: Wisher, tmp_path: Path
) -> None:
    how = {"prepare": "ok", "journal": str(tmp_path / "journal")}
    host = begin()
    host.come_to(wisher.want("f1", **how))
    assert host.retired("f1") is None, "it is not given up"
    assert host.retired("f9") is None, "there never was one"
    host.come_to(wisher.want("f1", Wish.ABSENT, **how))
    for life in (host, begin()):
        driver = life.retired("f1")
        assert isinstance(driver, FakeDriver)
        assert driver.options["journal"] == how["journal"]


def test_two_whose_new_configurations_see_the_same(begin: Begin, wisher: Wisher) -> None:
    host = begin()
    wisher.want("f1")
    host.come_to(wisher.want("f2", address=SECOND))
    wisher.want("f1", address=SECOND)
    assert host.come_to(wisher.want("f2")) == {"f1": None, "f2": None}
    assert [b.view.devices[0].address for b in host.fleet] == [SECOND, "0000:0c:00.0"]


def test_hundreds_of_changes_leave_nothing(begin: Begin, wisher: Wisher, tmp_path: Path) -> None:
    host = begin()

    def change(number: int) -> None:
        act = number % 4
        if act == 3:
            host.come_to(wisher.want("f1", Wish.ABSENT))
        else:
            more = {"fail": "no smoke"} if act == 2 else {}
            host.come_to(wisher.want("f1", num_devices=1 + number % 3, **more))

    for number in range(20):
        change(number)
    before = held()
    for number in range(20, 220):
        change(number)
    threads, files, drivers = held()
    assert threads <= before[0] + 2
    assert files <= before[1] + 2
    assert drivers <= before[2] + 2


def held() -> tuple[int, int, int]:
    """Return how many threads, open files and drivers there are."""
    gc.collect()
    drivers = sum(isinstance(one, FakeDriver) for one in gc.get_objects())
    return threading.active_count(), len(os.listdir("/proc/self/fd")), drivers


def test_it_tells_why_when_the_driver_of_one_that_was_given_up_is_gone(
    begin: Begin, wisher: Wisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = begin()
    host.come_to(wisher.want("f1", Wish.ABSENT))
    monkeypatch.setattr("cyborg.drivers.fake.FakeDriver", None)
    host = begin()
    with pytest.raises(DriverFailed, match="driver fake cannot be loaded"):
        host.retired("f1")


def test_a_boot_of_the_host_undoes_what_was_set_up(
    begin: Begin, wisher: Wisher, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    how = {"setup": "ok", "journal": str(journal)}
    host = begin(TWO)
    host.come_to(wisher.want("f1", **how))
    host = begin(TWO)
    assert setups(journal) == 1
    (tmp_path / "boot_id").write_text("boot-2")
    host = begin(TWO)
    looked(host)
    assert setups(journal) == 2
    assert host.come_to(wisher.revision) == {"f1": None}
    looked(begin(TWO))
    assert setups(journal) == 2, "once in each boot"


def test_a_setup_that_fails_after_a_boot_is_tried_again(
    begin: Begin, wisher: Wisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyborg.drivers.fake.FakeDriver", Leaving)
    host = begin()
    host.come_to(wisher.want("f1"))
    (tmp_path / "boot_id").write_text("boot-2")
    monkeypatch.setattr(Leaving, "where", "setup")
    host = begin()
    assert looked(host) == [BackendStatus.ERROR]
    assert host.come_to(wisher.revision) == {"f1": None}
    host = begin()
    assert looked(host) == [BackendStatus.ERROR], "it is not set up in this boot yet"
    monkeypatch.setattr(Leaving, "where", "")
    assert looked(host) == [BackendStatus.READY]
    assert host.come_to(wisher.want("f2", address=SECOND)) == {"f1": None, "f2": None}
    monkeypatch.setattr(Leaving, "where", "setup")
    assert looked(begin()) == [BackendStatus.READY] * 2


def setups(journal: Path) -> int:
    return len(journal.read_text().splitlines())
