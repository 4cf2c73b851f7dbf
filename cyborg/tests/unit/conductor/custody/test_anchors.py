# SPDX-License-Identifier: Apache-2.0
"""The daily notification with the last records of custody logs."""

import json
from datetime import timedelta

import sqlalchemy as sa

from cyborg.conductor.custody.sealer import CustodyAnchors
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.custody import parse_anchors
from cyborg.db import schema
from cyborg.db.custody import read
from cyborg.db.custody import write as custody_keys
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.unit.conductor.custody.test_sealer import DEVICES, KEYS, NOW, Env


def make_anchors(env: Env, *drivers: str) -> CustodyAnchors:
    conf = make_conf()
    is_enabled(conf)
    conf.set_override("driver", list(drivers), group=GROUP)
    return CustodyAnchors(
        env.uow, NotificationBuilder(conf, now=lambda: env.time), lambda: env.time
    )


def make_env(engine: sa.Engine) -> Env:
    env = Env(custody_keys.attach(engine, KEYS))
    env.add(*DEVICES, DEVICES[0])
    env.sealer.run_once()
    for head in rows.read(engine, schema.custody_heads):
        rows.update(engine, schema.custody_heads, head["id"], anchored_at=NOW)
    return env


def test_each_chain_is_notified_once_a_day_by_one_conductor(engine: sa.Engine) -> None:
    env = make_env(engine)
    anchors = [make_anchors(env, "messagingv2") for _ in range(2)]
    assert [one.sweep() for one in anchors] == [0, 0]
    env.time += timedelta(days=1, seconds=1)
    assert [one.sweep() for one in anchors] == [2, 0]
    (message,) = rows.read(engine, schema.outbox)
    assert message["payload"]["event_type"] == "custody.anchor.end"
    # The data is a file for ``device-custody --anchor``.
    found = parse_anchors(json.dumps(message["payload"]["payload"]["data"]))
    assert found == {device: read.tip(env.head(device)) for device in DEVICES}
    env.time += timedelta(days=1, seconds=1)
    assert sum(one.sweep() for one in anchors) == 2


def test_head_that_no_conductor_wrote_is_not_notified(sqlite_engine: sa.Engine) -> None:
    env = make_env(sqlite_engine)
    head = rows.read(sqlite_engine, schema.custody_heads, device_uuid=DEVICES[1])[0]
    rows.update(sqlite_engine, schema.custody_heads, head["id"], hash="0" * 64)
    env.time += timedelta(days=2)
    assert make_anchors(env, "messagingv2").sweep() == 1
    (message,) = rows.read(sqlite_engine, schema.outbox)
    assert list(message["payload"]["payload"]["data"]["chains"]) == [DEVICES[0]]


def test_without_notifications_nothing_is_read(sqlite_engine: sa.Engine) -> None:
    env = make_env(sqlite_engine)
    env.time += timedelta(days=2)
    with count_statements(sqlite_engine) as count:
        assert make_anchors(env).sweep() == 0
    assert len(count) == 0
