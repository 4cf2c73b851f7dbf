# SPDX-License-Identifier: Apache-2.0
"""What a publisher sends to Placement, and how often, when offers of device sets change."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.conductor.placement import offers
from cyborg.core.errors import Unavailable
from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_set import SetKind
from cyborg.db import schema
from cyborg.db.providers.write import mark_stale_existing
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import RecordingPlacement, make_publisher
from cyborg.tests.fixtures.device_sets.families import H100_FOUR
from cyborg.tests.fixtures.device_sets.host import SetHost, gpu_address, make_gpu
from cyborg.tests.fixtures.device_sets.saved import make_set_host
from cyborg.tests.fixtures.hosts.hosts import make_hosts

__all__ = ["node", "placement_adapter"]


@pytest.fixture
def recording(node: Node) -> RecordingPlacement:
    return RecordingPlacement(node.client)


@pytest.fixture
def host(sqlite_engine: sa.Engine, node: Node, recording: RecordingPlacement) -> SetHost:
    """Return a host that offers two pairs, whose requests to Placement are recorded."""
    found = make_set_host(sqlite_engine, node, H100_FOUR, wanted={"2": 2}, kind=SetKind.PCIE)
    found.publisher = make_publisher(sqlite_engine, recording)
    return found


def report(host: SetHost, unit: str, **facts: Any) -> None:
    """Report a GPU with these facts, and do not publish."""
    host.gpus[unit] = make_gpu(unit, **facts)
    host.host.send(make_hosts(host.engine), *host.gpus.values(), host.source)


def publish(host: SetHost, recording: RecordingPlacement) -> Counter[str]:
    """Publish until nothing is due; return how often each provider is compared with Placement."""
    recording.take()
    host.publish()
    names = {}
    for row in rows.read(host.engine, schema.providers):
        assert row["stale_since"] is None
        assert row["revision"] == row["published_revision"]
        names[f"GET /resource_providers/{row['uuid']}/inventories"] = row["name"].split("_")[1]
    return Counter(names[request] for request in recording.take() if request in names)


def test_each_provider_with_a_changed_offer_is_published_once(
    host: SetHost, recording: RecordingPlacement
) -> None:
    host.bind("3")
    assert publish(host, recording) == {"hgx:3": 1}
    # GPU 4 leaves the pair of GPUs 2 and 4; GPU 2 is offered alone.
    report(host, "04", health=Health.UNHEALTHY, health_reason="Xid 79")
    changed = {"hgx:4", "hgx:8"}
    assert publish(host, recording) == dict.fromkeys({gpu_address("04"), *changed}, 1)
    assert {name for name, size in host.offered().items() if size == 1} == {"8"}
    report(host, "04")
    assert publish(host, recording) == dict.fromkeys({gpu_address("04"), *changed}, 1)
    assert {name for name, size in host.offered().items() if size == 1} == set()


def test_set_that_a_plan_offers_in_its_own_batch_is_published_once(
    host: SetHost, recording: RecordingPlacement
) -> None:
    providers = [host.provider(name) for name in host.family]
    with host.engine.begin() as tx:
        mark_stale_existing(tx, providers, timeutils.utcnow())
    report(host, "04", health=Health.UNHEALTHY, health_reason="Xid 79")
    found = publish(host, recording)
    assert found == {**{f"hgx:{name}": 1 for name in host.family}, gpu_address("04"): 1, "hgx:8": 2}


@pytest.mark.parametrize("error", [RuntimeError("planted"), Unavailable("planted")])
def test_failed_plan_after_a_withdrawal_is_repeated(
    host: SetHost,
    recording: RecordingPlacement,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    plan_host = offers.plan_host

    def fail_once(tx: sa.Connection, *, withdrawn: Mapping[str, int], **options: Any) -> None:
        if withdrawn:
            monkeypatch.undo()
            raise error
        plan_host(tx, withdrawn=withdrawn, **options)

    monkeypatch.setattr(offers, "plan_host", fail_once)
    report(host, "04", health=Health.UNHEALTHY, health_reason="Xid 79")
    host.publish()
    (row,) = rows.read(host.engine, schema.providers, uuid=host.provider("4"))
    assert row["error"] == "internal error, see the log of cyborg-conductor"
    assert host.offers()["4"] == "withdrawing"
    rows.update(host.engine, schema.providers, row["id"], next_try_at=None)
    publish(host, recording)
    offered = host.offers()
    assert (offered["4"], offered["8"]) == ("withheld", "offered")
