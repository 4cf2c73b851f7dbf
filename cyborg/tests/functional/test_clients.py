# SPDX-License-Identifier: Apache-2.0
"""Every call of third-party clients against a cloud with keystone: the tables in the manual.

The answers of the API to each call are recorded. They must match the tables in
doc/source/api/clients.rst.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import openstack
import pytest
from keystoneauth1 import session
from keystoneauth1.plugin import BaseAuthPlugin
from keystoneauth1.service_token import ServiceTokenAuthWrapper
from openstack import exceptions
from openstack.accelerator.v2._proxy import Proxy

from cyborg.tests.fixtures.clouds import osc
from cyborg.tests.fixtures.clouds.clients import (
    Row,
    Table,
    manual_table,
    serve_nova_and_glance,
    table_lines,
)
from cyborg.tests.fixtures.clouds.keystone_cloud import HOST, KeystoneCloud
from cyborg.tests.fixtures.clouds.keystone_stack import LOGINS, PASSWORD, REGION
from cyborg.tests.fixtures.machine.processes import start_fork_server

pytestmark = [
    pytest.mark.services,
    # openstacksdk warns of calls that it makes itself.
    pytest.mark.filterwarnings("ignore::openstack.warnings.RemovedInSDK50Warning"),
]
GROUP = {"resources:FPGA": "1", "trait:CUSTOM_FAKE_DEVICE": "required"}
NOBODY = str(uuid4())
# Methods inherited by every proxy are not in the tables.
SDK_CALLS = {name for name, value in vars(Proxy).items() if callable(value) and name[0] != "_"}


def _auth(cloud: KeystoneCloud, name: str) -> BaseAuthPlugin:
    auth = cloud.keystone.session(name).auth
    assert auth is not None
    return auth


def test_openstacksdk(keystone_cloud: KeystoneCloud, record_property: Any) -> None:
    cloud, name = keystone_cloud, f"sdk-{uuid4().hex[:8]}"
    table = Table(cloud, name)
    note = table.record
    sdk = _connect(cloud.keystone.session("admin"))
    # Nova sends the user's token, and a service token of its own.
    auth = ServiceTokenAuthWrapper(
        user_auth=_auth(cloud, "admin"),
        service_auth=_auth(cloud, "nova"),
    )
    nova = _connect(session.Session(auth=auth))

    (device,) = note("devices", lambda: list(sdk.devices()))
    note("get_device", lambda: sdk.get_device(device.id))
    note("disable_device", lambda: sdk.disable_device(device.id))
    note("enable_device", lambda: sdk.enable_device(device.id))
    (part,) = note("deployables", lambda: list(sdk.deployables()))
    note("get_deployable", lambda: sdk.get_deployable(part.id))
    program = [{"path": "/program", "op": "replace", "value": [{"image_uuid": NOBODY}]}]
    note("patch_deployable", lambda: sdk.patch_deployable(part.id, program))
    # It recurses without end.
    note("update_deployable", lambda: sdk.update_deployable(part.id, program), RecursionError)

    facts = {"deployable_id": part.id, "key": name, "value": "v"}
    attribute = note("create_attribute", lambda: sdk.create_attribute(**facts))
    listed = note("attributes", lambda: list(sdk.attributes()))
    assert (name, "v") in [(a.key, a.value) for a in listed]
    assert note("get_attribute", lambda: sdk.get_attribute(attribute.id)).key == name
    note("delete_attribute", lambda: sdk.delete_attribute(attribute.id, ignore_missing=False))

    body = {"name": name, "groups": [GROUP]}
    profile = note("create_device_profile", lambda: sdk.create_device_profile(**body))
    note("device_profiles", lambda: list(sdk.device_profiles()))
    assert note("get_device_profile", lambda: sdk.get_device_profile(name)).groups == [GROUP]

    request = {"device_profile_name": name}
    arq = note("create_accelerator_request", lambda: sdk.create_accelerator_request(**request))
    note("accelerator_requests", lambda: list(sdk.accelerator_requests()))
    values = {"hostname": HOST, "device_rp_uuid": cloud.provider, "instance_uuid": str(uuid4())}
    bind = [{"path": f"/{key}", "op": "add", "value": value} for key, value in values.items()]
    unbind = [{"path": f"/{key}", "op": "remove"} for key in values]
    alone = "patch_accelerator_request without a service token"
    rejection = note(
        alone, lambda: sdk.patch_accelerator_request(arq.id, bind), exceptions.ForbiddenException
    )
    assert "requires a service token" in str(rejection)
    note("patch_accelerator_request", lambda: nova.patch_accelerator_request(arq.id, bind))
    bound = note("get_accelerator_request", lambda: sdk.get_accelerator_request(arq.id))
    assert (bound.state, bound.attach_handle_type) == ("Bound", "TEST_PCI")
    wait = {"status": "Bound", "attribute": "state", "interval": 0.1}
    note("wait_for_status", lambda: sdk.wait_for_status(arq, **wait))
    note("update_accelerator_request", lambda: nova.update_accelerator_request(arq.id, unbind))
    assert sdk.get_accelerator_request(arq.id).state == "Unbound"
    note(
        "delete_accelerator_request",
        lambda: sdk.delete_accelerator_request(arq.id, ignore_missing=False),
    )
    note("wait_for_delete", lambda: sdk.wait_for_delete(arq))
    note(
        "delete_device_profile",
        lambda: sdk.delete_device_profile(profile.id, ignore_missing=False),
    )
    _compare(table.rows, "openstacksdk", record_property)
    assert {row.call.split()[0] for row in table.rows} == SDK_CALLS


@pytest.mark.matrix
@pytest.mark.parametrize(
    "distribution",
    ["python-openstackclient", "python-cyborgclient"],
)
def test_openstack_accelerator_commands_succeed(
    keystone_cloud: KeystoneCloud, tmp_path: Path, record_property: Any, distribution: str
) -> None:
    cloud, name = keystone_cloud, f"osc-{uuid4().hex[:8]}"
    table = Table(cloud, name)

    def run(command: str, *words: str, status: int = 0) -> Any:
        return table.record(command, lambda: typed(status, *command.split(), *words))

    def typed(status: int, *words: str) -> Any:
        command = [sys.executable, "-m", osc.__name__, distribution, "accelerator", *words]
        process = start_fork_server().run(command, env, osc.IMPORTED)
        assert "Traceback" not in process.stderr, process.stderr
        assert process.returncode == status, process.stderr
        return json.loads(process.stdout) if "json" in words else process.stderr

    with serve_nova_and_glance() as address:
        env = cloud.keystone.environment("admin") | {
            "HOME": str(tmp_path),
            "PATH": os.environ["PATH"],
            "OS_COMPUTE_ENDPOINT_OVERRIDE": f"{address}/v2.1",
            "OS_IMAGE_ENDPOINT_OVERRIDE": f"{address}/v2",
        }
        (device,) = run("device list", "-f", "json")
        assert device["hostname"] == HOST
        run("device show", device["uuid"])
        run("device disable", device["uuid"])
        run("device enable", device["uuid"])
        (part,) = run("deployable list", "-f", "json")
        run("deployable show", part["uuid"])
        own = distribution == "python-cyborgclient"
        # It calls update_deployable of openstacksdk.
        output = run("deployable program", part["uuid"], NOBODY, status=1 if own else 0)
        assert ("recursion" in output) == own
        attribute = run("device attribute create", part["uuid"], name, "v", "-f", "json")
        assert name in [row["key"] for row in run("device attribute list", "-f", "json")]
        run("device attribute show", attribute["uuid"])
        run("device attribute delete", attribute["uuid"])
        groups = json.dumps([GROUP]) if own else ",".join(f"{k}={v}" for k, v in GROUP.items())
        run("device profile create", name, *([groups] if own else ["--group", groups]))
        assert name in [row["name"] for row in run("device profile list", "-f", "json")]
        run("device profile show", name)
        arq = run("arq create", name, "-f", "json")
        assert arq["uuid"] in [row["uuid"] for row in run("arq list", "-f", "json")]
        run("arq show", arq["uuid"])
        project = ["any"] if own else []
        bind_target = (HOST, str(uuid4()), cloud.provider, *project)
        output = run("arq bind", arq["uuid"], *bind_target, status=1)
        assert "requires a service token" in output
        assert "requires a service token" in run("arq unbind", arq["uuid"], status=1)
        run("arq delete", arq["uuid"])
        run("device profile delete", name)
    _compare(table.rows, distribution, record_property)
    commands = {
        osc.typed_command(entry).removeprefix("accelerator ") for entry in osc.entries(distribution)
    }
    assert {row.call for row in table.rows} == commands


@pytest.mark.matrix
def test_openstacksdk_functional_tests_pass(
    keystone_cloud: KeystoneCloud, tmp_path: Path, record_property: Any
) -> None:
    clouds = {
        "devstack": "member",
        "devstack-alt": "member elsewhere",
        "devstack-admin": "admin",
        "devstack-system-admin": "system admin",
    }
    file = tmp_path / "clouds.yaml"
    file.write_text(
        json.dumps({"clouds": {k: _cloud(keystone_cloud, v) for k, v in clouds.items()}})
    )
    nouns = ("accelerator_request", "attribute", "deployable", "device", "device_profile")
    before = len(keystone_cloud.answers())
    done = subprocess.run(
        [sys.executable, "-m", "unittest"]
        + [f"openstack.tests.functional.accelerator.v2.test_{noun}" for noun in nouns],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OS_CLIENT_CONFIG_FILE": str(file)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The test of attributes is skipped because of a defect in upstream Cyborg.
    assert re.search(r"Ran 7 tests.*\n\nOK \(skipped=1\)", done.stderr), done.stderr
    statuses = {answer.status for answer in keystone_cloud.answers()[before:]}
    assert statuses
    assert max(statuses) < 500


def _connect(identity: session.Session) -> Any:
    return openstack.connection.Connection(session=identity, region_name=REGION).accelerator


def _cloud(cloud: KeystoneCloud, name: str) -> dict[str, Any]:
    login = LOGINS[name]
    scope = (
        {"project_name": login.project, "project_domain_id": "default"}
        if login.scope == "project"
        else {"system_scope": "all"}
    )
    identity = {"username": name, "password": PASSWORD, "user_domain_id": "default"}
    return {"auth": {"auth_url": cloud.keystone.url, **identity, **scope}, "region_name": REGION}


def _compare(rows: list[Row], title: str, record_property: Any) -> None:
    record_property("summary", f"{title}: {len(rows)} calls, none answered 5xx")
    lines = table_lines(rows)
    assert lines == manual_table(title), f"the manual should say of {title}:\n" + "\n".join(lines)
