# SPDX-License-Identifier: Apache-2.0
"""Input and output of operators: addresses, short uuids, commands with spaces, empty lists."""

import re

import pytest

from cyborg.tests.fixtures.clouds.filled_service import INSTANCE, LOST_HOST, Client, filled_service
from cyborg.tests.fixtures.clouds.standalone import HOST

__all__ = ["filled_service"]


@pytest.fixture
def cyborg(filled_service: Client) -> Client:
    return filled_service


@pytest.mark.parametrize("format_", ["json", "yaml", "value", "csv", "table"])
def test_address_is_a_string_in_each_format(cyborg: Client, format_: str) -> None:
    for command in (f"arq-list --instance {INSTANCE}", "accelerator-list --state bound"):
        out, _ = cyborg.run(f"{command} -c Address -f {format_}")
        assert "0000:0c:00.0" in out
        assert "domain" not in out


def test_piped_output_has_one_untruncated_line_per_row(
    cyborg: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out, _ = cyborg.run("outbox-list")
    assert "after twelve tries" in out
    assert len(out.splitlines()) == 5


def test_empty_list_prints_a_message(cyborg: Client) -> None:
    assert cyborg.run("device-list --vendor ffff") == ("", "no devices\n")
    assert cyborg.run("device-list --vendor ffff -f value") == ("", "no devices\n")
    assert cyborg.run("device-list --vendor ffff -f json") == ("[]\n", "")


def test_short_uuid_is_accepted_if_unique(cyborg: Client) -> None:
    uuid = cyborg.field("device-list")
    assert cyborg.field(f"device-show {uuid[:8]}") == uuid
    assert cyborg.field(f"arq-list --instance {INSTANCE[:8]}", "Instance") == INSTANCE
    out, err = cyborg.run("device-show ffffffff", code=1)
    assert out == ""
    assert "ffffffff" in err


def test_command_with_spaces_equals_command_with_dashes(cyborg: Client) -> None:
    for spaced, dashed in (
        ("device list", "device-list"),
        ("device profile list", "device-profile-list"),
        ("service list --kind daemon -c UUID", "service-list --kind daemon -c UUID"),
        ("driver show fake -c UUID", "driver-show fake -c UUID"),
    ):
        assert cyborg.run(spaced) == cyborg.run(dashed)


def test_backends_of_a_down_agent_are_not_ready(cyborg: Client) -> None:
    for command in (
        f"service-list --host {LOST_HOST}",
        f"service-list --host {LOST_HOST} --long",
        f"service-list --host {LOST_HOST} -f json",
        f"driver-list --host {LOST_HOST} --long",
        f"hardware-list --host {LOST_HOST}",
        f"device-list --host {LOST_HOST} --long",
    ):
        out, _ = cyborg.run(command)
        assert "ready" not in out.lower(), command


def test_audit_prints_summary_and_advice(cyborg: Client) -> None:
    _, err = cyborg.run("audit", code=1)
    assert re.search(r"^2 hosts compared, \d+ differences?$", err, re.MULTILINE)
    assert re.search(r"^agent_unreachable: Check that cyborg-agent runs", err, re.MULTILINE)


def test_service_delete_removes_a_lost_host(cyborg: Client) -> None:
    up, down = (
        cyborg.field(f"service-list --host {host} --kind daemon --sort-column Service")
        for host in (HOST, LOST_HOST)
    )
    _, err = cyborg.run(f"service-delete {up[:8]} {down[:8]}", code=1)
    assert f"{up}: cyborg-agent of host {HOST} is not down" in err
    assert cyborg.run(f"service-list --host {LOST_HOST}") == ("", "no services\n")
    assert cyborg.run(f"device-list --host {LOST_HOST}") == ("", "no devices\n")
    assert "compute-2" not in cyborg.run("deployable-list --long")[0]
