# SPDX-License-Identifier: Apache-2.0
"""API, conductor and agent start with converted configurations of OpenStack Cyborg.

Every option of each release, and files as deployments have them, on RabbitMQ and MariaDB. There
is no keystone and no Placement: the services wait for them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from uuid import uuid4

import kombu
import pytest
import requests
import sqlalchemy as sa

from cyborg.cmd import status
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.databases import engine_of, fresh_database
from cyborg.tests.fixtures.machine.processes import BIN, Daemon, free_port, ini, wait_until
from cyborg.tests.fixtures.migration import former_configs

pytestmark = [pytest.mark.services, pytest.mark.matrix]

KEYSTONE = "http://127.0.0.1:1/v3"
LOGGING = """[loggers]
keys = root
[handlers]
keys = console
[formatters]
keys =
[logger_root]
level = INFO
handlers = console
[handler_console]
class = StreamHandler
args = (sys.stderr,)
"""
FIRST_FIELD, FIRST_RELEASE = "kolla-ansible", former_configs.RELEASES[-1]


def long(cases: tuple[str, ...], first: str) -> list[object]:
    """Return the cases as parameters; all but the first one need the extended tier."""
    return [case if case == first else pytest.param(case, marks=pytest.mark.long) for case in cases]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with fresh_database("mysql", tmp_path_factory.mktemp("database")) as url:
        with engine_of(url) as engine:
            schema.metadata.create_all(engine)
        yield url


class Installation:
    """The three services, started with one configuration as the commands of the guide do."""

    def __init__(self, folder: Path, former: str, port: int, broker: str, database: str) -> None:
        self._folder = folder
        self._port = port
        self._broker = broker
        self._database = database
        self._topic = f"test-{uuid4().hex[:12]}"
        (folder / "old.conf").write_text(former)
        new = folder / "new.conf"
        assert status.main(["convert-config", str(folder / "old.conf"), "--output", str(new)]) == 0
        # What belongs to the tests: the broker is shared, and so is /var/lib/cyborg.
        more: Mapping[str, Mapping[str, object]] = {
            "DEFAULT": {"state_path": folder, "host": self._topic},
            "rpc": {"topic": self._topic},
            "conductor": {"hello_interval": 0.5},
            "oslo_messaging_rabbit": {"rabbit_transient_queues_ttl": 60},
        }
        (folder / "tests.conf").write_text(ini(more))
        files = ["--config-file", new, "--config-file", folder / "tests.conf"]
        self.daemons = [
            Daemon(name, [BIN / f"cyborg-{name}", *files], folder, {}, forked=True)
            for name in ("conductor", "agent", "api")
        ]

    def start(self) -> None:
        """Start the services, and wait until each says hello and the API answers."""
        for daemon in self.daemons:
            daemon.start()
        wait_until("the API answers", self._answers)  # its worker connects at the first request
        expected = {"cyborg-agent", "cyborg-api", "cyborg-conductor"}
        with engine_of(self._database) as engine:
            wait_until("each says hello", lambda: self._binaries(engine) == expected)

    def stop(self) -> None:
        """Stop the services, and delete the queues that outlive them."""
        try:
            assert [daemon.stop() for daemon in self.daemons] == [0, 0, 0]
        finally:
            self._delete_queues()

    def _binaries(self, engine: sa.Engine) -> set[str]:
        found = rows.read(engine, schema.services)
        return {row["binary"] for row in found if row["host"] == self._topic}

    def _answers(self) -> bool:
        try:
            root = f"http://127.0.0.1:{self._port}"
            health = requests.get(f"{root}/healthcheck", timeout=5).status_code
            return health == 200 and requests.get(f"{root}/v2/", timeout=5).status_code in (
                200,
                401,
            )
        except requests.ConnectionError:
            return False

    def _delete_queues(self) -> None:
        with kombu.Connection(self._broker.replace("rabbit://", "amqp://", 1)) as connection:
            for kind in ("conductor", "agent"):
                for name in (f"{self._topic}.{kind}", f"{self._topic}.{kind}.{self._topic}"):
                    kombu.Queue(name, channel=connection.default_channel).delete()


def start_and_stop(folder: Path, former: str, port: int, broker: str, database: str) -> None:
    installation = Installation(folder, former, port, broker, database)
    try:
        installation.start()
        installation.stop()
    finally:
        for daemon in installation.daemons:
            daemon.kill()
    for file in folder.glob("*.log"):
        assert "Traceback" not in file.read_text(), file


@pytest.mark.parametrize("release", long(former_configs.RELEASES, FIRST_RELEASE))
def test_services_start_with_every_option_of_a_release(
    release: str, tmp_path: Path, rabbit_url: str, database: str
) -> None:
    port = free_port()
    (tmp_path / "logging.conf").write_text(LOGGING)
    former = former_configs.make_settings(
        release,
        {
            "DEFAULT": {
                "transport_url": rabbit_url,
                "log_config_append": tmp_path / "logging.conf",
                "log_dir": tmp_path,
                "log_file": "cyborg.log",
            },
            "api": {"port": port, "host_ip": "127.0.0.1"},
            "database": {"connection": database, "slave_connection": database},
        },
    )
    start_and_stop(tmp_path, former_configs.render(former), port, rabbit_url, database)


@pytest.mark.parametrize(
    "name", long(tuple(n for n in former_configs.FIELD if n != "agent"), FIRST_FIELD)
)
def test_services_start_with_a_configuration_of_the_field(
    name: str, tmp_path: Path, rabbit_url: str, database: str
) -> None:
    port = free_port()
    places = {
        "BROKER": rabbit_url,
        "DATABASE": database,
        "KEYSTONE": KEYSTONE,
        "LOGS": str(tmp_path),
        "PORT": str(port),
        "STATE": str(tmp_path),
    }
    former = former_configs.read_field(name, places)
    start_and_stop(tmp_path, former, port, rabbit_url, database)
