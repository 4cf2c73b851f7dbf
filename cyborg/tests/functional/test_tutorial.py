# SPDX-License-Identifier: Apache-2.0
"""Execute the tutorial of the administration guide and compare its output."""

import configparser
import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

import cyborg
from cyborg.tests.fixtures.clouds.keystone_cloud import KeystoneCloud
from cyborg.tests.fixtures.databases.databases import fresh_database
from cyborg.tests.fixtures.machine.processes import BIN, Daemon, wait_until
from cyborg.tests.fixtures.machine.shell import shell
from cyborg.tests.fixtures.machine.transcript import Step, follow, parse

PAGE = Path(cyborg.__file__).parents[1] / "doc/source/admin/tutorial.rst"
ALONE, ADMIN = "On one machine", "As an administrator"
PERSONAS = ("nova", "admin", "accelerator_admin", "member", "member elsewhere")
SAID = r"ready: .*--os-endpoint (\S+)"


def steps(*sections: str) -> list[Step]:
    """Return the commands of these sections of the page."""
    selected = [step for step in parse(PAGE.read_text()) if step.section in sections]
    assert {step.section for step in selected} == set(sections)
    return selected


def settings() -> str:
    """Return the configuration of the page."""
    (block,) = re.findall(r"\.\. code-block:: ini\n\n((?:   .+\n|\n)+)", PAGE.read_text())
    return textwrap.dedent(block)


def openrc(folder: Path, name: str, variables: Mapping[str, str]) -> None:
    lines = [f"export {key}={shlex.quote(value)}\n" for key, value in variables.items()]
    (folder / f"{re.sub('[ _]', '-', name)}-openrc").write_text("".join(lines))


def walk(folder: Path, *sections: str) -> None:
    """Execute these sections in a folder with the required files."""
    env = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(folder), "LANG": "C.UTF-8"}
    with shell(folder, env) as session:
        follow(steps(*sections), PAGE.name, session)


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

    def start(self) -> None:
        super().start()
        for name in PERSONAS:
            openrc(self.folder, name, self.keystone.environment(name))


def verbs_of(section: str) -> set[str]:
    commands = " ".join(step.command for step in steps(section))
    return set(re.findall(r"\bcyborg ([a-z-]+)", commands))


def test_tutorial_covers_each_command() -> None:
    admin_verbs = verbs_of(ADMIN)
    verbs = {entry.name for entry in metadata.entry_points(group="cyborg.cli")}
    assert admin_verbs - verbs == set()
    # Commands with their own pages, and show commands of listed objects.
    others = {"audit", "outbox-delete", "outbox-list", "outbox-retry", "device-show"}
    others |= {"arq-list", "arq-show", "device-profile-list", "device-profile-show"}
    others |= {"deployable-program", "service-delete", "device-custody"}
    # No device of the tutorial has layouts: the page of the drivers shows these commands.
    others |= {"device-layout-list", "device-layout-set"}
    assert verbs - admin_verbs == others
    # The policy tests cover the other personas.
    unrepeatable = {"device-profile-delete", "device-list", "device-disable", "device-enable"}
    unrepeatable |= {"deployable-list", "attribute-create", "attribute-list", "attribute-delete"}
    for section in ("As an accelerator administrator", "As a member of a project"):
        assert admin_verbs - verbs_of(section) <= unrepeatable, section


@pytest.mark.timeout(600)
@pytest.mark.matrix
def test_tutorial_standalone_part_matches_output(tmp_path: Path) -> None:
    with alone(tmp_path) as endpoint:
        variables = {"OS_AUTH_TYPE": "none", "OS_ENDPOINT": endpoint}
        assert all(f"   export {name}=" in PAGE.read_text() for name in variables)
        openrc(tmp_path, "standalone", variables)
        walk(tmp_path, ALONE, ADMIN)


@pytest.mark.services
@pytest.mark.timeout(600)
@pytest.mark.matrix
def test_tutorial_cloud_part_matches_output(tmp_path: Path, rabbit_url: str) -> None:
    sections = {step.section for step in parse(PAGE.read_text())} - {ALONE}
    with fresh_database("mysql", tmp_path) as database:
        cloud = TutorialCloud(tmp_path, database, rabbit_url)
        try:
            cloud.start()
            walk(tmp_path, *sections)
        finally:
            cloud.stop()
