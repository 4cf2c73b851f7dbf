# SPDX-License-Identifier: Apache-2.0
"""The tutorial of the administration guide is executed, and prints what it says."""

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
from cyborg.fixtures.databases import fresh_database
from cyborg.fixtures.keystone_cloud import KeystoneCloud
from cyborg.fixtures.processes import BIN, Daemon, until
from cyborg.fixtures.shell import shell
from cyborg.fixtures.transcript import Step, follow, parse

PAGE = Path(cyborg.__file__).parents[1] / "doc/source/admin/tutorial.rst"
ALONE, ADMIN = "On one machine", "As an administrator"
PERSONAS = ("nova", "admin", "accelerator_admin", "member", "member elsewhere")
SAID = r"ready: .*--os-endpoint (\S+)"


def steps(*sections: str) -> list[Step]:
    """Return the commands of these sections, as they stand on the page."""
    found = [step for step in parse(PAGE.read_text()) if step.section in sections]
    assert {step.section for step in found} == set(sections)
    return found


def settings() -> str:
    """Return the configuration that the page gives."""
    (block,) = re.findall(r"\.\. code-block:: ini\n\n((?:   .+\n|\n)+)", PAGE.read_text())
    return textwrap.dedent(block)


def openrc(folder: Path, name: str, variables: Mapping[str, str]) -> None:
    lines = [f"export {key}={shlex.quote(value)}\n" for key, value in variables.items()]
    (folder / f"{re.sub('[ _]', '-', name)}-openrc").write_text("".join(lines))


def walk(folder: Path, *sections: str) -> None:
    """Do what these sections say, in a folder with the files that they ask for."""
    env = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(folder), "LANG": "C.UTF-8"}
    with shell(folder, env) as its:
        follow(steps(*sections), PAGE.name, its)


@contextmanager
def alone(folder: Path) -> Iterator[str]:
    """Run ``cyborg-standalone`` as the page says, on any ports; give its address."""
    (folder / "cyborg.conf").write_text(settings())
    command = [
        *(BIN / "cyborg-standalone", "--config-file", folder / "cyborg.conf"),
        *("--state-dir", folder / "state", "--port", "0", "--placement-port", "0"),
    ]
    service = Daemon("standalone", command, folder, {})
    service.start()
    try:
        yield until("it is ready", lambda: re.findall(SAID, service.tail(100)))[0]
    finally:
        service.stop()


class TutorialCloud(KeystoneCloud):
    """The cloud of the page, and the files of its users."""

    def __init__(self, folder: Path, database: str, broker: str) -> None:
        super().__init__(folder, database, broker)
        (told := configparser.ConfigParser()).read_string(settings())
        assert told["DEFAULT"]["host"] in self.hosts
        self._common |= {key: self._common[key] | dict(told[key]) for key in ("agent", "fake")}

    def start(self) -> None:
        super().start()
        for name in PERSONAS:
            openrc(self.folder, name, self.keystone.environment(name))


def verbs_of(section: str) -> set[str]:
    commands = " ".join(step.command for step in steps(section))
    return set(re.findall(r"\bcyborg ([a-z-]+)", commands))


def test_every_verb_that_there_is() -> None:
    told = verbs_of(ADMIN)
    verbs = {entry.name for entry in metadata.entry_points(group="cyborg.cli")}
    assert told - verbs == set()
    # What has pages of its own, and what only shows what a list has shown.
    others = {"audit", "outbox-delete", "outbox-list", "outbox-retry", "device-list", "device-show"}
    others |= {"arq-list", "arq-show", "device-profile-list", "device-profile-show"}
    assert verbs - told == others
    for section in ("As an accelerator administrator", "As a member of a project"):
        assert told - verbs_of(section) <= {"device-profile-delete"}, section


def test_on_one_machine(tmp_path: Path) -> None:
    with alone(tmp_path) as endpoint:
        variables = {"OS_AUTH_TYPE": "none", "OS_ENDPOINT": endpoint}
        assert all(f"   export {name}=" in PAGE.read_text() for name in variables)
        openrc(tmp_path, "standalone", variables)
        walk(tmp_path, ALONE, ADMIN)


@pytest.mark.services
@pytest.mark.timeout(600)
def test_on_a_cloud(tmp_path: Path, rabbit_url: str) -> None:
    sections = {step.section for step in parse(PAGE.read_text())} - {ALONE}
    with fresh_database("mysql", tmp_path) as database:
        cloud = TutorialCloud(tmp_path, database, rabbit_url)
        try:
            cloud.start()
            walk(tmp_path, *sections)
        finally:
            cloud.stop()
