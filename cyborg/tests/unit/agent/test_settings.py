# SPDX-License-Identifier: Apache-2.0
"""Effective options and remarks of backends, and adoptions that are refused."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.drivers.registry import HIDDEN, Option, Source, list_settings
from cyborg.core.inventory import report
from cyborg.core.inventory.report import BackendState
from cyborg.drivers.fake import FakeDriver
from cyborg.testing.machine import HostTree
from cyborg.tests.fixtures.hosts.reconciler_host import ConductorDouble, ReconcilerHost, StartHost
from cyborg.tests.fixtures.hosts.scripted_driver import CallRecorder

CARD, OTHER, NONE = "0000:01:00.0", "0000:02:00.0", "0000:09:00.0"


def state(host: ReconcilerHost, name: str) -> BackendState:
    backend = host.registry.get(name)
    assert backend is not None
    return backend.snapshot.state


def effective(host: ReconcilerHost, name: str) -> dict[str, tuple[Any, str]]:
    return {s.name: (s.value, str(s.source)) for s in state(host, name).settings or ()}


@pytest.mark.slow
def test_settings_have_source_of_each_value(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    text = "[agent]\nenabled_drivers = fake\n[fake]\nnum_devices = 3\nnum_handles = 2\n"
    host = start_host(text)
    values = effective(host, "fake")
    assert list(values) == [option.name for option in FakeDriver.OPTIONS]
    assert (values["num_devices"], values["num_handles"]) == ((3, "file"), (2, "file"))
    assert values["address"] == ("0000:0c:00.0", "default")
    host.reconcile_to(conductor.set_desired("fake", num_handles="4"))
    values = effective(host, "fake")
    assert (values["num_devices"], values["num_handles"]) == ((3, "file"), (4, "api"))
    host.reconcile_to(conductor.set_desired("f1", address="0000:20:00.0"))
    assert effective(host, "f1")["num_devices"] == (1, "default")
    assert effective(host, "f1")["address"] == ("0000:20:00.0", "api")
    host.reconcile_to(conductor.remove_desired("fake"))
    assert effective(host, "fake")["num_handles"] == (2, "file")


@pytest.mark.slow
def test_settings_secret_is_masked_everywhere(
    start_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = Option("api_token", "str", "", "A token.", host_only=True, secret=True)
    monkeypatch.setattr(FakeDriver, "OPTIONS", (*FakeDriver.OPTIONS, token))
    host = start_host("[agent]\nenabled_drivers = fake\n[fake]\napi_token = hunter2\n")
    assert host.driver("fake").options["api_token"] == "hunter2"
    assert effective(host, "fake")["api_token"] == (HIDDEN, "file")
    assert "hunter2" not in repr(state(host, "fake"))
    host = start_host("[agent]\nenabled_drivers = fake\n")
    assert effective(host, "fake")["api_token"] == ("", "default"), "that none is set is shown"


def test_settings_unserialisable_values_are_text() -> None:
    options = [Option("ratio", "float", 1.0, "A ratio."), Option("names", "list", (), "Names.")]
    values = {"ratio": float("nan"), "names": ["a\0", "x" * 10_000]}
    ratio, names = list_settings(options, values, {"ratio": Source.FILE})
    assert (ratio.value, names.value) == ("nan", ["a", "x" * 4096])
    json.dumps([ratio.to_dict(), names.to_dict()], allow_nan=False)


@pytest.mark.slow
def test_digest_depends_on_settings_and_remarks(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    host = start_host()
    host.reconcile_to(conductor.set_desired("f1"))
    before = report.digest([], [state(host, "f1")])
    host.reconcile_to(conductor.set_desired("f1", hang=0.001))
    assert report.digest([], [state(host, "f1")]) != before
    assert "settings" not in state(host, "f1").without_details().to_dict(), "a hello is short"


def host_with_cards(folder: Path) -> HostTree:
    tree = HostTree(folder)
    for address in (CARD, OTHER):
        tree.add_function(address)
    return tree


@pytest.mark.slow
@pytest.mark.parametrize("address", [NONE, OTHER])
def test_adoption_refused_changes_nothing(
    start_host: StartHost, conductor: ConductorDouble, tmp_path: Path, address: str
) -> None:
    tree = host_with_cards(tmp_path)
    tree.add_interface("eth0", OTHER)
    tree.add_route("eth0")
    host = start_host(sysfs_root=tree.root)
    conductor.set_desired("gen", driver="generic", adopt=[CARD])
    assert host.reconcile_to(conductor.generation) == {"gen": None}
    running = host.registry.get("gen")
    outcome = host.reconcile_to(
        conductor.set_desired("gen", driver="generic", adopt=[CARD, address])
    )["gen"]
    assert str(outcome).startswith(f"{address} cannot be adopted: ")
    assert host.registry.get("gen") is running
    assert (
        host.reconcile_to(conductor.set_desired("gen", driver="generic", adopt=[CARD]))["gen"]
        is None
    )


@pytest.mark.slow
def test_start_adopted_device_missing_succeeds(
    start_host: StartHost, conductor: ConductorDouble, tmp_path: Path
) -> None:
    tree = host_with_cards(tmp_path)
    host = start_host(sysfs_root=tree.root)
    host.reconcile_to(conductor.set_desired("gen", driver="generic", adopt=[CARD]))
    tree.remove_function(CARD)
    restarted = start_host(sysfs_root=tree.root)
    assert restarted.driver("gen").options["adopt"] == [CARD]
    generation = conductor.set_desired("gen", driver="generic", adopt=[CARD, OTHER])
    assert restarted.reconcile_to(generation) == {"gen": None}, "only what is added is checked"
    remarks = state(restarted, "gen").remarks or ()
    assert [remark.partition(" ")[0] for remark in remarks] == [CARD]


@pytest.mark.slow
def test_remarks_changed_are_logged_once(
    start_host: StartHost,
    conductor: ConductorDouble,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    tree = host_with_cards(tmp_path)
    host = start_host(sysfs_root=tree.root)
    host.reconcile_to(
        conductor.set_desired("gen", driver="generic", devices=["vendor=8086", "vendor=15b3"])
    )
    backend = host.registry.get("gen")
    assert backend is not None

    def rediscover() -> None:
        done = CallRecorder()
        backend.rediscover(done)
        done.wait_for(1)

    rediscover()
    rediscover()
    line = "rule 'vendor=15b3' matches no device of this host"
    warned = [r for r in caplog.records if line in r.getMessage()]
    assert [r.levelno for r in warned] == [logging.WARNING]
    assert state(host, "gen").remarks == (line,)
    tree.add_function("0000:0a:00.0", "15b3", "101e", "020000")
    rediscover()
    assert state(host, "gen").remarks == ()
    assert "Driver has no more warnings about its configuration" in caplog.text
