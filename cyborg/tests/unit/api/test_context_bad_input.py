# SPDX-License-Identifier: Apache-2.0
"""Bad input of device contexts and attachments is a client error and leaves nothing half-written.

``test_device_contexts.py`` has the bodies of one field each, ``test_attachment_commands.py`` the
requests that need Nova.
"""

from typing import Any

import pytest

from cyborg.db import schema
from cyborg.tests.fixtures.clouds.api import INSTANCE, ApiEnv, error_message
from cyborg.tests.fixtures.databases import rows

PATH = "/v2/device_contexts"
LATEST = {"OpenStack-API-Version": "accelerator latest"}
MEGABYTE = 10**6
WRITTEN = (schema.device_contexts, schema.device_profiles, schema.arqs, schema.attachments)


def counts(api: ApiEnv) -> list[int]:
    return [len(rows.read(api.engine, table)) for table in WRITTEN]


@pytest.mark.parametrize(
    "value",
    ["\x00", "\x1b[0m", "a\x7f", "a\tb", "a\r\n", "v" * MEGABYTE],
    ids=lambda value: repr(value[:10]),
)
def test_config_data_with_control_characters_or_a_megabyte_is_refused(
    api: ApiEnv, value: str
) -> None:
    body: dict[str, Any] = {"resources": "FPGA:1", "config_data": {"key1": value}}
    answer = api.call("POST", PATH, body, LATEST)
    assert (answer.status_int, "config_data" in error_message(answer)) == (400, True)
    assert value not in error_message(answer)
    assert counts(api) == [0, 0, 0, 0]


def test_bad_change_leaves_context_and_arqs_unchanged(api: ApiEnv) -> None:
    body = {"resources": "FPGA:2", "config_data": {"key1": "val1"}}
    context = api.call("POST", PATH, body, LATEST).json
    path = f"{PATH}/{context['uuid']}"
    before = [rows.read(api.engine, table) for table in WRITTEN]
    for change, field in (
        ({"name": "n", "expires_at": "2020-01-01T00:00:00+00:00"}, "expires_at"),
        ({"name": "n", "expires_at": "0001-01-01T00:00:00+14:00"}, "expires_at"),
        ({"name": "n", "expires_at": "tomorrow"}, "expires_at"),
        ({"name": "n", "config_data": {"key1": "\x00"}}, "config_data"),
        ({"name": "n", "config_data": {"key1": "v" * MEGABYTE}}, "config_data"),
        ({"name": "n", "resources": "FPGA:1"}, "resources"),
        ({"name": "\x07", "config_data": {"key1": "val2"}}, "name"),
    ):
        answer = api.call("PATCH", path, change, LATEST)
        assert (answer.status_int, field in error_message(answer)) == (400, True), change
    assert [rows.read(api.engine, table) for table in WRITTEN] == before


@pytest.mark.parametrize("amount", ["0", "-1", "1000000000", "1e9", "", "\u0661"])
def test_bad_amount_in_any_form_is_refused(api: ApiEnv, amount: str) -> None:
    for body, field in (
        ({"resources": f"FPGA:{amount}"}, "resources"),
        ({"resources": {"FPGA": amount}}, "resources"),
        ({"groups": [{"resources:FPGA": amount}]}, "groups"),
    ):
        answer = api.call("POST", PATH, body, LATEST)
        assert (answer.status_int, field in error_message(answer)) == (400, True), body
    assert counts(api) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({}, "device_profile"),
        ({"device_profile": "p", "device_context": INSTANCE}, "device_context"),
        ({"device_profile": "p\x00"}, "device_profile"),
        ({"device_profile": "p" * MEGABYTE}, "device_profile"),
        ({"device_profile": "p", "instance_uuid": "none"}, "instance_uuid"),
        ({"device_profile": "p", "uuid": "none"}, "uuid"),
        ({"device_profile": f"ctx-{INSTANCE}"}, "device_profile"),
        ({"device_profile": f"acc-{INSTANCE}"}, "device_profile"),
        ({"device_context": "gzip"}, "device_context"),
        ({"device_context": INSTANCE, "accelerator": INSTANCE}, "accelerator"),
        ({"device_context": [INSTANCE]}, "device_context"),
        ({"accelerator": "0000:01:00.0"}, "accelerator"),
        ({"accelerator": {}}, "accelerator"),
        ({"accelerator": "", "device_profile": "p"}, "accelerator"),
        ({"host": "compute-1"}, "host"),
    ],
)
def test_bad_attachment_is_refused_and_nothing_is_written(
    api: ApiEnv, more: dict[str, Any], field: str
) -> None:
    body = {"instance_uuid": INSTANCE, **more}
    answer = api.call("POST", "/v2/attachments", body, LATEST)
    assert (answer.status_int, field in error_message(answer)) == (400, True)
    assert counts(api) == [0, 0, 0, 0]


def test_detach_of_what_is_not_attached_names_what_is_missing(api: ApiEnv) -> None:
    for path, text in (
        (f"/v2/attachments?instance={INSTANCE}", "instance"),
        (f"/v2/attachments/{INSTANCE}", INSTANCE),
    ):
        answer = api.call("DELETE", path, None, LATEST)
        assert (answer.status_int, text in error_message(answer)) == (404, True)
