# SPDX-License-Identifier: Apache-2.0
"""Input and output of operators: addresses, short uuids, commands with spaces, empty lists."""

import json
import re

import pytest

from cyborg.cli.common.rest import RestClient
from cyborg.conductor.audit import runner
from cyborg.tests.fixtures.clouds.filled_service import INSTANCE, LOST_HOST, Client, filled_service
from cyborg.tests.fixtures.clouds.standalone import HOST
from cyborg.tests.fixtures.machine.tiers import sample

__all__ = ["filled_service"]


DESCRIBED: list[tuple[str, str, str, frozenset[str]]] = [
    (
        "device-list --address 0000:0c:00.0",
        "UUID",
        "device",
        frozenset({"accelerators", "custody"}),
    ),
    ("device-list --address 0000:0c:00.0", "Address", "device", frozenset({"services", "jobs"})),
    ("service-list --kind daemon", "Host", "host", frozenset({"devices", "hardware", "jobs"})),
    ("service-list", "UUID", "service", frozenset({"devices"})),
    (f"arq-list --instance {INSTANCE}", "UUID", "accelerator request", frozenset({"profile"})),
    (f"arq-list --instance {INSTANCE}", "Instance", "instance", frozenset({"requests"})),
    ("device-context-list", "UUID", "device context", frozenset({"requests", "explanation"})),
    ("device-context-list", "Name", "device context", frozenset({"requests"})),
    ("device-context-list --long", "Profile", "device context", frozenset({"requests"})),
    ("accelerator-list --state bound", "UUID", "accelerator", frozenset({"device", "request"})),
    ("accelerator-list --state bound", "Name", "accelerator", frozenset({"device"})),
    ("device-profile-list", "Name", "device profile", frozenset({"contexts"})),
    ("driver-list", "Driver", "driver", frozenset({"hosts", "jobs"})),
    ("deployable-list", "UUID", "deployable", frozenset({"attributes", "jobs"})),
    ("deployable-list", "Provider", "deployable", frozenset({"jobs"})),
    ("attribute-list", "UUID", "attribute", frozenset({"deployable"})),
    ("job-list", "UUID", "job", frozenset({"steps"})),
    ("service-list --kind backend", "UUID", "backend", frozenset({"devices"})),
    ("outbox-list", "UUID", "message", frozenset()),
]
# One object of each source of its sections: an uuid, an address, a name, and a host.
DEFAULT_DESCRIBED = [
    case for case in DESCRIBED if case[2] in ("device", "host", "instance", "driver")
]


@pytest.fixture
def cyborg(filled_service: Client) -> Client:
    return filled_service


@pytest.mark.parametrize(
    "format_", sample(["json", "yaml", "value", "csv", "table"], "json", "table")
)
def test_address_is_a_string_in_each_format(cyborg: Client, format_: str) -> None:
    for command in (f"arq-list --instance {INSTANCE}", "accelerator-list --state bound"):
        out, _ = cyborg.run(f"{command} -c Address -f {format_}")
        assert "0000:0c:00.0" in out
        assert "domain" not in out


def test_piped_output_has_one_line_per_row_of_80_columns(
    cyborg: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out, _ = cyborg.run("outbox-list")
    assert "after twelve tries" not in out
    assert len(out.splitlines()) == 5
    assert len(out.splitlines()[0]) <= 80
    whole, _ = cyborg.run("outbox-list --long")
    assert "after twelve tries" in " ".join(whole.replace("|", " ").split())
    assert max(map(len, whole.splitlines())) <= 80


@pytest.mark.parametrize("width", sample([40, 80, 200], 80))
def test_no_table_is_wider_than_the_terminal(
    cyborg: Client, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    device = cyborg.field("device-list")
    for command in ("device-list", "service-list", "job-list", "driver-list", "accelerator-list"):
        for option in ("", " --long", " -c UUID -c Host -c Created"):
            if option and command == "driver-list":
                continue
            out, _ = cyborg.run(command + option)
            assert max(map(len, out.splitlines())) <= width, out
    for command in (f"device-show {device}", "driver-show fake"):
        out, _ = cyborg.run(command)
        assert max(map(len, out.splitlines())) <= width, out


@pytest.mark.parametrize("format_", sample(["value", "csv", "shell", "table"], "value", "shell"))
def test_text_has_no_python_values(cyborg: Client, format_: str) -> None:
    device = cyborg.field("device-list")
    commands = [] if format_ == "csv" else [f"device-show {device}"]
    if format_ != "shell":
        commands += ["device-list --long", "arq-list --long", "service-list --long"]
    for command in commands:
        out, _ = cyborg.run(f"{command} -f {format_}")
        assert not re.search(r"\b(None|True|False)\b", out), out


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


def test_audit_prints_summary_and_advice(cyborg: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    # The conductor runs in this process; meanwhile its tasks use CPU time.
    monkeypatch.setattr(runner, "RECHECK_DELAY", 0.2)
    _, err = cyborg.run("audit", code=1)
    assert re.search(r"^2 hosts compared, \d+ differences?$", err, re.MULTILINE)
    assert re.search(r"^agent_unreachable: Check that cyborg-agent runs", err, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "column", "kind", "sections"),
    sample(DESCRIBED, *DEFAULT_DESCRIBED),
)
def test_describe_shows_an_object_with_a_bounded_number_of_requests(
    cyborg: Client,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    column: str,
    kind: str,
    sections: frozenset[str],
) -> None:
    name = cyborg.field(command, column)
    paths: list[str] = []
    call = RestClient.call

    def count(self: RestClient, method: str, path: str, *more: object, **options: object) -> object:
        paths.append(path)
        return call(self, method, path, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(RestClient, "call", count)
    found = json.loads(cyborg.run(f"describe {name} -f json")[0])
    assert found["kind"] == kind
    assert sections <= set(found["related"]), set(found["related"])
    assert not [part["error"] for part in found["related"].values() if part["error"]]
    assert len(paths) <= 25, paths
    monkeypatch.setenv("COLUMNS", "80")
    out, _ = cyborg.run(f"describe {name}")
    assert out.startswith(kind.capitalize())
    assert max(map(len, out.splitlines())) <= 80


def test_describe_says_what_hinders_an_object(cyborg: Client) -> None:
    down = cyborg.field(f"device-list --host {HOST} --status maintaining")
    out, _ = cyborg.run(f"describe {down[:13]}")
    assert "  - Placement offers device 0000:0e:00.0: no: maintaining\n" in out
    job = cyborg.field("job-list --state failed")
    out, _ = cyborg.run(f"describe {job}")
    assert f"Hindered by:\n  - {HOST} (second) rolled_back: no-power\n\n" in out
    bound = cyborg.field("device-list --address 0000:0c:00.0")
    assert "Hindered by nothing that is known\n" in cyborg.run(f"describe {bound}")[0]


def test_describe_of_several_or_no_objects_lists_candidates(cyborg: Client) -> None:
    cyborg.run("device-context-create --resources=FPGA:1 --name=fake")
    uuid = cyborg.field("device-context-list --sort-column Name")
    try:
        _, err = cyborg.run("describe fake", code=1)
    finally:
        cyborg.run(f"device-context-delete {uuid}")
    assert err.startswith("'fake' names 2 objects, give the uuid:\ndriver ")
    assert f"\ndevice context {uuid} (fake, " in err
    for name in ("none-such", "0000:ff:00.0", "ffffffff", INSTANCE.replace("6", "7")):
        _, err = cyborg.run(f"describe {name}", code=1)
        assert err.startswith(f"no object has the uuid, name or address '{name}': looked for ")


def test_service_delete_removes_a_lost_host(cyborg: Client) -> None:
    up, down = (
        cyborg.field(f"service-list --host {host} --kind daemon --sort-column Service")
        for host in (HOST, LOST_HOST)
    )
    _, err = cyborg.run(f"service-delete {up[:8]} {down[:8]}", code=1)
    assert f"{up}: cyborg-agent of host {HOST} is not down" in err
    for command in ("service-list", "device-list"):
        _, err = cyborg.run(f"{command} --host {LOST_HOST}", code=1)
        assert f"unknown host '{LOST_HOST}'" in err
    assert "compute-2" not in cyborg.run("deployable-list --long")[0]


def test_dry_run_names_the_objects_and_changes_nothing(cyborg: Client) -> None:
    device = cyborg.field("device-list --address 0000:0c:00.0")
    arq = cyborg.field(f"arq-list --instance {INSTANCE}")
    context = cyborg.field("device-context-list")
    message = cyborg.field("outbox-list")
    agent = cyborg.field("service-list --sort-column Service")
    profile = cyborg.field("device-profile-list --sort-column Name")
    lists = ("device-list", "arq-list", "device-context-list", "outbox-list", "service-list")
    before = [cyborg.run(name) for name in lists]
    for command, expected in (
        (f"device-disable {device[:8]}", f"would disable device {device} (FPGA, "),
        (f"device-enable {device}", f"would enable device {device} (FPGA, "),
        (f"arq-delete {arq}", f"would delete accelerator request {arq} ("),
        (f"arq-delete --instance {INSTANCE}", f"would delete accelerator request {arq} ("),
        (f"arq-unbind {arq}", f"would unbind accelerator request {arq} ("),
        (f"device-context-delete {context}", f"would delete device context {context} (gzip"),
        (f"device-profile-delete {profile}", f"would delete device profile {profile} (one-fpga)"),
        (f"outbox-delete {message}", f"would delete message {message} (nova-event, "),
        (f"service-delete {agent}", f"would delete service {agent} (cyborg-agent, "),
        ("uninstall-driver fake --backend second", f"would uninstall backend second on {HOST} ("),
        ("update-driver fake --reload", f"would update backend fake on {HOST} (READY)"),
        ("install-driver generic", f"would install backend generic on {HOST}"),
    ):
        out, _ = cyborg.run(f"{command} --dry-run")
        assert expected in f"\n{out}", command
    assert [cyborg.run(name) for name in lists] == before
    _, err = cyborg.run(f"host-forget {HOST} --dry-run", code=1)
    assert "is not down; stop it first" in err
    assert cyborg.run(f"detach-instance {device} --dry-run")[0] == "nothing would be changed\n"


def test_dry_run_of_an_unknown_object_fails(cyborg: Client) -> None:
    for command in (
        f"service-delete {INSTANCE}",
        f"outbox-retry {INSTANCE}",
        f"device-disable {INSTANCE}",
        "host-forget none-such --force",
        "uninstall-driver fake --backend none-such",
    ):
        out, err = cyborg.run(f"{command} --dry-run", code=1)
        assert out == ""
        assert err.startswith("no"), err
