# SPDX-License-Identifier: Apache-2.0
"""Who may attach to a host itself, and detach from it."""

from datetime import datetime
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.db import schema
from cyborg.testing.fake_keystone import FakeKeystone
from cyborg.tests.fixtures.clouds.api import ApiEnv, error_message
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.unit.api.test_context_explanations import as_role, keystone_api

__all__ = ["keystone_api"]

PATH, HOST = "/v2/attachments", "compute-1"
NOW = datetime(2026, 3, 1, 12)


def insert_attachment(engine: sa.Engine, **values: Any) -> str:
    """Insert an attachment to a host and return its uuid."""
    uuid = str(uuid4())
    row: dict[str, Any] = {
        "uuid": uuid,
        "project_id": "project-1",
        "hostname": HOST,
        "device_profile_name": "p",
        "mode": "host",
        "reboot": False,
        "state": "attached",
        "deadline": NOW,
        "next_try_at": NOW,
    }
    rows.insert(engine, schema.attachments, **{**row, **values})
    return uuid


@pytest.mark.parametrize("by", ["uuid", "host"])
@pytest.mark.parametrize(
    ("roles", "status"), [(("service",), 403), (("member", "reader"), 403), (("admin",), 202)]
)
def test_only_administrators_detach_from_a_host(
    keystone_api: ApiEnv,
    fake_keystone: FakeKeystone,
    by: str,
    roles: tuple[str, ...],
    status: int,
) -> None:
    api = keystone_api
    as_role(api, fake_keystone, *roles)
    uuid = insert_attachment(api.engine)
    on_host = insert_attachment(api.engine, instance_uuid=str(uuid4()), mode="next-boot")
    path = f"{PATH}/{uuid}" if by == "uuid" else f"{PATH}?host={HOST}"
    answer = api.call("DELETE", path)
    assert answer.status_int == status, answer.text
    if status == 403 and "service" in roles:
        assert "cyborg:attachment:delete_for_host" in error_message(answer)
    states = {row["uuid"]: row["step"] for row in rows.read(api.engine, schema.attachments)}
    assert states == {uuid: "release" if status == 202 else None, on_host: None}


@pytest.mark.parametrize(("roles", "status"), [(("service",), 403), (("admin",), 404)])
def test_only_administrators_attach_to_a_host(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone, roles: tuple[str, ...], status: int
) -> None:
    as_role(keystone_api, fake_keystone, *roles)
    body = {"hostname": "no-such-host", "device_profile": "p"}
    answer = keystone_api.call("POST", PATH, body)
    assert answer.status_int == status, answer.text
    expected = "create_for_host" if status == 403 else "no agent has reported from host"
    assert expected in error_message(answer)


def test_list_of_a_host_has_not_those_of_its_servers(
    keystone_api: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    as_role(keystone_api, fake_keystone, "admin")
    uuid = insert_attachment(keystone_api.engine)
    insert_attachment(keystone_api.engine, instance_uuid=str(uuid4()), mode="live")
    insert_attachment(keystone_api.engine, hostname="compute-2")
    found = keystone_api.get(f"{PATH}?host={HOST}")["attachments"]
    assert [(row["uuid"], row["instance_uuid"]) for row in found] == [(uuid, None)]
