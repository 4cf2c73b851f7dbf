# SPDX-License-Identifier: Apache-2.0
"""The two installations that ``tools/bench boot`` drives, each of counted processes."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kombu
import requests
import sqlalchemy as sa
from keystoneauth1 import adapter

from cyborg.fixtures import keystone, nova
from cyborg.fixtures.broker import DEFAULT as RABBIT
from cyborg.fixtures.broker import MEMORY
from cyborg.fixtures.cloud import Cloud
from cyborg.fixtures.databases import engine_of, fresh_database
from cyborg.fixtures.processes import BIN, Daemon, ini, until

COUNTER = Path(__file__).with_name("_bench_counted.py")
HOST = "compute-1"
DEVICES, HANDLES = 4, 32
WORKERS, THREADS = 2, 8
PROJECT = "project-1"
ADMIN = ("admin", "member", "reader")


@dataclass
class Bed:
    """A running installation. ``groups`` are the pids of the leaders of its sessions by group."""

    mode: str
    endpoint: str
    engine: sa.Engine
    url: str
    bus: str
    counters: Path
    groups: Mapping[str, Sequence[int]]
    servers: Mapping[str, int]
    providers: Sequence[str]
    headers: Mapping[str, str]
    admin: Mapping[str, str]
    daemons: Sequence[Daemon]
    config: Path

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"--- {d.name}\n{d.tail()}" for d in self.daemons)


class CountedCloud(Cloud):
    """The cloud of the tests with one conductor and one agent, whose processes are counted."""

    counters: Path

    def add(self, name: str, command: list[Any], **env: str) -> Daemon:
        """Start a process; ours with the counter around it."""
        group = name.partition("-")[0]
        if group in ("api", "conductor", "agent"):
            command = [sys.executable, COUNTER, self.counters, group, *command]
        return super().add(name, command, **env)

    def begin(self, **sections: Mapping[str, Any]) -> None:
        """Bring everything up, with more sections of configuration."""
        for section, options in sections.items():
            self._common[section] = {**self._common.get(section, {}), **options}
        auth = self._common["DEFAULT"]["auth_strategy"]
        api = self.config("api", host="controller", auth_strategy=auth)
        self.add("dbsync", [BIN / "cyborg-dbsync", "--config-file", api, "upgrade"])
        until("the tables are made", lambda: not self.daemons["dbsync"].alive())
        self._start_placement()
        for name, host in (("conductor", "controller"), ("agent", HOST)):
            path = self.config(name, host=host)
            self.add(name, [BIN / f"cyborg-{name}", "--config-file", path])
        command = [
            *(BIN / "gunicorn", "--workers", WORKERS, "--worker-class", "gthread"),
            *("--threads", THREADS, "--keep-alive", "75", "--no-control-socket"),
            *("--bind", f"127.0.0.1:{self.port}", "cyborg.wsgi.api:application"),
        ]
        self.add("api", command, OS_CYBORG_CONFIG_FILES=str(api))
        until("the API is healthy", lambda: self._answers(f"{self.endpoint}/healthcheck"))


@contextlib.contextmanager
def cloud(folder: Path, auth: str) -> Iterator[Bed]:
    """Run a cloud on MariaDB and RabbitMQ, with a keystone and a Nova that are doubles."""
    broker = os.environ.get("CYBORG_TEST_RABBIT", RABBIT)
    with kombu.Connection(broker.replace("rabbit", "amqp", 1), connect_timeout=5) as line:
        line.ensure_connection(max_retries=1)
        port = line.port or 5672
    with contextlib.ExitStack() as undo:
        url = undo.enter_context(fresh_database("mysql", folder))
        engine = undo.enter_context(engine_of(url))
        known = undo.enter_context(keystone.serving())
        told = undo.enter_context(nova.serving(nova.FakeNova()))
        running = CountedCloud(folder, url, broker, (HOST,), HANDLES)
        running.counters = folder / "counters"
        running.counters.mkdir()
        undo.callback(running.stop)
        sections = _sections() | {
            "nova": {
                "notify": "true",
                "auth_type": "none",
                "endpoint_override": told.url,
            }
        }
        if auth == "keystone":
            sections |= {
                "DEFAULT": {"auth_strategy": "keystone"},
                "keystone_authtoken": known.options(),
            }
        member, admin = known.token(["member", "reader"], PROJECT), known.token(ADMIN, "admin")
        service = {"X-Service-Token": known.token(["service"], "service")}
        daemons = running.daemons
        try:
            running.begin(**sections)
            yield Bed(
                mode="cloud",
                endpoint=running.endpoint,
                engine=engine,
                url=url,
                bus=broker,
                counters=running.counters,
                groups={g: [daemons[g].pid] for g in ("api", "conductor", "agent")},
                servers={"database": engine.url.port or 3306, "broker": port},
                providers=_providers(running.placement, daemons),
                headers={"X-Auth-Token": member, "X-Project-Id": PROJECT, **service},
                admin={"X-Auth-Token": admin, **service},
                daemons=list(daemons.values()),
                config=folder / "api" / "cyborg.conf",
            )
        except BaseException:
            sys.stderr.write(running.logs())
            raise


@contextlib.contextmanager
def standalone(folder: Path, auth: str) -> Iterator[Bed]:
    """Run the stand-alone service."""
    del auth  # it knows none
    counters = folder / "counters"
    counters.mkdir()
    file = folder / "service.conf"
    file.write_text(ini({"DEFAULT": {"host": HOST}, **_sections()}))
    command = [
        *(sys.executable, COUNTER, counters, "standalone", BIN / "cyborg-standalone"),
        *("--config-file", file, "--state-dir", folder / "state"),
        *("--port", "0", "--placement-port", "0"),
    ]
    daemon = Daemon("standalone", command, folder, {})
    daemon.start()

    def said(pattern: str) -> str | None:
        if not daemon.alive():
            raise RuntimeError(daemon.tail())
        found = re.findall(pattern, daemon.log.read_text())
        return str(found[-1]) if found else None

    url = f"sqlite:///{folder}/state/cyborg.db"
    try:
        endpoint = until("the service is ready", lambda: said(r"ready: .*--os-endpoint (\S+)"))
        placement = said(r"Placement listens on (\S+)")
        with engine_of(url) as engine:
            yield Bed(
                mode="standalone",
                endpoint=endpoint,
                engine=engine,
                url=url,
                bus=MEMORY,
                counters=counters,
                groups={"standalone": [daemon.pid]},
                servers={},
                providers=_providers(_Rest(placement or ""), {"standalone": daemon}),
                headers={"X-Project-Id": PROJECT},
                admin={},
                daemons=[daemon],
                config=file,
            )
    except BaseException:
        sys.stderr.write(daemon.tail())
        raise
    finally:
        daemon.stop()


MODES = {"cloud": cloud, "standalone": standalone}


class _Rest:
    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str) -> requests.Response:
        head = {"X-Auth-Token": "admin", "OpenStack-API-Version": "placement 1.39"}
        return requests.get(self._url + path, headers=head, timeout=10)


def _sections() -> dict[str, dict[str, Any]]:
    # The usual intervals. No reconciler and no audit: the other requests and their providers are
    # not in Placement.
    return {
        "agent": {"enabled_drivers": "fake", "discovery_interval": 60},
        "fake": {"num_devices": DEVICES, "num_handles": HANDLES},
        "conductor": {
            **{"hello_interval": 10, "publish_interval": 5},
            **{"reconcile_interval": 0, "audit_interval": 86400},
        },
    }


def _providers(placement: "adapter.Adapter | _Rest", daemons: Mapping[str, Daemon]) -> list[str]:
    def offered() -> list[str]:
        if dead := [d for name, d in daemons.items() if name != "dbsync" and not d.alive()]:
            raise RuntimeError(f"{dead[0].name} has ended: {dead[0].tail()}")
        answer = placement.get("/resource_providers?resources=FPGA:1").json()
        found = [one["uuid"] for one in answer["resource_providers"]]
        return found if len(found) == DEVICES else []

    return sorted(until("the fake cards are in Placement", offered))
