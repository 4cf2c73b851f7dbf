# SPDX-License-Identifier: Apache-2.0
"""A cloud of replayed hosts for the console, without authentication and with a double of keystone.

Both APIs are in one process and have the same conductor and the same database.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keystoneauth1 import loading
from keystonemiddleware import opts
from oslo_config import cfg
from oslo_policy import opts as policy

from cyborg.api.app import make_app
from cyborg.standalone.http import HttpServer
from cyborg.testing.fake_keystone import FakeKeystone, serve_keystone
from cyborg.tests.fixtures.clouds.filled_service import insert_lost_agent
from cyborg.tests.fixtures.clouds.served_api import MOUNT, mounted
from cyborg.tests.fixtures.hosts.replayed_hosts import ReplayedCloud, running
from cyborg.tests.fixtures.machine.options import make_conf

HOSTS = ("compute-1", "compute-2")
GPU, DRIVE, QAT, BROKEN_QAT = "0000:3b:00.0", "0000:5e:00.0", "0000:6b:00.0", "0000:e8:00.0"
BROKEN_HOST, LOST_HOST = "compute-2", "compute-3"
FAULTS = {BROKEN_HOST: f"{DRIVE}:eio@erase,{BROKEN_QAT}:stuck_reset"}
HOSTILE_NAME = "<img src=x onerror=alert(1)>"
PASSWORD = "correct horse"
USERS = {
    "admin": ("admin", "member", "reader"),
    "member": ("member", "reader"),
    "reader": ("reader",),
    "auditor": ("reader", "auditor"),
}
AUDITOR = "auditor"
# The policy of the API with keystone: a role that reads devices.
POLICY = """\
"cyborg:device:get_all": "rule:elevated or role:auditor"
"cyborg:device:get_one": "rule:elevated or role:auditor"
"""


@dataclass(frozen=True)
class ConsoleService:
    """The cloud, the root URLs of its two APIs, and the double of keystone."""

    cloud: ReplayedCloud
    url: str
    keystone_url: str
    keystone: FakeKeystone


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[ConsoleService]:
    """Run the service until the end of the block, with a few objects of each kind."""
    with (
        serve_keystone() as keystone,
        running(folder, HOSTS, faults=FAULTS, health_interval=2.0) as cloud,
        _serve_with_keystone(folder, cloud, keystone) as url,
    ):
        for name, roles in USERS.items():
            keystone.add_user(name, PASSWORD, roles, "project-1")
        _fill(cloud)
        yield ConsoleService(cloud, cloud.stack.endpoint, url, keystone)


@contextlib.contextmanager
def _serve_with_keystone(
    folder: Path, cloud: ReplayedCloud, keystone: FakeKeystone
) -> Iterator[str]:
    conf = keystone_conf(keystone)
    (folder / "policy.yaml").write_text(POLICY)
    policy.set_defaults(conf)
    # An override of this configuration: a default would be one of all tests of this process.
    conf.set_override("policy_file", str(folder / "policy.yaml"), group="oslo_policy")
    server = HttpServer("127.0.0.1", 0, "port")
    # Below a prefix, as behind many web servers.
    server.start(mounted(make_app(conf, cloud.stack.conductor, cloud.stack.reader)))
    try:
        yield server.url + MOUNT
    finally:
        server.stop()


def keystone_conf(keystone: FakeKeystone) -> cfg.ConfigOpts:
    """Return the configuration of an API with the console that authenticates with the double."""
    conf = make_conf(api={"console": True})
    for group, options in opts.list_auth_token_opts():
        conf.register_opts(options, group=group)
    plugin: Any = loading.get_plugin_loader("admin_token")
    conf.register_opts(loading.get_auth_plugin_conf_options(plugin), group="keystone_authtoken")
    values = {**keystone.options(), "www_authenticate_uri": f"{keystone.url}/v3"}
    for name, value in values.items():
        conf.set_override(name, value, group="keystone_authtoken")
    return conf


def _fill(cloud: ReplayedCloud) -> None:
    """Bind requests, close a device, and break one."""
    for host, address, resource_class in (
        ("compute-1", GPU, "VGPU"),
        ("compute-1", GPU, "VGPU"),
        ("compute-2", "0000:af:00.0", "VGPU"),
        ("compute-1", DRIVE, "CUSTOM_NVME"),
    ):
        cloud.bind(host, address, resource_class)
    # It cannot be erased: its handle stays in error.
    cloud.release(cloud.bind(BROKEN_HOST, DRIVE, "CUSTOM_NVME"))
    # It does not come back from the reset, and becomes unhealthy.
    broken = cloud.device(BROKEN_HOST, BROKEN_QAT)["uuid"]
    cloud.call("PUT", f"devices/{broken}/layout", json={"layout": "dc"})
    insert_lost_agent(cloud.engine, LOST_HOST)
    closed = cloud.device("compute-1", QAT)["uuid"]
    cloud.call("POST", f"devices/{closed}/disable")
    context = {"name": HOSTILE_NAME, "resources": {"VGPU": 1}, "description": "compression"}
    cloud.call("POST", "device_contexts", json=context)
    group = {"resources:CUSTOM_VF": "1", "accel:attach_target": "host"}
    cloud.call("POST", "device_profiles", json=[{"name": "for-host", "groups": [group]}])
    attachment = {"hostname": BROKEN_HOST, "device_profile": "for-host"}
    cloud.call("POST", "attachments", json=attachment)
