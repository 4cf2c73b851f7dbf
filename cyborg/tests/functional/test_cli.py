# SPDX-License-Identifier: Apache-2.0
import csv
import io
import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from cyborg.cli import app
from cyborg.standalone.stack import StandaloneStack
from cyborg.tests.fixtures.clouds.standalone import HOST

Run = Callable[..., str]


@pytest.fixture
def cyborg(standalone_stack: StandaloneStack, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: str, code: int = 0) -> str:
        connection = ["--os-auth-type", "none", "--os-endpoint", standalone_stack.endpoint]
        assert app.main([*connection, *words]) == code, capsys.readouterr()
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return output.err if code else output.out

    return run


@pytest.fixture
def ask(cyborg: Run) -> Callable[..., Any]:
    return lambda *words: json.loads(cyborg(*words, "-f", "json"))


@pytest.fixture
def provider(standalone_stack: StandaloneStack) -> str:
    providers = standalone_stack.placement.get("/resource_providers").json()["resource_providers"]
    return next(str(p["uuid"]) for p in providers if p["parent_provider_uuid"])


def profile(cyborg: Run, units: int) -> str:
    name = f"cli-{uuid.uuid4().hex[:8]}"
    cyborg("device-profile-create", name, "--group", f"resources:FPGA={units}")
    return name


def test_device_commands_show_and_update_a_device(cyborg: Run, ask: Callable[..., Any]) -> None:
    rows = ask("device-list", "--host", HOST, "--type", "FPGA")
    assert [row["Host"] for row in rows] == [HOST]
    assert ask("device-list", "--vendor", "none-such") == []
    device = ask("device-show", rows[0]["UUID"])
    assert device["UUID"] == rows[0]["UUID"]
    assert isinstance(device["Board"], dict)
    assert rows[0]["UUID"] in cyborg("device-list", "--long")
    assert f"| {rows[0]['UUID'][:8]} |" in cyborg("device-list")
    table = list(csv.DictReader(io.StringIO(cyborg("device-list", "-f", "csv"))))
    assert table[0]["UUID"] == rows[0]["UUID"]


def test_service_commands_list_all_services(cyborg: Run, ask: Callable[..., Any]) -> None:
    rows = {row["Service"]: row for row in ask("service-list", "--kind", "daemon")}
    assert rows["cyborg-agent"]["State"] == "up"
    assert rows["cyborg-conductor"]["State"] == "up"
    assert "fake (fake) READY" in cyborg("service-list", "--long")


def test_discovery_commands_run_and_show_a_discovery(ask: Callable[..., Any]) -> None:
    rows = ask("discover-services", "--wait", "--within", "60", "--driver", "fake")
    assert [(r["Host"], r["Backend"], r["State"]) for r in rows] == [(HOST, "fake", "DONE")]


def test_device_profile_commands_create_show_and_delete(
    cyborg: Run, ask: Callable[..., Any]
) -> None:
    name = f"cli-{uuid.uuid4().hex[:8]}"
    group = '{"resources:FPGA": 1, "trait:CUSTOM_FAKE_DEVICE": "required"}'
    words = ["--group", group, "--group", "resources:FPGA=2", "--description", "two of them"]
    created = ask("device-profile-create", name, *words)
    assert ask("device-profile-show", name) == created
    assert created["Groups"] == [
        json.loads(group) | {"resources:FPGA": "1"},
        {"resources:FPGA": "2"},
    ]
    assert name in [row["Name"] for row in ask("device-profile-list")]
    cyborg("device-profile-delete", name)
    assert "(HTTP 404)" in cyborg("device-profile-show", name, code=1)


def test_arq_commands_create_bind_and_release(
    cyborg: Run, ask: Callable[..., Any], provider: str
) -> None:
    name, instance = profile(cyborg, 2), str(uuid.uuid4())
    arqs = [row["UUID"] for row in ask("arq-create", name)]
    placement_options = ["--host", HOST, "--provider", provider, "--instance", instance]
    bound = ask("arq-bind", *arqs, *placement_options)
    assert {row["UUID"] for row in bound} == set(arqs)
    assert {row["State"] for row in bound} == {"Bound"}
    assert ask("arq-list", "--instance", instance) == bound
    assert ask("arq-show", arqs[0])["Provider"] == provider
    assert "(HTTP 409)" in cyborg("device-profile-delete", name, code=1)
    cyborg("arq-unbind", arqs[0])
    assert ask("arq-show", arqs[0])["Instance"] is None
    cyborg("arq-delete", "--instance", instance)
    cyborg("arq-delete", arqs[0])
    assert ask("arq-list", "--instance", instance) == []
    cyborg("device-profile-delete", name)


def test_driver_and_hardware_commands_list_objects(cyborg: Run, ask: Callable[..., Any]) -> None:
    found = ask("driver-list", "--host", HOST, "--type", "FPGA", "--long")
    (row,) = [driver for driver in found if driver["Driver"] == "fake"]
    assert (row["Driver"], row["Hosts"][0]["status"]) == ("fake", "READY")
    driver = ask("driver-show", row["UUID"])
    # Its agent says hello between any two.
    # One driver has its hosts, a list their numbers.
    shown = {k: v for k, v in row.items() if k not in ("Hosts", "Number of hosts", "Statuses")}
    assert shown == {k: driver[k] for k in shown}
    assert ask("driver-show", "fake") | {"Hosts": []} == driver | {"Hosts": []}
    assert "num_devices" in [option["name"] for option in driver["Options"]]
    assert "num_devices (int, 1): " in cyborg("driver-show", "fake")
    assert f"{HOST} INSTALLED" in cyborg("driver-show", "generic")
    assert f"{HOST} (fake) READY" in cyborg("driver-list", "--host", HOST)
    assert "| 1 READY " in cyborg("driver-list")
    (summary,) = [driver for driver in ask("driver-list") if driver["Driver"] == "fake"]
    assert summary["Hosts"] == {"READY": 1}
    (entry,) = ask("driver-show", "fake", "--host", HOST, "--status", "READY")["Hosts"]
    assert (entry["host"], entry["backend"]) == (HOST, "fake")
    assert ask("driver-show", "fake", "--status", "FAILED")["Hosts"] == []
    assert "did you mean fake?" in cyborg("driver-show", "fak", code=1)
    (device,) = ask("hardware-list", "--host", HOST, "--long")
    assert (device["Driver"], device["Specs"]["num"]) == ("fake", 16)
    assert ask("hardware-list", "--driver", "none-such") == []


def test_accelerator_commands_list_and_label(
    cyborg: Run, ask: Callable[..., Any], provider: str
) -> None:
    name, instance = profile(cyborg, 1), str(uuid.uuid4())
    (arq,) = [row["UUID"] for row in ask("arq-create", name)]
    ask("arq-bind", arq, "--host", HOST, "--provider", provider, "--instance", instance)
    (row,) = ask("accelerator-list", "--instance", instance, "--driver", "fake", "--long")
    assert (row["State"], row["Request"], row["Host"]) == ("bound", arq, HOST)
    words = ["--name", "fast", "--description", "é", "--tag", "a", "--tag", "b"]
    created = ask("accelerator-update", row["UUID"], *words)
    assert (created["Name"], created["Description"], created["Tags"]) == ("fast", "é", ["a", "b"])
    assert ask("accelerator-show", row["UUID"]) == created
    created = ask("accelerator-update", row["UUID"], "--name", "", "--no-tags")
    assert (created["Name"], created["Description"], created["Tags"]) == (None, "é", [])
    assert "nothing to change" in cyborg("accelerator-update", row["UUID"], code=1)
    with pytest.raises(SystemExit, match="2"):
        cyborg("accelerator-update", row["UUID"], "--tag", "a", "--no-tags")
    cyborg("arq-delete", "--instance", instance)
    assert "is not bound" in cyborg("accelerator-update", row["UUID"], "--name", "x", code=1)
    assert row["UUID"] in [r["UUID"] for r in ask("accelerator-list", "--state", "free")]
    cyborg("device-profile-delete", name)


def test_rejected_command_prints_one_line(
    cyborg: Run, provider: str, caplog: pytest.LogCaptureFixture
) -> None:
    nobody, instance = str(uuid.uuid4()), str(uuid.uuid4())
    placement_options = ["--host", HOST, "--instance", instance, "--provider", provider]
    for words, message in [
        (["arq-create", "none-such"], "none-such"),
        (["arq-show", nobody], nobody),
        (["arq-show", "x"], "(HTTP 400)"),
        (["arq-bind", nobody, *placement_options], nobody),
        (
            ["arq-bind", nobody, nobody, nobody, *placement_options, "--provider", provider],
            "once for each",
        ),
        (["arq-delete"], "either uuids of requests or --instance"),
        (["device-profile-create", "x y", "--group", "resources:FPGA=1"], "(HTTP 400)"),
        (["device-profile-create", "x", "--group", "resources:FPGA=0"], "resources:FPGA"),
        (["--os-accelerator-api-version", "9.9", "device-list"], "(HTTP 406)"),
    ]:
        caplog.clear()
        assert message in cyborg(*words, code=1)
        # The service logs in this process, too.
        messages = [r.getMessage() for r in caplog.records if r.name == "cyborg.cli"]
        assert len(messages) == 1
        assert "\n" not in messages[0]
