# SPDX-License-Identifier: Apache-2.0
"""Wrong commands and requests: each answer says what is wrong, with which object, what to do."""

import contextlib
import io
import json
import logging
import threading
from typing import Any

import pytest
import requests

from cyborg.cli import app
from cyborg.tests.fixtures.clouds.filled_service import (
    INSTANCE,
    Client,
    filled_service,
    handle_in_thread,
)
from cyborg.tests.fixtures.clouds.standalone import HOST
from cyborg.tests.fixtures.machine.processes import ends_within

__all__ = ["filled_service"]

UUID = "11111111-2222-3333-4444-555555555555"
# Longest time of an answer, with a stand-alone service on a busy machine.
SECONDS = 6.0

NO_UUID = "is not a uuid but a name, give its uuid"
UNKNOWN_HOST = "unknown host 'compute-9'; known are compute-1"

# The command, and what its message must have.
COMMANDS = (
    (f"device-show {UUID}", f"no device {UUID}; GET /v2/devices lists the known ones"),
    ("device-show compute-1", "none of the devices is 'compute-1': give the uuid"),
    ("device-disable gzip", "none of the devices is 'gzip': give the uuid"),
    ("device-disable", "are required: device\nExample: cyborg device-disable compute-1/"),
    ("device-list --host compute-9", UNKNOWN_HOST),
    ("device-list --host 0000:0c:00.0", "unknown host '0000:0c:00.0'; known are"),
    ("device-list --status x", "'x' (choose from 'enabled', 'maintaining')\nExample: cyborg"),
    ("device-list --type GPUS", "invalid choice: 'GPUS' (choose from 'GPU',"),
    ("device-list --hots h", "did you mean --host?\nExample: cyborg device-list"),
    ("device-list extra", "arguments: extra; cyborg device-list --help lists the options"),
    ("device-list --sort-column x", "unknown column 'x', expected one of UUID, Type,"),
    ("device-list -c x", "No recognized column names in ['x']. Recognized columns are"),
    (f"device-maintain {UUID} --until soon", "'soon' is not a time: give a time in ISO 8601"),
    (f"device-maintain {UUID} --until 2001-01-01T00:00:00Z", "is in the past, expected a later"),
    ("device-custody compute-1", "none of the devices is 'compute-1': give the uuid"),
    ("device-lst", "Did you mean one of these?\n  device-list"),
    ("device-context-show one-fpga", "device contexts is 'one-fpga': give the uuid"),
    ("device-context-delete 0000:0c:00.0", "'0000:0c:00.0': give the uuid, its beginning, or the"),
    (f"device-context-bind gzip --host {INSTANCE} --instance compute-1", NO_UUID),
    (
        f"device-context-bind gzip --host {HOST} --instance {INSTANCE} --mapping 0={UUID}",
        f"{UUID} is no device of this service; GET /v2/deployables lists",
    ),
    (
        f"device-context-pre-bind gzip --host {HOST} --mapping 0=0000:0c:00.0",
        "'0000:0c:00.0' is not a uuid but the address of a device, give its uuid",
    ),
    ("device-context-create --resources FPGA", "is not of the form CLASS:AMOUNT, such as FPGA:1"),
    ("device-context-create --resources FPGA:0", "expected an integer of 1 to 256"),
    ("device-context-create --device-profile x", "no device profile x; GET /v2/device_profiles"),
    ("device-context-unbind gzip --epoch x", "--epoch: invalid int value: 'x'\nExample: cyborg"),
    (f"arq-show {INSTANCE}", f"request {INSTANCE}; GET /v2/accelerator_requests lists"),
    ("arq-list --instance web-1", f"instance: 'web-1' {NO_UUID}"),
    ("arq-list --project p", "arguments: --project p; cyborg arq-list --help lists"),
    ("arq-create none-such", "no device profile 'none-such'; GET /v2/device_profiles lists"),
    (
        f"arq-bind {UUID} --host {UUID} --provider compute-1 --instance {UUID}",
        f"/device_rp_uuid: 'compute-1' {NO_UUID}",
    ),
    (f"arq-delete {UUID}", f"no accelerator request {UUID}; GET /v2/accelerator_requests lists"),
    ("accelerator-list --host compute-9", UNKNOWN_HOST),
    ("accelerator-list --state x", "(choose from 'draining'"),
    ("accelerator-show none-such", "accelerators is 'none-such': give the uuid"),
    (f"attach-instance {INSTANCE} --context x", "none of the device contexts is 'x': give the"),
    (f"attach-instance {INSTANCE} --device-profile x", "did you mean --profile?\nExample: cyborg"),
    ("detach-instance web-1", f"instance: 'web-1' {NO_UUID}"),
    ("attachment-show web-1", f"{NO_UUID}; GET /v2/attachments lists the known ones"),
    ("device-profile-show none-such", "profile none-such; GET /v2/device_profiles lists"),
    ("device-profile-create x", "are required: --group\nExample: cyborg device-profile-create"),
    ("device-profile-create x --group y", "'y' is not of the form KEY=VALUE, such as resources:"),
    (
        "device-profile-create one-fpga --group resources:FPGA=1",
        "with name one-fpga already exists; use it, or take another name",
    ),
    ("device-profile-explain one-fpga --host compute-9", UNKNOWN_HOST),
    ("service-list --host compute-9", UNKNOWN_HOST),
    ("service-delete compute-1", "services is 'compute-1': give the uuid, its beginning, or HOST/"),
    ("host-forget none-such", "host none-such; GET /v2/services lists the known hosts"),
    ("driver-show none-such", "no agent has a driver 'none-such'; GET /v2/drivers lists"),
    ("install-driver fale", "no agent has a driver 'fale'; did you mean fake?"),
    ("install-driver fake --host compute-9", "'compute-9'; did you mean compute-1?"),
    ("update-driver fake --config x", "is not of the form NAME=VALUE, such as num_devices=2"),
    ("job-show compute-1", f"{NO_UUID}; GET /v2/jobs lists the known ones"),
    ("job-list --host compute-9", UNKNOWN_HOST),
    ("attribute-create compute-1 rack b12", f"deployable_id: 'compute-1' {NO_UUID}"),
    ("audit --host compute-9", "'compute-9'; GET /v2/services lists the known hosts"),
    ("hardware-list --host compute-9", UNKNOWN_HOST),
    ("topology --host compute-9", UNKNOWN_HOST),
)
# Method, path, body, status, and what the message must have.
REQUESTS: tuple[tuple[str, str, Any, int, str], ...] = (
    ("GET", "/none-such", None, 404, "/v2/none-such; /v2/openapi.json has the known ones"),
    ("GET", f"/devices/{UUID}/x", None, 404, "/x; /v2/openapi.json has the known ones"),
    ("PUT", "/devices", {}, 405, "PUT is not supported for /v2/devices, use GET, HEAD"),
    ("GET", "/devices?colour=red", None, 400, "colour: unknown parameter, supported: address,"),
    ("GET", "/devices?sort_key=x", None, 400, "sort_key: 'x' is unknown, expected one of"),
    ("GET", "/devices?sort_dir=up", None, 400, "sort_dir: 'up' is unknown, expected asc or desc"),
    ("GET", "/devices?limit=0", None, 400, "limit: '0' is not an integer from 1 to"),
    ("GET", "/devices?marker=x", None, 400, "marker: 'x' is not in this list, start without it"),
    ("GET", "/devices?hostname=compute-9", None, 404, UNKNOWN_HOST),
    ("POST", f"/devices/{UUID}/enable", {}, 404, f"no device {UUID}; GET /v2/devices lists"),
    ("GET", "/device_contexts/gzip", None, 400, "lists the known ones"),
    ("POST", "/accelerator_requests", {"profile": "x"}, 400, "device_profile_name: missing"),
    (
        "POST",
        "/accelerator_requests",
        {"device_profile_name": "x"},
        404,
        "no device profile 'x'; GET /v2/device_profiles lists the known ones",
    ),
    ("PATCH", f"/deployables/{UUID}/program", [], 400, "expected"),
)


def run(client: Client, line: str) -> tuple[int, str]:
    """Return the exit status and the messages of a command line."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(logging.Logger, "handle", handle_in_thread(threading.get_ident()))
        try:
            code = app.main([*client.options, *line.split()])
        except SystemExit as exc:  # of argparse
            code = int(str(exc.code))
    return code, out.getvalue() + err.getvalue()


def test_wrong_commands_say_what_is_wrong_and_what_to_do(filled_service: Client) -> None:
    wrong = {}
    for line, expected in COMMANDS:
        with ends_within(SECONDS):
            code, text = run(filled_service, line)
        # Python 3.13 prints choices without quotes.
        is_expected = expected.replace("'", "") in text.replace("'", "")
        if not code or not is_expected or len(text.splitlines()) > 4:
            wrong[line] = text
        assert "HTTP 5" not in text, text
        assert "usage:" not in text, text
    assert wrong == {}


def test_wrong_requests_say_what_is_wrong_and_what_to_do(filled_service: Client) -> None:
    wrong = {}
    headers = {"OpenStack-API-Version": "accelerator latest"}
    for method, path, body, status, expected in REQUESTS:
        url = f"{filled_service.options[-1]}/v2{path}"
        answer = requests.request(method, url, json=body, headers=headers, timeout=SECONDS)
        message = json.loads(answer.json()["error_message"])["faultstring"]
        if answer.status_code != status or expected not in message:
            wrong[f"{method} {path}"] = f"{answer.status_code} {message}"
    assert wrong == {}


def test_names_and_addresses_select_objects(filled_service: Client) -> None:
    address = "0000:0c:00.0"
    uuid = filled_service.field(f"device-list --address {address}")
    for text in (address, f"{HOST}/{address}"):
        assert filled_service.run(f"device-show {text} -f value -c UUID")[0].strip()[:8] == uuid[:8]
    assert "gzip" in filled_service.run("device-context-show gzip -f value -c Name")[0]
    assert "vpn" in filled_service.run("accelerator-show vpn -f value -c Name")[0]
    # An agent that is up is found, and not deleted.
    assert (
        "is not down; stop it first"
        in filled_service.run(f"service-delete {HOST}/cyborg-agent", 1)[1]
    )
