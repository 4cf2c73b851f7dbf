# SPDX-License-Identifier: Apache-2.0
"""Execute the tutorial of the administration guide and compare its output."""

import configparser
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

from cyborg.tests.fixtures.clouds.keystone_cloud import KeystoneCloud
from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.machine.processes import BIN, Daemon, wait_until
from cyborg.tests.fixtures.machine.tutorial import (
    ADMIN,
    ALONE,
    NOVA,
    PAGE,
    execute,
    sections,
    settings,
    steps,
    write_openrc,
)

PERSONAS = ("nova", "admin", "accelerator_admin", "member", "member elsewhere")
SAID = r"ready: .*--os-endpoint (\S+)"


@contextmanager
def alone(folder: Path) -> Iterator[str]:
    """Run ``cyborg-standalone`` as on the page, on free ports; yield its address."""
    (folder / "cyborg.conf").write_text(settings())
    command = [
        *(BIN / "cyborg-standalone", "--config-file", folder / "cyborg.conf"),
        *("--state-dir", folder / "state", "--port", "0", "--placement-port", "0"),
    ]
    service = Daemon("standalone", command, folder, {})
    service.start()
    try:
        yield wait_until("it is ready", lambda: re.findall(SAID, service.tail(100)))[0]
    finally:
        service.stop()


class TutorialCloud(KeystoneCloud):
    """The cloud of the page, and the files of its users."""

    def __init__(self, folder: Path, database: str, broker: str) -> None:
        super().__init__(folder, database, broker)
        (parser := configparser.ConfigParser()).read_string(settings())
        assert parser["DEFAULT"]["host"] in self.hosts
        self._common |= {key: self._common[key] | dict(parser[key]) for key in ("agent", "fake")}
        # The library is here, and no daemon: the backends of the page have no remark about it.
        self._common["libvirt"] = {"read_domains": "false"}

    def start(self) -> None:
        super().start()
        for name in PERSONAS:
            write_openrc(self.folder, name, self.keystone.environment(name))


def verbs_of(section: str) -> set[str]:
    commands = " ".join(step.command for step in steps(section))
    return set(re.findall(r"\bcyborg ([a-z-]+)", commands))


def test_tutorial_covers_each_command() -> None:
    """test_personas_real.py calls each operation as the other personas."""
    admin_verbs = verbs_of(ADMIN)
    verbs = {entry.name for entry in metadata.entry_points(group="cyborg.cli")}
    assert admin_verbs - verbs == set()
    # Commands with their own pages, and show commands of listed objects.
    others = {"audit", "describe", "outbox-delete", "outbox-list", "outbox-retry", "device-show"}
    others |= {"arq-show", "device-profile-list", "device-profile-show"}
    others |= {"deployable-program", "service-delete", "host-forget", "device-custody"}
    # No device of the tutorial has layouts: the page of the drivers shows these commands.
    others |= {"device-maintain", "device-set-list"}
    others |= {"device-layout-list", "device-layout-set", "limits-show", "top", "topology"}
    assert verbs - admin_verbs - verbs_of(NOVA) == others


@pytest.mark.timeout(1200)
@pytest.mark.matrix
def test_tutorial_standalone_part_matches_output(tmp_path: Path) -> None:
    with alone(tmp_path) as endpoint:
        variables = {"OS_AUTH_TYPE": "none", "OS_ENDPOINT": endpoint}
        assert all(f"   export {name}=" in PAGE.read_text() for name in variables)
        write_openrc(tmp_path, "standalone", variables)
        execute(tmp_path, ALONE, ADMIN)


@pytest.mark.services
@pytest.mark.timeout(1200)
@pytest.mark.matrix
# The commands of an administrator run on one machine too; with keystone they take 40 s of CPU time.
@pytest.mark.parametrize(
    "omitted", [frozenset({ADMIN}), pytest.param(frozenset(), marks=pytest.mark.long)], ids=len
)
def test_tutorial_cloud_part_matches_output(
    tmp_path: Path, rabbit_url: str, omitted: frozenset[str]
) -> None:
    with fresh_database("mysql", tmp_path) as database:
        cloud = TutorialCloud(tmp_path, database, rabbit_url)
        try:
            cloud.start()
            execute(tmp_path, *sections() - {ALONE, NOVA} - omitted)
        finally:
            cloud.stop()
