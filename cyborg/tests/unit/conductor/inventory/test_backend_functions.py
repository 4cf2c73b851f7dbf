# SPDX-License-Identifier: Apache-2.0
"""Tests of the functions of backends, which reports write for the search of backends."""

from collections.abc import Mapping
from dataclasses import replace

import sqlalchemy as sa

from cyborg.core.inventory import capability
from cyborg.core.inventory.device import Device, Health
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.hosts.hosts import READY, Host, card, make_hosts

OTHER = BackendState("other", "other", BackendStatus.READY)


def with_functions(n: int, *names: str, backend: str = "fake") -> Device:
    """Return a device with functions below ``fake``."""
    board = capability.to_board_info(dict.fromkeys(names, 1))
    return card(n, backend=backend, vendor_board_info=board)


def stored(engine: sa.Engine) -> Mapping[str, list[str]]:
    """Return the functions of each backend, and check that none is stored twice."""
    names = {row["id"]: row["name"] for row in rows.read(engine, schema.backends)}
    found: dict[str, list[str]] = {}
    for row in rows.read(engine, schema.backend_functions):
        found.setdefault(names[row["backend_id"]], []).append(row["function"])
    return {name: sorted(functions) for name, functions in found.items()}


def test_functions_follow_the_devices_of_each_report(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host(backends=(READY, OTHER))
    host.send(hosts, with_functions(0, "aes"), with_functions(1, "gzip"), card(2, backend="other"))
    assert stored(engine) == {"fake": ["fake", "fake.aes", "fake.gzip"], "other": ["fake"]}
    host.send(hosts, with_functions(0, "aes", "des"), card(2, backend="other"))
    assert stored(engine) == {"fake": ["fake", "fake.aes", "fake.des"], "other": ["fake"]}
    host.send(hosts, with_functions(0, "aes", "des", backend="other"))
    assert stored(engine) == {"other": ["fake", "fake.aes", "fake.des"]}
    host.send(hosts)
    assert stored(engine) == {}


def test_functions_of_a_host_change_those_of_no_other_host(engine: sa.Engine) -> None:
    hosts, first, second = make_hosts(engine), Host("one"), Host("two")
    first.send(hosts, with_functions(0, "aes"))
    second.send(hosts, with_functions(0, "gzip"))
    second.send(hosts)
    assert stored(engine) == {"fake": ["fake", "fake.aes"]}


def test_functions_change_with_the_resource_class_of_a_deployable(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    device = with_functions(0, "aes")
    host.send(hosts, device)
    (part,) = device.deployables
    host.send(hosts, replace(device, deployables=(replace(part, resource_class="FPGA"),)))
    assert stored(engine) == {"fake": ["fpga", "fpga.aes"]}


def test_draining_device_keeps_its_functions_until_it_is_removed(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, with_functions(0, "aes"), with_functions(1, "gzip"))
    handle = rows.read(engine, schema.attach_handles)[0]
    rows.update(engine, schema.attach_handles, handle["id"], needs_cleaning=True)
    host.send(hosts)
    assert stored(engine) == {"fake": ["fake", "fake.aes"]}
    rows.update(engine, schema.attach_handles, handle["id"], needs_cleaning=False)
    host.report(hosts)
    assert stored(engine) == {}


def test_backend_that_was_not_configured_for_a_while_has_its_functions_again(
    engine: sa.Engine,
) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, with_functions(0, "aes"))
    before = rows.read(engine, schema.backend_functions)
    # Two restarts without a report between them.
    for backends in ((OTHER,), (READY,)):
        restarted = Host(backends=backends, devices=host.devices)
        restarted.hello(hosts)
        assert stored(engine) == ({"fake": ["fake", "fake.aes"]} if READY in backends else {})
    after = rows.read(engine, schema.backend_functions)
    assert {row["id"] for row in before}.isdisjoint(row["id"] for row in after)


def test_upgrade_of_an_agent_corrects_what_an_older_release_wrote(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, with_functions(0, "aes"))
    (row,) = rows.read(engine, schema.backend_functions, function="fake.aes")
    rows.update(engine, schema.backend_functions, row["id"], function="fake.old")
    with count_statements(engine) as count:
        Host(devices=host.devices).hello(hosts)
    assert not [s for s in count.statements if "backend_functions" in s]
    (agent,) = rows.read(engine, schema.services)
    rows.update(engine, schema.services, agent["id"], versions={"rpc": "0"})
    Host(devices=host.devices).hello(hosts)
    assert stored(engine) == {"fake": ["fake", "fake.aes"]}


def test_report_without_new_functions_does_not_read_them(engine: sa.Engine) -> None:
    hosts, host = make_hosts(engine), Host()
    host.send(hosts, with_functions(0, "aes"))
    unhealthy = replace(with_functions(0, "aes"), health=Health.UNHEALTHY)
    twin = with_functions(1, "aes")
    before = rows.read(engine, schema.backend_functions)
    with count_statements(engine) as count:
        host.send(hosts, unhealthy)
        host.send(hosts, unhealthy, twin)
        host.send(hosts, unhealthy)
    assert len(rows.read(engine, schema.devices)) == 1
    assert not [s for s in count.statements if "backend_functions" in s]
    assert rows.read(engine, schema.backend_functions) == before
