# SPDX-License-Identifier: Apache-2.0
"""When a discovery reads the facts of a card: with its lock."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.gpu import card_locks
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.testing.vgpu_host import SimulatedVgpuHost
from cyborg.tests.unit.drivers.gpu.simulated_vgpus import (
    CARD,
    discover,
    make_access,
    make_host,
    offered,
)

VFS = [f"0000:41:00.{n}" for n in range(1, 8)] + ["0000:41:01.0"]
RULE = f"address={CARD},type=H200X-70C|H200X-35C"
PAIR = "2xH200X-70C"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedVgpuHost:
    found = make_host(tmp_path)
    found.redirect(monkeypatch.setattr)
    found.manage_sriov(CARD, enable=False)
    return found


def make(host: SimulatedVgpuHost, rules: Sequence[str] = (), **access: Any) -> GpuDriver:
    options = {"devices": ["address=*"], "reset": "never", "vgpu_types": rules}
    if rules:
        options["vgpu_layouts"] = [PAIR]
    return GpuDriver("gpus", options, host.root, replace(make_access(host), **access))


def test_discovery_does_not_read_a_card_while_its_layout_changes(
    host: SimulatedVgpuHost,
) -> None:
    """The change of SR-IOV shows that the facts are outdated, and others follow."""
    is_changing, may_continue = threading.Event(), threading.Event()
    access = make_access(host)

    def create(*arguments: Any) -> None:
        is_changing.set()
        assert may_continue.wait(60)
        access.create_vgpu(*arguments)

    driver = make(host, [RULE], create_vgpu=create)
    assert offered(driver) == {CARD: [CARD]}
    item = WorkItem("gpus", CARD, "", "")
    job = threading.Thread(target=driver.partition, args=(item, PAIR))
    job.start()
    assert is_changing.wait(60)
    host.opens.clear()
    assert offered(driver) == {}, "its layout is being changed"
    assert host.opens == []
    may_continue.set()
    job.join(60)
    assert set(host.opens) == {CARD}, "the job reads what it has changed"
    host.opens.clear()
    assert offered(driver) == {f"{CARD}-H200X-70C": VFS[:2]}
    assert host.opens == []


def test_card_that_another_thread_changes_is_not_given_to_a_server(
    host: SimulatedVgpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_locks, "READ_TIMEOUT", 0.01)
    driver = make(host)
    discover(driver)
    is_locked, may_end = threading.Event(), threading.Event()

    def change() -> None:
        with card_locks.locked(CARD):
            is_locked.set()
            assert may_end.wait(60)

    job = threading.Thread(target=change)
    job.start()
    assert is_locked.wait(60)
    host.opens.clear()
    with pytest.raises(DriverFailed, match="is being changed by another job"):
        driver.check_unused(CARD)
    assert host.opens == []
    may_end.set()
    job.join(60)
    driver.check_unused(CARD)
    assert host.opens == [CARD]
