# SPDX-License-Identifier: Apache-2.0
"""The two installations for ``tools/bench boot``, with counters in all processes."""

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kombu
import requests
import sqlalchemy as sa

from cyborg.testing import fake_keystone, fake_nova
from cyborg.tests.fixtures.bus.broker import DEFAULT as RABBIT
from cyborg.tests.fixtures.bus.broker import MEMORY
from cyborg.tests.fixtures.clouds.cloud import Cloud
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.machine.processes import BIN, Daemon, ini, wait_until

COUNTER = Path(__file__).with_name("counter.py")
HOST = "compute-1"
PROJECT = "project-1"
ADMIN = ("admin", "member", "reader")
DEVICES, HANDLES = 4, 32
THREADS = 8
WORKER_OPTIONS = (
    *("--worker-class", "gthread", "--threads", str(THREADS)),
    *("--keep-alive", "75", "--no-control-socket"),
)

# The usual intervals, but no orphan scan and no verification: the other ARQs and their providers
# are not in Placement.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "agent": {"enabled_drivers": "fake", "discovery_interval": 60},
    "fake": {"num_devices": DEVICES, "num_handles": HANDLES},
    "conductor": {
        **{"hello_interval": 10, "publish_interval": 5},
        **{"orphan_scan_interval": 0, "placement_verify_interval": 86400},
        "max_project_arqs": -1,
    },
}


@dataclass
class Installation:
    """A running installation.

    ``groups`` maps a group of processes to the pid of its session leader, ``servers`` the name of
    another server to its port. ``headers`` are those of Nova for a member.
    """

    mode: str
    endpoint: str
    engine: sa.Engine
    url: str
    bus: str
    counters: Path
    groups: Mapping[str, int]
    servers: Mapping[str, int]
    providers: Sequence[str]
    headers: Mapping[str, str]
    admin: Mapping[str, str]


class CountedCloud(Cloud):
    """The cloud of the tests, with counters in the processes of Cyborg."""

    def add(self, name: str, command: list[Any], **env: str) -> Daemon:
        """Start a process; processes of Cyborg run with the counter."""
        group = name.partition("-")[0]
        if group in ("api", "conductor", "agent"):
            command = [sys.executable, COUNTER, self.folder / "counters", group, *command]
        return super().add(name, command, **env)


@contextlib.contextmanager
def run_cloud(folder: Path, auth: str) -> Iterator[Installation]:
    """Run a cloud with MariaDB, RabbitMQ, and test doubles of keystone and Nova."""
    broker = os.environ.get("CYBORG_TEST_RABBIT", RABBIT)
    with kombu.Connection(broker.replace("rabbit", "amqp", 1), connect_timeout=5) as connection:
        connection.ensure_connection(max_retries=1)
        port = connection.port or 5672
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(fresh_database("mysql", folder))
        engine = stack.enter_context(engine_of(url))
        keystone = stack.enter_context(fake_keystone.serve_keystone())
        nova = stack.enter_context(fake_nova.serve_nova(fake_nova.FakeNova()))
        override = {"send_events": "true", "auth_type": "none", "endpoint_override": nova.url}
        options = {**OPTIONS, "nova": override}
        if auth == "keystone":
            options["DEFAULT"] = {"auth_strategy": "keystone"}
            options["keystone_authtoken"] = keystone.options()
        cloud = CountedCloud(folder, url, broker, (HOST,), HANDLES, options=options, forked=False)
        stack.callback(cloud.stop)
        service = {"X-Service-Token": keystone.issue_token(["service"], "service")}
        member = keystone.issue_token(["member", "reader"], PROJECT)
        try:
            cloud.prepare()
            leaders = {"conductor": cloud.conductor("conductor"), "agent": cloud.agent(HOST)}
            cloud.start_api(*WORKER_OPTIONS)
            leaders = {"api": cloud.daemons["api"], **leaders}
            yield Installation(
                mode="cloud",
                endpoint=cloud.endpoint,
                engine=engine,
                url=url,
                bus=broker,
                counters=folder / "counters",
                groups={group: daemon.pid for group, daemon in leaders.items()},
                servers={"database": engine.url.port or 3306, "broker": port},
                providers=_wait_for_providers(cloud.placement_port, cloud.daemons.values()),
                headers={"X-Auth-Token": member, "X-Project-Id": PROJECT, **service},
                admin={"X-Auth-Token": keystone.issue_token(ADMIN, "admin"), **service},
            )
        except BaseException:
            sys.stderr.write(cloud.logs())
            raise


@contextlib.contextmanager
def run_standalone(folder: Path, auth: str) -> Iterator[Installation]:
    """Run the stand-alone service."""
    del auth  # noauth only
    file = folder / "service.conf"
    file.write_text(ini({"DEFAULT": {"host": HOST}, **OPTIONS}))
    command = [
        *(sys.executable, COUNTER, folder / "counters", "standalone", BIN / "cyborg-standalone"),
        *("--config-file", file, "--state-dir", folder / "state"),
        *("--port", "0", "--placement-port", "0"),
    ]
    daemon = Daemon("standalone", command, folder, {})
    daemon.start()

    def find_endpoints() -> list[str]:
        if not daemon.alive():
            raise RuntimeError("the service has ended")
        log = daemon.log.read_text()
        pattern = r"(?s)Placement listens on \S+:(\d+).*ready: .*--os-endpoint (\S+)"
        return list(found.groups()) if (found := re.search(pattern, log)) else []

    try:
        placement_port, endpoint = wait_until("the service is ready", find_endpoints)
        url = f"sqlite:///{folder}/state/cyborg.db"
        with engine_of(url) as engine:
            yield Installation(
                mode="standalone",
                endpoint=endpoint,
                engine=engine,
                url=url,
                bus=MEMORY,
                counters=folder / "counters",
                groups={"standalone": daemon.pid},
                servers={},
                providers=_wait_for_providers(int(placement_port), [daemon]),
                headers={"X-Project-Id": PROJECT},
                admin={},
            )
    except BaseException:
        sys.stderr.write(daemon.tail())
        raise
    finally:
        daemon.stop()


MODES = {"cloud": run_cloud, "standalone": run_standalone}


def _wait_for_providers(port: int, daemons: Iterable[Daemon]) -> list[str]:
    """Wait until the fake cards are in Placement and return their providers."""
    url = f"http://127.0.0.1:{port}/resource_providers?resources=FPGA:1"
    headers = {"X-Auth-Token": "admin", "OpenStack-API-Version": "placement 1.39"}

    def list_providers() -> list[str]:
        for daemon in daemons:
            if not daemon.alive():
                raise RuntimeError(f"{daemon.name} has ended: {daemon.tail()}")
        answer = requests.get(url, headers=headers, timeout=10).json()
        uuids = [provider["uuid"] for provider in answer["resource_providers"]]
        return uuids if len(uuids) == DEVICES else []

    return sorted(wait_until("the fake cards are in Placement", list_providers))
