# SPDX-License-Identifier: Apache-2.0
"""Reconciliation of backends with failures."""

import gc
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.drivers.desired_state import DesiredStatus
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Health
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.drivers.fake import FakeDriver
from cyborg.tests.fixtures.hosts.reconciler_host import (
    ConductorDouble,
    ReconcilerHost,
    StartHost,
    section,
)
from cyborg.tests.fixtures.machine import tiers

SECOND = "0000:20:00.0"
TWO = "[agent]\nenabled_backends = f0\n[f0]\ndriver = fake\naddress = 0000:40:00.0\n"


class ExitingDriver(FakeDriver):
    """A driver that ends the thread that calls it."""

    where = ""

    def setup(self) -> None:
        """Leave, if it is step."""
        self._leave("setup")

    def discover(self) -> Any:
        """Leave, if it is step."""
        self._leave("discover")
        return super().discover()

    def measure(self, devices: Any) -> Any:
        """Leave, if it is step."""
        self._leave("measure")
        return super().measure(devices)

    @property
    def abilities(self) -> Any:
        """Leave, if it is step."""
        self._leave("abilities")
        return super().abilities

    def _leave(self, step: str) -> None:
        if self.where == step:
            sys.exit(7)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["setup", "discover", "measure", "abilities"])
def test_reconcile_driver_exits_fails_only_its_change(
    start_host: StartHost,
    conductor: ConductorDouble,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("cyborg.drivers.fake.FakeDriver", ExitingDriver)
    host = start_host(section("f1", sick=tmp_path / "sick"))
    host.reconcile_to(conductor.set_desired("f1"))
    monkeypatch.setattr(ExitingDriver, "where", method)
    error = host.reconcile_to(conductor.set_desired("f1", num_devices=2))["f1"]
    if method != "measure":  # which fails no discovery
        assert "SystemExit: 7" in str(error)
    monkeypatch.setattr(ExitingDriver, "where", "")
    assert host.reconcile_to(conductor.set_desired("f1", num_devices=3)) == {"f1": None}
    (backend,) = host.registry
    assert len(backend.snapshot.devices) == 3


def test_backend_driver_exits_recovers(
    start_host: StartHost, conductor: ConductorDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyborg.drivers.fake.FakeDriver", ExitingDriver)
    host = start_host()
    host.reconcile_to(conductor.set_desired("f1"))
    (backend,) = host.registry
    for method, status in (("discover", BackendStatus.ERROR), ("", BackendStatus.READY)):
        monkeypatch.setattr(ExitingDriver, "where", method)
        assert rediscover_all(host)[0] is status
        assert len(backend.snapshot.devices) == 1


def rediscover_all(host: ReconcilerHost) -> list[BackendStatus]:
    """Return the status of each backend after a discovery."""
    statuses: list[BackendStatus] = []
    news = threading.Event()

    def record(state: BackendState) -> None:
        statuses.append(state.status)
        news.set()

    for backend in host.registry:
        news.clear()
        backend.rediscover(record)
        assert news.wait(120)
    return statuses


@pytest.mark.slow
def test_reconcile_killed_between_changes_resumes(
    start_host: StartHost, conductor: ConductorDouble, tmp_path: Path
) -> None:
    gate, journal = tmp_path / "gate", tmp_path / "journal"
    text = section("f2", gate=gate, journal=journal)
    host = start_host(text)
    host.reconcile_to(conductor.set_desired("f1"))
    conductor.set_desired("f1", num_devices=2)
    host.reconciler.request(conductor.set_desired("f2", setup="hang", address=SECOND))
    while not journal.exists():
        assert host.reconciler.reported_generation == 1
    # As a kill leaves it: nothing is written after this.
    copy = tmp_path / "kept"
    shutil.copy(host.path, copy)
    host.stop()
    shutil.copy(copy, host.path)
    gate.touch()
    restarted = start_host(text)
    assert restarted.driver("f1").options["num_devices"] == 2, "its devices do not come and go"
    assert restarted.state_file.generation == 1, "it has not come to the whole"
    assert restarted.reconcile_to(conductor.generation) == {"f1": None, "f2": None}
    assert restarted.state_file.generation == conductor.generation


@pytest.mark.slow
def test_reconcile_older_generation_after_database_restore_is_applied(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    host = start_host()
    host.reconcile_to(conductor.set_desired("f1", num_devices=2))
    host.reconcile_to(conductor.set_desired("f1", num_devices=3))
    conductor.generation = 1
    conductor.set_desired("f1", num_devices=4)
    host = start_host()
    assert host.reconcile_to(2) == {"f1": None}
    assert host.driver("f1").options["num_devices"] == 4


@pytest.mark.slow
def test_reconcile_watcher_fails_keeps_change(
    start_host: StartHost, conductor: ConductorDouble, caplog: pytest.LogCaptureFixture
) -> None:
    def deaf() -> None:
        raise OSError("no ear")

    host = start_host(changed=deaf)
    for number in (1, 2):
        assert host.reconcile_to(conductor.set_desired("f1", num_devices=number)) == {"f1": None}
        assert host.driver("f1").options["num_devices"] == number
        assert json.loads(host.path.read_text())["data"]["generation"] == number
    host.reconcile_to(conductor.set_desired("f1", DesiredStatus.ABSENT))
    assert host.names() == []
    assert "Failed to notify watchers of a backend change" in caplog.text


@pytest.mark.slow
def test_reconcile_replaced_backend_keeps_unhealthy_devices(
    start_host: StartHost, conductor: ConductorDouble, tmp_path: Path
) -> None:
    sick = tmp_path / "sick"
    sick.write_text("* too hot\n")
    host = start_host(section("f1", sick=sick))
    host.reconcile_to(conductor.set_desired("f1"))
    assert device_health(host) == [Health.UNHEALTHY]
    sick.write_text("")
    host.reconcile_to(conductor.set_desired("f1", num_devices=2))
    assert device_health(host) == [Health.UNHEALTHY, Health.OK], (
        "it is watched until it was well for long"
    )


def device_health(host: ReconcilerHost) -> list[Health]:
    return [device.health for device in host.registry[0].snapshot.devices]


@pytest.mark.slow
def test_reload_after_an_upgrade_of_the_package_fails_and_names_the_restart(
    start_host: StartHost,
    conductor: ConductorDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "upgraded-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: upgraded\nVersion: 1.0\n")
    points = "[cyborg.accelerator.driver]\nupgraded = cyborg_test_upgraded:Upgraded\n"
    (package / "entry_points.txt").write_text(points)
    code = "from cyborg.drivers.fake import FakeDriver\nclass Upgraded(FakeDriver):\n"
    code += "    name = 'upgraded'\n"
    (tmp_path / "cyborg_test_upgraded.py").write_text(code)
    host = start_host()
    assert host.reconcile_to(conductor.set_desired("f1", driver="upgraded")) == {"f1": None}
    assert host.reconcile_to(conductor.set_desired("f1", driver="upgraded")) == {"f1": None}
    running = host.registry[0]
    (tmp_path / "cyborg_test_upgraded.py").write_text("import no_such_module\n")
    (error,) = host.reconcile_to(conductor.set_desired("f1", driver="upgraded")).values()
    assert "only a restart of cyborg-agent on this host loads the installed code" in str(error)
    assert host.registry[0] is running
    host.reconcile_to(conductor.set_desired("f1", DesiredStatus.ABSENT, driver="upgraded"))
    assert host.removed_driver("f1") is not None, "the loaded code still releases handles"


@pytest.mark.slow
def test_removed_driver_of_removed_backend_is_returned(
    start_host: StartHost, conductor: ConductorDouble, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    text = section("f1", journal=journal)
    host = start_host(text)
    host.reconcile_to(conductor.set_desired("f1", prepare="ok"))
    assert host.removed_driver("f1") is None, "it is not given up"
    assert host.removed_driver("f9") is None, "there never was one"
    host.reconcile_to(conductor.set_desired("f1", DesiredStatus.ABSENT, prepare="ok"))
    for life in (host, start_host(text)):
        driver = life.removed_driver("f1")
        assert isinstance(driver, FakeDriver)
        assert driver.options["journal"] == str(journal)


@pytest.mark.slow
@pytest.mark.parametrize("uninstalled", [False, True])
def test_removed_driver_of_backend_no_longer_enabled_has_the_options_of_its_section(
    start_host: StartHost, conductor: ConductorDouble, tmp_path: Path, uninstalled: bool
) -> None:
    """A backend that was dropped from enabled_backends, and then was perhaps uninstalled."""
    text = section("F1", journal=tmp_path / "journal")
    start_host("[agent]\nenabled_backends = F1\n" + text)
    host = start_host(text)
    if uninstalled:
        host.reconcile_to(conductor.set_desired("F1", DesiredStatus.ABSENT))
        host = start_host(text)
    assert host.names() == []
    driver = host.removed_driver("F1")
    assert isinstance(driver, FakeDriver)
    assert driver.options["journal"] == str(tmp_path / "journal")
    assert start_host().removed_driver("F1") is None, "its options are not known"


@pytest.mark.slow
def test_reconcile_two_backends_swap_devices(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    host = start_host()
    conductor.set_desired("f1")
    host.reconcile_to(conductor.set_desired("f2", address=SECOND))
    conductor.set_desired("f1", address=SECOND)
    assert host.reconcile_to(conductor.set_desired("f2")) == {"f1": None, "f2": None}
    assert [b.snapshot.devices[0].address for b in host.registry] == [SECOND, "0000:0c:00.0"]


@pytest.mark.slow
def test_reconcile_hundreds_of_changes_leak_nothing(
    start_host: StartHost, conductor: ConductorDouble, tmp_path: Path
) -> None:
    host = start_host()

    def change(number: int) -> None:
        act = number % 4
        if act == 3:
            host.reconcile_to(conductor.set_desired("f1", DesiredStatus.ABSENT))
        else:
            more: dict[str, Any] = {"fail": "no smoke"} if act == 2 else {}
            host.reconcile_to(conductor.set_desired("f1", num_devices=1 + number % 3, **more))

    for number in range(8):
        change(number)
    baseline = count_resources()
    for number in range(8, 8 + tiers.scale(128)):
        change(number)
    threads, files, drivers = count_resources()
    assert threads <= baseline[0] + 2
    assert files <= baseline[1] + 2
    assert drivers <= baseline[2] + 2


def count_resources() -> tuple[int, int, int]:
    """Return how many threads, open files and drivers there are."""
    gc.collect()
    # isinstance calls Python code for each of the million objects of the other tests.
    drivers = sum(FakeDriver in type(one).__mro__ for one in gc.get_objects())
    return threading.active_count(), len(os.listdir("/proc/self/fd")), drivers


@pytest.mark.slow
def test_removed_driver_uninstalled_raises_driver_failed(
    start_host: StartHost, conductor: ConductorDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start_host()
    host.reconcile_to(conductor.set_desired("f1"))
    host.reconcile_to(conductor.set_desired("f1", DesiredStatus.ABSENT))
    monkeypatch.setattr("cyborg.drivers.fake.FakeDriver", None)
    host = start_host()
    with pytest.raises(DriverFailed, match="driver fake cannot be loaded"):
        host.removed_driver("f1")


@pytest.mark.slow
def test_restart_after_reboot_runs_setup_again(
    start_host: StartHost, conductor: ConductorDouble, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    text = TWO + section("f1", journal=journal)
    host = start_host(text)
    host.reconcile_to(conductor.set_desired("f1", setup="ok"))
    host = start_host(text)
    assert count_setups(journal) == 1
    (tmp_path / "boot_id").write_text("boot-2")
    host = start_host(text)
    rediscover_all(host)
    assert count_setups(journal) == 2
    assert host.reconcile_to(conductor.generation) == {"f1": None}
    rediscover_all(start_host(text))
    assert count_setups(journal) == 2, "once in each boot"


@pytest.mark.slow
def test_restart_after_reboot_failed_setup_is_retried(
    start_host: StartHost,
    conductor: ConductorDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cyborg.drivers.fake.FakeDriver", ExitingDriver)
    host = start_host()
    host.reconcile_to(conductor.set_desired("f1"))
    (tmp_path / "boot_id").write_text("boot-2")
    monkeypatch.setattr(ExitingDriver, "where", "setup")
    host = start_host()
    assert rediscover_all(host) == [BackendStatus.ERROR]
    assert host.reconcile_to(conductor.generation) == {"f1": None}
    host = start_host()
    assert rediscover_all(host) == [BackendStatus.ERROR], "it is not set up in this boot yet"
    monkeypatch.setattr(ExitingDriver, "where", "")
    assert rediscover_all(host) == [BackendStatus.READY]
    assert host.reconcile_to(conductor.set_desired("f2", address=SECOND)) == {
        "f1": None,
        "f2": None,
    }
    monkeypatch.setattr(ExitingDriver, "where", "setup")
    assert rediscover_all(start_host()) == [BackendStatus.READY] * 2


def count_setups(journal: Path) -> int:
    return len(journal.read_text().splitlines())
