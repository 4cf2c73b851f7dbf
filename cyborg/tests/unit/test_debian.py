# SPDX-License-Identifier: Apache-2.0
"""The files of the Debian package agree with setup.cfg; tools/test-package builds it."""

import configparser
from importlib import metadata

import pytest

from cyborg.tests.fixtures.machine.prerequisites import ROOT

pytestmark = pytest.mark.static


def test_package_links_each_command() -> None:
    lines = (ROOT / "debian" / "links").read_text().splitlines()
    entries = metadata.distribution("cyborg").entry_points.select(group="console_scripts")
    names = [entry.name for entry in entries]
    assert sorted(lines) == sorted(f"opt/cyborg/bin/{name} usr/bin/{name}" for name in names)


def test_package_has_the_version_of_the_project() -> None:
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    first = (ROOT / "debian" / "changelog").read_text().partition("\n")[0]
    assert first.split()[1] in {f"({setup['metadata']['version']}{end})" for end in ("", "~dev")}
